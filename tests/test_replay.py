"""Recorded steps done again, bit for bit; runs that part, and files that are not what they were."""

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys

import pytest

from jaxrl.data.recorded import to_arrays
from jaxrl.files import sealed_text, unsealed_text
from jaxrl.records.ledger import read_rollouts, write_rollouts
from jaxrl.records.ledger.database import SEALED
from jaxrl.records.sealed_tables import seal
from jaxrl.replay import Compared, against, main, replay
from jaxrl.tools.replay.recorded_run import RecordedRun
from jaxrl.tools.replay.steps import compared
from jaxrl.train import train
from tests import quick_compile
from tests.test_resume import ACTOR_CRITIC, STATEFUL, InterruptedExp
from tests.test_train import ROOT, small

OF_STATE = 45  # 13 parameters, two moments of each, two counts of updates; four numbers
ARRAYS = OF_STATE + 15  # and of the batch
QUIET = dict.fromkeys(("trainer.eval_interval", "trainer.hf_save_interval"), -1)


@pytest.fixture
def recorded(finished, tmp_path):
    """A copy of the folder of the session's run: four steps, checkpoints after 2 and 4."""
    folder = tmp_path / "run"
    shutil.copytree(finished[0] / "quickstart", folder)
    return folder


def change(folder, statement, *values):
    """As a run would have written it; what a disk does is in records/ledger/test_damage."""
    with contextlib.closing(sqlite3.connect(folder / "run.db")) as db, db:
        seal(db, SEALED)
        db.execute(statement, values)
        db.execute("PRAGMA journal_mode=DELETE")  # no log is left beside it


def change_config(folder, old, new):
    """On purpose: with a checksum that agrees."""
    path = folder / "config.yaml"
    text = unsealed_text(path.read_text())
    assert old in text
    path.write_text(sealed_text(text.replace(old, new, 1)))


def snapshot(folder):
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*")}


def forge(folder, step, column, row, value):
    """Another first entry of a row in the rollouts of a step, under a digest that fits.

    Returns the one that was there.
    """
    path = RecordedRun(folder).path(step)
    output, uids = read_rollouts(path)
    was, output[column][row][0] = output[column][row][0], value
    digest = write_rollouts(path, to_arrays(output), uids)
    change(folder, "UPDATE steps SET file_digest = ? WHERE step = ?", digest, step)
    return was


