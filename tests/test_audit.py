"""The audit finds what is wrong with a run, and nothing wrong with one that is right."""

import contextlib
import json
import re
import shutil
import sqlite3

import numpy as np
import pytest
import yaml

from jaxrl.audit import audit, main
from jaxrl.records.ledger import FILE
from jaxrl.records.ledger.database import SEALED
from jaxrl.records.sealed_tables import seal
from jaxrl.tools.audit.lineage_checks import sign_flip_p
from jaxrl.train import BasePPOExp, train
from jaxrl.trainer import Trainer
from tests.records.ledger.scribe import Scribe, failed, uid
from tests.test_train import small


@pytest.fixture
def scribe(tmp_path):
    scribe = Scribe(tmp_path)
    scribe.begin()
    yield scribe
    scribe.ledger.close()


# ------------------------------------------------------------------ what is right


def test_a_synchronous_run_that_crashed_twice(scribe):
    scribe.step(1)
    saved = scribe.ledger.position()
    scribe.step(2, tokens=6)
    scribe.hand_out(2, 4, 5)  # step 3 was being sampled
    assert not failed(scribe.checks())
    scribe.ledger.close()
    scribe.begin(1, saved, first=2)
    checks = scribe.checks()  # killed again before it handed out anything
    assert not failed(checks)
    assert checks["no prompt skipped"].figures["to be handed out again"] == 4
    scribe.ledger.close()
    scribe.begin(1, saved, first=2)
    scribe.step(2, tokens=6)
    scribe.step(3)
    checks = scribe.checks()
    assert not failed(checks)
    figures = {name: check.figures for name, check in checks.items()}
    assert figures["history"] == {"attempts": 3, "resumed": 2, "finished steps": 3}
    assert figures["no prompt skipped"] == {
        "handed out": 6,
        "from": 0,
        "skipped": 0,
        "twice": 0,
        "to be handed out again": 0,
    }
    assert figures["in flight"]["at crashes"] == 2
    assert figures["in flight"]["of these handed out again"] == 2
    assert figures["none trained twice"] == {"trained": 12, "twice": 0}
    assert figures["steps"] == {"finished": 3, "done again after a crash": 1}
    assert figures["no length bias"]["thrown away"] == 4
    assert figures["no length bias"]["p"] == "1.0000"
    assert checks["recorded rollouts"].result == "unknown"


def test_a_free_run_that_crashed_with_prompts_in_flight_and_in_the_buffer(tmp_path):
    scribe = Scribe(tmp_path, "free")
    scribe.begin()
    groups = scribe.hand_out(0, 0, 1, 2, 3)
    done = {k: scribe.sampled(groups[k]) for k in (0, 2, 3)}  # 1 is slow
    scribe.end_step(1, done[0] + done[2])
    saved = scribe.ledger.position()  # 3 is in its buffer, 1 in flight
    groups |= scribe.hand_out(1, 4, 5)
    scribe.end_step(2, done[3] + scribe.sampled(groups[4]))
    checks = scribe.checks()
    assert not failed(checks)
    assert checks["in flight"].figures["in flight now"] == "2 (1, 5)"
    scribe.ledger.close()
    scribe.begin(1, saved, first=4, held=[groups[3]])
    checks = scribe.checks()
    assert not failed(checks)
    assert checks["no prompt skipped"].figures["to be handed out again"] == 3  # 1, 4, 5
    assert checks["in flight"].figures["sampled, not trained"] == "1 (3)"
    again = scribe.hand_out(1, 1, 4)
    scribe.end_step(2, done[3] + scribe.sampled(again[4]))
    assert not failed(scribe.checks())
    scribe.ledger.close()