def test_steps_from_the_oldest_checkpoint_are_bit_identical(recorded, capsys):
    before = snapshot(recorded)
    assert main([str(recorded)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert lines[0].endswith("checkpoints/global_step_2")
    assert lines[1:] == [
        f"step 2: bit-identical, {OF_STATE} arrays",
        f"step 3: bit-identical, {ARRAYS} arrays",
        f"step 4: bit-identical, {ARRAYS} arrays",
    ]
    assert snapshot(recorded) == before


def test_a_run_is_replayed_from_the_models_that_it_began_with(recorded):
    _, *found = replay(recorded, 2, checkpoint="start")
    assert found == [Compared(1, [], ARRAYS), Compared(2, [], ARRAYS)]


def test_a_corrupted_file_is_named_before_anything_is_computed(recorded, capsys):
    path = recorded / "rollouts" / "step_000003.npz"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    assert main([str(recorded), "--step=4"]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"step 3: {path} is not the file that the run wrote")
    path.unlink()
    assert main([str(recorded), "--step=4"]) == 2
    assert f"{path}, the rollouts of step 3, is gone" in capsys.readouterr().err


def test_a_batch_under_a_forged_digest_is_found_by_its_checksums(recorded, capsys):
    original = forge(recorded, 3, "response_ids", row=0, value=7)
    assert main([str(recorded)]) == 1
    out = capsys.readouterr().out
    assert "step 3: batch.tokens differs first (what was sampled" in out
    assert "step 4" not in out
    forge(recorded, 3, "response_ids", row=0, value=original)
    forge(recorded, 3, "rewards", row=0, value=0.125)
    assert list(replay(recorded))[-1].different[0] == "batch.rewards"


NAMES = {"batch.rewards": 1, "batch.advantages": 2, "state.params['embed']": 3, "state.step": 4}


def test_arrays_that_differ_are_named_in_the_order_in_which_a_step_makes_them():
    other = {**NAMES, **{name: 0 for name in NAMES}}
    assert compared(7, NAMES, other) == Compared(7, list(NAMES), 4)
    assert compared(7, NAMES, dict(NAMES)) == Compared(7, [], 4)
    assert compared(7, NAMES, {**NAMES, "batch.kept": 5}).different == ["batch.kept"]
    # with the KL in the rewards these are made of the log-probs
    penalized = ["batch.old_log_probs", "batch.rewards", "batch.advantages"]
    theirs, ours = (dict.fromkeys(penalized, number) for number in (1, 2))
    assert compared(7, theirs, ours, kl_in_rewards=True).different == penalized
    assert compared(7, theirs, ours).different[0] == "batch.rewards"
    text = str(compared(7, NAMES, {**NAMES, "state.step": 0, "batch.advantages": 0}))
    assert text == (
        "step 7: batch.advantages differs first (the advantage estimator); 2 of 4 arrays do: "
        "then state.step"
    )


def test_two_runs_part_where_their_checksums_first_differ(recorded, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(recorded, other)
    assert main([str(recorded), f"--against={other}"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "steps 1 to 4 and 1 to 4, 4 in common",
        *(f"step {step}: bit-identical, {ARRAYS} arrays" for step in (1, 2, 3, 4)),
    ]
    numbers = RecordedRun(other).steps[3].checksums
    numbers["state.params['embed']"] += 1
    numbers["batch.rollout_log_probs"] += 1
    change(other, "UPDATE steps SET checksums = ? WHERE step = 3", json.dumps(numbers))
    change_config(other, "seed: 42", "seed: 43")
    change_config(other, "run_name: quickstart", "run_name: another")
    assert main([str(recorded), f"--against={other}"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "configs differ: trainer.seed: 42 | 43"
    assert out[-1] == (
        "step 3: batch.rollout_log_probs differs first (the sampler's arithmetic, or its weights); "
        f"2 of {ARRAYS} arrays do: then state.params['embed']"
    )
    change(other, "DELETE FROM steps WHERE step < 3")
    assert [x for x in against(recorded, other) if isinstance(x, Compared)][0].step == 3
    change(other, "UPDATE steps SET step = step + 10")
    with pytest.raises(ValueError, match="has the steps 1 to 4, .* 13 to 14: none in common"):
        list(against(recorded, other))


def test_superseded_steps_are_no_part_of_a_run(recorded):
    change(recorded, "UPDATE steps SET superseded = 2 WHERE step = 4")
    assert list(RecordedRun(recorded).steps) == [1, 2, 3]


def test_what_cannot_be_replayed_is_said_with_what_to_do(recorded, tmp_path):
    def error(*args, **kwargs):
        with pytest.raises((ValueError, OSError)) as caught:
            list(replay(*args, **kwargs))
        return str(caught.value)

    assert f"{tmp_path} holds no run.db: give the run folder" in error(tmp_path)
    for step in (9, 0, -1):
        assert f"step {step} is not in" in error(recorded, step)
    assert "--checkpoint='x' must end in global_step_<N>" in error(recorded, checkpoint="x")
    given = str(tmp_path / "checkpoints" / "global_step_2")
    assert "global_step_2' does not exist" in error(recorded, checkpoint=given)
    real = RecordedRun(recorded).find_checkpoint(4)
    assert "is not before step 2; take an earlier one" in error(recorded, 2, checkpoint=real)
    change(recorded, "UPDATE runs SET run_id = 'another'")
    assert "is another; name a checkpoint of it" in error(recorded)
    change(recorded, "UPDATE steps SET file = NULL WHERE step = 4")
    assert "trainer.ledger.record_rollouts=false" in error(recorded)
    change(recorded, "UPDATE steps SET checksums = '{}' WHERE step = 4")
    assert "trainer.ledger.record_checksums=false" in error(recorded)
    change(recorded, "UPDATE attempts SET from_step = 2, origin = 'step 2 of run x'")
    gone = f"{tmp_path}/gone/global_step_2"
    origin = f"{gone} of run x"
    change(recorded, "UPDATE attempts SET from_step = 2, origin = ?", origin)
    assert f"it went on from, {origin}, is not there; where it was moved" in error(
        recorded, 3, checkpoint="start"
    )
    (recorded / "run.db").write_bytes(b"no database" * 100)
    assert "run.db cannot be read (DatabaseError" in error(recorded)


def test_a_run_that_went_on_from_another_begins_with_its_checkpoint(recorded, finished):
    """The session's run under another run_id: checkpoint 2 is then of another run."""
    origin = RecordedRun(recorded).find_checkpoint(3)
    run_id = RecordedRun(recorded).run_id
    change(recorded, "UPDATE runs SET run_id = 'mine'")
    change(recorded, "DELETE FROM steps WHERE step <= 2")
    statement = "UPDATE attempts SET from_step = 2, origin = ?"
    change(recorded, statement, f"{origin} of run {run_id}")
    folder = str(finished[0] / "checkpoints")
    change_config(recorded, f"ckpt_path: {folder}", f"ckpt_path: {folder}_2")
    start, *found = replay(recorded, 3)
    assert start == f"step 2: {origin}"
    assert found == [Compared(3, [], ARRAYS)]
    change(recorded, statement, f"{origin} of run x")
    with pytest.raises(ValueError, match=f"was saved by run {run_id}, and .* is mine; name a"):
        list(replay(recorded, 3))


def test_a_folder_of_checkpoints_that_is_gone_is_said(recorded, finished):
    change_config(recorded, f"ckpt_path: {finished[0] / 'checkpoints'}", "ckpt_path: gone")
    assert next(replay(recorded, 3)) == (
        "step 0: the models that the run began with; the folder of checkpoints, gone, is not there"
    )


def test_options_that_make_no_sense_are_refused(recorded, capsys):
    for option in ("--step=3", "--step=0", "--checkpoint=start", "--device-count=1"):
        assert main([str(recorded), f"--against={recorded}", option]) == 2
        flag = option.partition("=")[0]
        assert f"compares what was recorded, without {flag}; leave" in capsys.readouterr().err
    assert main([str(recorded), "--step=0"]) == 2
    assert "step 0 is not in" in capsys.readouterr().err
    for count in (0, -1):
        assert main([str(recorded), f"--device-count={count}"]) == 2
        assert f"--device-count={count}: there is at least 1" in capsys.readouterr().err


def test_a_run_folder_that_no_run_wrote_is_no_difference(recorded, capsys):
    good = (recorded / "config.yaml").read_text()
    for text in ("trainer: [", "", "trainer: {ckpt_path: x, seed: one}"):
        (recorded / "config.yaml").write_text(text)
        assert main([str(recorded)]) == 2
        assert capsys.readouterr().err.startswith("error: ")
    (recorded / "config.yaml").write_text(good)
    for statement in ("machine = 'none'", "machine = '[]'", "machine = NULL"):
        change(recorded, f"UPDATE attempts SET {statement}")
        assert main([str(recorded)]) == 2
        assert "run.db cannot be read" in capsys.readouterr().err


# ---------------------------------------------------------------- every kind of run

KINDS = {
    "dynamic sampling, adaptive KL": STATEFUL,
    "critic, moving reference, three passes": {
        **ACTOR_CRITIC,
        "trainer.epochs": 2,
        "trainer.max_ckpts_to_keep": -1,
    },
    "adapters with dropout, packed": {
        "trainer.policy.model.lora.rank": 4,
        "trainer.policy.model.lora.dropout": 0.2,
        "trainer.use_sample_packing": True,
    },
    "a loss that sees the whole minibatch": {
        "trainer.algorithm.policy_loss_type": "kl_cov",
        "trainer.algorithm.zero_variance_filter": True,
    },
    "asynchronous in lockstep": {
        "trainer.fully_async": {"enabled": True, "schedule": "lockstep", "max_staleness_steps": 1},
        "trainer.policy_mini_batch_size": 4,
        "trainer.algorithm.policy_loss_type": "rollout_is",
    },
    "asynchronous and free, tokens of several versions": {
        "trainer.fully_async": {"enabled": True, "max_staleness_steps": 2},
        "trainer.policy_mini_batch_size": 4,
        "trainer.algorithm.policy_loss_type": "decoupled_ppo",
    },
    "a row per turn, tokens of a filter": {
        "environment.env_class": "guess_number",
        "data.train_data": ["jaxrl.envs.toys.guess_number:prompts(size=16, seed=0)"],
        "data.val_data": ["jaxrl.envs.toys.guess_number:prompts(size=4, seed=1)"],
        "generator.max_turns": 2,
        "generator.max_input_length": 26,
        "generator.step_wise_trajectories": True,
        "generator.sampling_params.top_k": 5,
        "generator.sampling_params.keep_sampling_mask": True,
        "trainer.algorithm.advantage_estimator": "grpo",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_replays_bit_for_bit(tmp_path, kind):
    run = train(small(tmp_path, **{**QUIET, **KINDS[kind]})).ledger.folder
    for start in ("start", None):
        found = [x for x in replay(run, checkpoint=start) if isinstance(x, Compared)]
        assert [x.step for x in found] == [1, 2, 3, 4][start is None :]
        assert not any(x.different for x in found), found


@pytest.mark.slow
def test_a_run_that_was_interrupted_replays_along_its_surviving_lineage(tmp_path):
    config = small(tmp_path, **QUIET)
    with pytest.raises(KeyboardInterrupt):
        InterruptedExp(config).run()  # in step 4; step 3 will be superseded
    run = train(config).ledger.folder
    assert [step.machine["platform"] for step in RecordedRun(run).steps.values()] == ["cpu"] * 4
    assert main([str(run), "--checkpoint=start"]) == 0


@pytest.mark.slow
def test_a_run_that_went_on_from_another_replays_from_its_checkpoint(finished, tmp_path):
    path = str(finished[0] / "checkpoints" / "global_step_2")
    resumed = {"trainer.resume_mode": "from_path", "trainer.resume_path": path}
    run = train(small(tmp_path, **QUIET, **resumed)).ledger.folder
    found = [x for x in replay(run, checkpoint=path) if isinstance(x, Compared)]
    assert found == [Compared(step, [], ARRAYS) for step in (3, 4)]


@pytest.mark.slow
def test_the_command_takes_the_devices_of_the_run_or_says_that_they_are_others(finished):
    run = finished[0] / "quickstart"

    def command(*options):
        return subprocess.run(
            [sys.executable, "-m", "jaxrl.replay", str(run), "--step=3", *options],
            cwd=ROOT,
            env=os.environ | {"XLA_FLAGS": quick_compile.FLAGS},
            capture_output=True,
            check=False,
            text=True,
        )

    same = command()
    assert same.returncode == 0, same.stderr
    assert "other machines" not in same.stdout
    other = command("--device-count=2")
    assert "other machines: devices 8 | 2; mesh {'fsdp': 8} | {'fsdp': 2}." in other.stdout
    assert other.returncode in (0, 1), other.stderr
    assert "batch.tokens" not in other.stdout  # the recorded ones on any machine