def test_a_run_that_knows_nothing_of_its_first_steps(tmp_path):
    foreign, own = str(tmp_path / "other" / "global_step_1"), tmp_path / "checkpoints/global_step_1"
    for number, (origin, result) in enumerate([(foreign, "unknown"), (str(own), "FAILED")]):
        (tmp_path / str(number)).mkdir()
        scribe = Scribe(tmp_path / str(number))
        settings = {"trainer": {"ckpt_path": str(tmp_path / "checkpoints")}}
        (scribe.folder / "config.yaml").write_text(yaml.safe_dump(settings))
        scribe.begin(1, {"run_id": "another", "position": 3}, first=2, path=origin)
        scribe.step(2)
        checks = scribe.checks()
        assert checks["history"].result == result
        (text,) = [*checks["history"].failures, *filter(None, [checks["history"].unknown])]
        assert f"went on from {origin} of run another" in text
        assert set(failed(checks)) <= {"history"}
        scribe.ledger.close()


# ------------------------------------------------------------------ what is wrong


def test_a_real_run_passes(finished, capsys, tmp_path):
    folder, _ = finished
    before = snapshot(folder / "quickstart")
    assert main([str(folder / "quickstart"), "--json", str(tmp_path / "audit.json")]) == 0
    assert snapshot(folder / "quickstart") == before
    printed = capsys.readouterr().out
    assert "audit passed" in printed
    found = json.loads((tmp_path / "audit.json").read_text())
    assert found["passed"] and {check["result"] for check in found["checks"]} == {"passed"}
    figures = {check["name"]: check["figures"] for check in found["checks"]}
    assert figures["no prompt skipped"]["handed out"] == 16  # 4 steps x 4 prompts
    assert figures["none trained twice"]["trained"] == 64  # 4 samples of each
    assert figures["recorded rollouts"]["files"] == 4
    assert figures["checkpoints"] == {"checkpoints": 2, "newest": 4, "others": 0}


def snapshot(folder):
    return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*")}


class SkippingTrainer(Trainer):
    """Leaves out a batch of prompts before the second step, as a data loader does that forgets."""

    def next_prompts(self, step):
        if step == 2:
            self.batches_drawn += 1
        return super().next_prompts(step)


class ForgetfulTrainer(Trainer):
    """Says that it draws the second batch and draws the third."""

    def next_prompts(self, step):
        self.batches_drawn += step == 2
        prompts = super().next_prompts(step)
        self.batches_drawn -= step == 2
        return prompts


@pytest.mark.parametrize(
    "trainer_class, check, text",
    [
        (SkippingTrainer, "no prompt skipped", r"prompt 4 \(0:\d+, batch 1\) was skipped"),
        pytest.param(
            ForgetfulTrainer,
            "order of the data",
            r"prompt 4 is 0:\d+, the order of the data has 0:",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_skipped_batch_of_a_real_run_is_found(tmp_path, trainer_class, check, text):
    class Exp(BasePPOExp):
        def get_trainer(self, *args, **kwargs):
            return trainer_class(*args, **kwargs)

    intervals = ("eval", "hf_save", "ckpt", "print_example")
    off = {f"trainer.{name}_interval": -1 for name in intervals}
    Exp(small(tmp_path, **off, **{"trainer.max_training_steps": 2})).run()
    wrong = failed({check.name: check for check in audit(tmp_path / "quickstart")})
    assert set(wrong) == {check} and len(wrong[check]) == 4
    assert re.search(text, wrong[check][0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["filter", "replace"])
def test_dynamic_sampling_passes(tmp_path, kind):
    settings = {
        "trainer.algorithm.dynamic_sampling.type": kind,
        "trainer.algorithm.dynamic_sampling.min_replace_ratio": 0.2,
        "trainer.algorithm.advantage_estimator": "grpo",
        "generator.n_samples_per_prompt": 2,
        "trainer.eval_interval": -1,
        "trainer.hf_save_interval": -1,
    }
    train(small(tmp_path, **settings))
    checks = {check.name: check for check in audit(tmp_path / "quickstart")}
    assert not failed(checks)
    assert checks["every trajectory ends once"].figures["dynamic_sampling"] > 0


@pytest.fixture
def copied(finished, tmp_path):
    """The files of a real run, to be spoilt."""
    run = tmp_path / "quickstart"
    shutil.copytree(finished[0] / "quickstart", run)
    return run


def spoil(run, *statements):
    """As a run would write that goes wrong; what a disk does is in records/ledger/test_damage."""
    with contextlib.closing(sqlite3.connect(run / FILE, isolation_level=None)) as db:
        seal(db, SEALED)
        for statement in statements:
            db.execute(statement)
    return failed({check.name: check for check in audit(run)})


FIRST = "(SELECT trajectory_id FROM ends WHERE step = 1 ORDER BY id LIMIT 1)"
ALONE = "WHERE group_id = (SELECT id FROM groups WHERE ordinal = 5) AND sample = 2"


@pytest.mark.parametrize(
    "statement, checks, text",
    [
        (
            f"INSERT INTO ends VALUES (9001, 1, {FIRST}, 3, NULL, NULL)",
            {"none trained twice", "whole batches", "every trajectory ends once", "checkpoints"},
            "was trained at steps 1,3",
        ),
        (
            f"INSERT INTO trajectories SELECT 9000, attempt, group_id, sample, 0, 1, 'stop', 0, 0, "
            f"NULL FROM trajectories {ALONE}",
            {"every trajectory ends once"},
            "(sample 2 of prompt 5) ended nowhere",
        ),
        (
            f"DELETE FROM ends WHERE trajectory_id = (SELECT id FROM trajectories {ALONE})",
            {"every trajectory ends once", "whole batches"},
            "(sample 2 of prompt 5) ended nowhere",
        ),
        (
            f"UPDATE ends SET trajectory_id = 9999 WHERE trajectory_id = {FIRST}",
            {"every trajectory ends once", "whole batches"},
            "trajectory 9999, which ended at step 1, is not known",
        ),
        (
            "UPDATE groups SET ordinal = 6 WHERE ordinal = 5",
            {"no prompt skipped", "order of the data", "none trained twice"},
            "batch 1) was skipped",
        ),
        (
            "UPDATE groups SET superseded = 2 WHERE ordinal = 5",  # by no attempt that there was
            {"no prompt skipped", "every trajectory ends once"},
            "batch 1) was skipped",
        ),
        ("DELETE FROM steps WHERE step = 2", {"steps", "checkpoints"}, "step 2 is missing"),
        (
            "UPDATE ends SET attempt = 2 WHERE step = 3",
            {"steps"},
            "step 3 was trained by attempts 1,2",
        ),
        ("UPDATE steps SET step = 5 WHERE step = 4", {"steps"}, "step 4 is missing"),
        ("DELETE FROM data WHERE row > 60", {"order of the data"}, "61 prompts are listed"),
    ],
)
def test_what_is_wrong_is_named(copied, statement, checks, text):
    wrong = spoil(copied, statement)
    assert set(wrong) == checks
    assert text in "; ".join(line for lines in wrong.values() for line in lines)


def test_a_corrupted_and_a_lost_rollout_file(copied, capsys):
    path = copied / "rollouts" / "step_000002.npz"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    (copied / "rollouts" / "step_000003.npz").unlink()
    assert main([str(copied)]) == 1
    printed = capsys.readouterr().out
    assert "step 2: rollouts/step_000002.npz is not what was written" in printed
    assert "step 3: rollouts/step_000003.npz does not exist" in printed
    assert printed.endswith("audit FAILED: recorded rollouts\n")


def throw_away(more_tokens):
    """Copies of the trajectories of four prompts as a crash would have left them."""
    return (
        "INSERT INTO trajectories SELECT id + 5000, 1, group_id, sample, reward, "
        f"tokens + ({more_tokens}), stop_reason, 0, 0, 2 FROM trajectories "
        "WHERE group_id IN (SELECT id FROM groups WHERE ordinal < 4)"
    )


def test_what_was_thrown_away_by_length_is_found(copied):
    wrong = spoil(copied, throw_away("sample % 2"))  # 8 of 16 are a token longer: p = 2 / 2^8
    assert not wrong
    wrong = spoil(copied, "DELETE FROM trajectories WHERE superseded = 2", throw_away(3))
    assert set(wrong) == {"no length bias"}
    (text,) = wrong["no length bias"]
    assert text.startswith("16 trajectories that crashes threw away were on average 3.00 tokens lo")


@pytest.mark.parametrize(
    "difference, one_sided, p",
    [
        ([], False, 1.0),
        ([0, 0, 0], True, 1.0),
        ([1, 1, 1], False, 2 / 8),  # all signs or none flipped
        ([1, 1, 1], True, 1 / 8),
        ([-1, -1, -1], True, 1.0),
        ([0, 5], True, 1 / 2),
        ([3, -1], False, 1.0),  # |2| of |4|, |2|, |2|, |4|
        ([2] * 13, False, 2 / 2**13),
    ],
)
def test_sign_flips_are_counted(difference, one_sided, p):
    assert sign_flip_p(np.array(difference, np.int64), one_sided=one_sided) == p


def test_sign_flips_of_many_are_drawn():
    spread = np.random.default_rng(1).integers(-20, 21, 300)
    assert sign_flip_p(spread, one_sided=False) > 0.05
    assert sign_flip_p(spread + 5, one_sided=False) == pytest.approx(1 / 10_001)
    assert sign_flip_p(spread - 5, one_sided=True) > 0.99  # short ones finish first


def test_a_lockstep_run_owes_every_batch_its_own_step(tmp_path):
    """Step t trains the batch t, though the batch t + 1 is sampled before."""
    scribe = Scribe(tmp_path, "lockstep")
    scribe.begin()
    batches = [scribe.sampled(*scribe.hand_out(0, 2 * t, 2 * t + 1).values()) for t in range(2)]
    scribe.end_step(1, batches[0])
    assert not failed(scribe.checks())
    last = scribe.sampled(*scribe.hand_out(1, 4, 5).values())
    scribe.end_step(2, last)
    wrong = failed(scribe.checks())
    assert set(wrong) == {"every trajectory ends once"}
    assert wrong["every trajectory ends once"][0].endswith("(sample 0 of prompt 2) ended nowhere")
    scribe.ledger.close()


def test_a_free_run_that_forgets_a_prompt(tmp_path):
    """One of the buffer is never trained; after a crash one in flight is not handed out again."""
    scribe = Scribe(tmp_path, "free")
    scribe.begin()
    groups = scribe.hand_out(0, 0, 1, 2, 3)
    done = {k: scribe.sampled(groups[k]) for k in (0, 1, 2)}
    scribe.end_step(1, done[0] + done[2])
    wrong = failed(scribe.checks())
    assert wrong.keys() == {"every trajectory ends once"}
    assert wrong["every trajectory ends once"][0].endswith("(sample 0 of prompt 1) ended nowhere")
    saved = scribe.ledger.position()
    scribe.ledger.close()
    scribe.begin(1, saved, first=4, held=[groups[1]])
    again = scribe.hand_out(1, 4, 5)
    scribe.end_step(2, done[1] + scribe.sampled(again[4]))
    assert failed(scribe.checks()) == {
        "no prompt skipped": [f"prompt 3 ({uid(3)}, batch 1) was skipped"]
    }
    scribe.ledger.close()


# ------------------------------------------------------------------ what cannot be audited


@pytest.mark.parametrize(
    "content, change, text",
    [
        (None, "", "holds no run.db: give the run folder"),
        ("", "", "is empty: the run has not begun yet"),
        ("no database" * 99, "", "cannot be read (DatabaseError: file is not a database)"),
        (None, "UPDATE runs SET format = 7", "has format 7, this jaxrl reads 2: audit it with"),
        (None, "DROP TABLE ends", "cannot be read (OperationalError: no such table: "),
    ],
)
def test_what_cannot_be_audited_is_named(tmp_path, capsys, content, change, text):
    scribe = Scribe(tmp_path)
    if change:
        scribe.begin()
        scribe.ledger.close()
        with contextlib.closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as db:
            db.execute(change)
    if content is not None:
        (tmp_path / FILE).write_text(content)
    assert main([str(tmp_path)]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "content, text",
    [
        ("trainer: [", "config.yaml is damaged (ParserError: while parsing"),
        ("", "config.yaml is damaged (it is no config): put that of the run back"),
        ("[trainer]", "config.yaml is damaged (it is no config): put that"),
        ("trainer: {}", "is not the config of a run (KeyError: 'ckpt_path')"),
        ("trainer: {ckpt_path: 3}", "trainer.ckpt_path is no text): put that of the run back"),
        ("trainer: {ckpt_path: 'ftp://x'}", "trainer.ckpt_path='ftp://x': cannot write to ftp://"),
        (b"\xff\xfe\x00", "config.yaml is damaged (UnicodeDecodeError"),
    ],
)
def test_a_config_that_no_run_wrote_is_named(scribe, tmp_path, capsys, content, text):
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "config.yaml").write_bytes(data)
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert text in error


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE runs SET facts = 'none'",
        "UPDATE runs SET facts = '{}'",
        "UPDATE runs SET facts = json_set(facts, '$.train_batch_size', 0)",
        "UPDATE groups SET ordinal = 'first' WHERE ordinal = 0",
    ],
)
def test_rows_that_no_run_wrote_are_no_failed_check(scribe, tmp_path, capsys, statement):
    scribe.step(1)
    scribe.ledger.position()
    with contextlib.closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as db:
        db.execute(statement)
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_checkpoint_whose_meta_no_run_wrote_fails(scribe, tmp_path):
    scribe.step(1)
    meta = tmp_path / "checkpoints" / "global_step_1" / "meta"
    meta.mkdir(parents=True)
    for text in ("[]", "not JSON"):
        (meta / "metadata").write_text(text)
        (failure,) = failed(scribe.checks())["checkpoints"]
        assert failure.startswith("global_step_1 is damaged: its meta is not JSON of a run")


@pytest.mark.parametrize("name", ["other", None])
def test_a_checkpoint_that_another_run_saved_here_fails(scribe, tmp_path, name):
    """One of this name is its own, saved with a ledger that was then lost."""
    scribe.step(1)
    meta = tmp_path / "checkpoints" / "global_step_1" / "meta"
    meta.mkdir(parents=True)
    saved = {"ledger": {"run_id": "another"}, "config": {"trainer": {"run_name": name}}}
    (meta / "metadata").write_text(json.dumps(saved))
    checks = scribe.checks()
    assert checks["checkpoints"].figures["others"] == 1
    text = f"global_step_1 in {tmp_path}/checkpoints was saved by the run other, not by None"
    assert checks["checkpoints"].failures == ([text] if name else [])


def test_help(capsys):
    assert main(["--help"]) == 0
    assert "python -m jaxrl.audit RUN" in capsys.readouterr().out


def test_a_run_is_read_while_it_goes_on_and_after_it_was_killed(tmp_path):
    """Its rows are in the log beside the database; no file is touched."""
    run, killed = tmp_path / "run", tmp_path / "killed"
    run.mkdir()
    scribe = Scribe(run)
    scribe.begin()
    scribe.step(1)
    scribe.step(2)
    scribe.ledger.position()
    shutil.copytree(run, killed)  # a kill leaves the files as they are
    for folder in (run, killed):
        assert (folder / f"{FILE}-wal").stat().st_size > 0
        before = snapshot(folder)
        checks = {check.name: check for check in audit(folder)}
        assert not failed(checks) and checks["none trained twice"].figures["trained"] == 8
        assert snapshot(folder) == before
    scribe.ledger.close()
    (killed / f"{FILE}-shm").unlink()  # as in a copy of the two files
    before = snapshot(killed)
    assert audit(killed)[0].figures["finished steps"] == 2
    assert snapshot(killed) == before  # the index of the log is made elsewhere
