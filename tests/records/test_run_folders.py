"""The folders that a run writes to: held while it goes on, and its own afterwards."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from jaxrl import config as cfg, sft, train
from jaxrl.audit import main as audit
from jaxrl.files import FolderError, unsealed
from jaxrl.records.run_folders import LATEST, OWNER, RunFolders
from jaxrl.tools.replay.recorded_run import RecordedRun
from tests.test_train import QUICKSTART, ROOT


def config_of(folder, name="a", **changes):
    changes = {f"trainer.{key}": value for key, value in changes.items()}
    given = {"trainer.log_path": str(folder), "trainer.run_name": name, **changes}
    return cfg.resolve(cfg.apply_overrides(cfg.TrainConfig(), given))


def leave_run(config, steps=0, checkpoint=None):
    """What a run leaves that has ended."""
    folders = RunFolders(config)
    folders.own(0)
    run, trainer = cfg.run_folder(config.trainer), config.trainer
    lines = [json.dumps({"step": step}) + "\n" for step in range(1, steps + 1)]
    (run / "metrics.jsonl").write_text("".join(lines))
    (run / "config.yaml").write_text(yaml.safe_dump(cfg.get_config_as_dict(config)))
    if checkpoint:
        path = f"{trainer.ckpt_path}/global_step_{checkpoint}"
        os.makedirs(f"{path}/meta")
        meta = {"config": {"trainer": {"log_path": trainer.log_path, "run_name": trainer.run_name}}}
        with open(f"{path}/meta/metadata", "w") as file:
            json.dump(meta, file)
        folders.saved(path)
    folders.close()


def test_checkpoints_and_exports_are_in_the_run_folder_unless_they_are_set(tmp_path):
    trainer = config_of(tmp_path).trainer
    assert trainer.ckpt_path == f"{tmp_path}/a/checkpoints"
    assert trainer.export_path == f"{tmp_path}/a/exports"
    trainer = config_of(tmp_path, ckpt_path="gs://b/c", export_path="e").trainer
    assert (trainer.ckpt_path, trainer.export_path) == ("gs://b/c", "e")
    home = config_of("~/runs").trainer
    assert home.ckpt_path == os.path.expanduser("~/runs/a/checkpoints")


@pytest.mark.parametrize("field", ["ckpt_path", "export_path"])
def test_a_folder_of_another_run_is_refused_while_it_goes_on_and_afterwards(tmp_path, field):
    shared = str(tmp_path / "shared")
    first, second = (config_of(tmp_path, name, **{field: shared}) for name in "ab")
    folders = RunFolders(first)
    folders.own(0)
    message = rf"another run goes on in {shared}: the run {tmp_path}/a \(.*Give this one a trainer"
    with pytest.raises(FolderError, match=rf"{message}.{field} of its own \(unset, it is in"):
        RunFolders(second)
    folders.close()
    leave_run(first, steps=4, checkpoint=4)
    (tmp_path / "shared" / "something").write_text("")
    message = rf"trainer.{field}='{shared}' belongs to the run {tmp_path}/a, and this is "
    with pytest.raises(FolderError, match=rf"{message}{tmp_path}/b: leave trainer.{field} unset"):
        RunFolders(second)
    assert not (tmp_path / "b" / "metrics.jsonl").exists()
    RunFolders(first).close()
    (tmp_path / "shared" / OWNER).unlink()  # as the message says
    if field == "export_path":
        RunFolders(second).close()


def test_the_way_to_start_from_the_checkpoint_of_another_run_is_said(tmp_path):
    shared = str(tmp_path / "shared")
    leave_run(config_of(tmp_path, "a", ckpt_path=shared), checkpoint=4)
    way = rf"trainer.resume_mode=from_path and trainer.resume_path={shared}/global_step_<N>"
    with pytest.raises(FolderError, match=way):
        RunFolders(config_of(tmp_path, "b", ckpt_path=shared))
    resume = {"resume_mode": "from_path", "resume_path": f"{shared}/global_step_4"}
    RunFolders(config_of(tmp_path, "b", **resume)).close()


def test_a_run_that_was_moved_with_its_checkpoints_keeps_them(tmp_path):
    leave_run(config_of(tmp_path / "runs"), steps=4, checkpoint=4)
    shutil.move(tmp_path / "runs", tmp_path / "moved")
    folders = RunFolders(config_of(tmp_path / "moved"))
    folders.own(4)
    folders.close()
    owner, checked = unsealed((tmp_path / "moved/a/checkpoints" / OWNER).read_text())
    assert checked and owner == {"run": f"{tmp_path}/moved/a", "from_here": ".."}


def test_a_folder_from_before_there_were_owners_goes_to_a_run_of_that_name(tmp_path):
    shared = str(tmp_path / "shared")
    leave_run(config_of(tmp_path, ckpt_path=shared), checkpoint=4)
    (tmp_path / "shared" / OWNER).unlink()
    with pytest.raises(FolderError, match=f"belongs to the run {tmp_path}/a, and this is"):
        RunFolders(config_of(tmp_path, "b", ckpt_path=shared))
    folders = RunFolders(config_of(tmp_path / "elsewhere", ckpt_path=shared))
    assert not (tmp_path / "shared" / OWNER).exists()  # it may still be of another config
    folders.own(4)
    folders.close()
    with pytest.raises(FolderError, match=f"belongs to the run {tmp_path}/elsewhere/a"):
        RunFolders(config_of(tmp_path, ckpt_path=shared))


def test_a_folder_with_nothing_in_it_is_nobodys(tmp_path):
    shared = str(tmp_path / "shared")
    for name in "ab":
        leave_run(config_of(tmp_path, name, ckpt_path=shared, export_path=shared))


def test_a_run_that_was_built_and_has_not_begun_gives_way_in_its_process(tmp_path):
    """A notebook builds it again; what has begun does not."""
    first, second = RunFolders(config_of(tmp_path)), RunFolders(config_of(tmp_path))
    other = RunFolders(config_of(tmp_path, "b"))
    assert (first.closed, second.closed, other.closed) == (True, False, False)
    second.own(0)
    with pytest.raises(FolderError, match=f"another run goes on in {tmp_path}/a/checkpoints"):
        RunFolders(config_of(tmp_path))
    second.check()
    for folders in (second, other):
        folders.close()


def test_one_folder_for_all_is_held_once(tmp_path):
    same = {"ckpt_path": str(tmp_path / "a"), "export_path": str(tmp_path / "a")}
    folders = RunFolders(config_of(tmp_path, **same))
    folders.check()
    folders.close()


def test_what_was_taken_is_let_go_of_when_the_rest_is_refused(tmp_path):
    holder = RunFolders(config_of(tmp_path, "b", export_path=str(tmp_path / "shared")))
    holder.own(0)
    with pytest.raises(FolderError, match=f"goes on in {tmp_path}/shared"):
        RunFolders(config_of(tmp_path, "a", export_path=str(tmp_path / "shared")))
    RunFolders(config_of(tmp_path, "a")).close()
    holder.close()


def test_a_run_whose_lease_is_gone_writes_nothing_more(tmp_path):
    folders = RunFolders(config_of(tmp_path))
    folders.check()
    shutil.rmtree(tmp_path / "a" / "checkpoints" / ".leases")
    folders.refuse_if_lost()  # the next beat will know
    with pytest.raises(FolderError, match="this run ends before it writes there again"):
        folders.check()
    with pytest.raises(FolderError, match="this run ends before it writes there again"):
        folders.refuse_if_lost()
    folders.close()


# ------------------------------------------------------------------ checkpoints that are gone


def test_checkpoints_that_were_deleted_are_missed_before_anything_starts_over(tmp_path):
    config = config_of(tmp_path, ckpt_interval=10)
    leave_run(config, steps=12, checkpoint=10)
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    message = (
        rf"{tmp_path}/a holds the records of 12 steps, and its checkpoints are gone \(the newest "
        rf"was {tmp_path}/a/checkpoints/global_step_10\): put them back to go on; or, to train its "
        rf"12 steps again from the start, which replaces their records in {tmp_path}/a, set "
        "trainer.resume_mode=none; or choose another trainer.run_name"
    )
    with pytest.raises(FolderError, match=message):
        RunFolders(config)
    folders = RunFolders(config_of(tmp_path, ckpt_interval=10, resume_mode="none"))
    folders.own(0)
    folders.close()
    RunFolders(config).close()  # was chosen: the next start goes on with it


@pytest.mark.parametrize("steps", [20, 21])
def test_a_run_that_died_before_its_first_checkpoint_starts_over(tmp_path, capsys, steps):
    """The save of step 20 waits for that of step 10: with 21 steps recorded there was one."""
    config = config_of(tmp_path, ckpt_interval=10)
    leave_run(config, steps=steps)
    if steps == 21:
        with pytest.raises(FolderError, match="holds the records of 21 steps, and its checkpoints"):
            RunFolders(config)
        return
    RunFolders(config).close()
    said = f"{tmp_path}/a holds the records of 20 steps and {tmp_path}/a/checkpoints no checkpoint"
    assert f"{said}: they are trained again from the start" in capsys.readouterr().out


def test_checkpoints_that_are_where_the_records_say_are_not_passed_by(tmp_path):
    """An older default was one folder for all runs."""
    old = str(tmp_path / "ckpts")
    leave_run(config_of(tmp_path, ckpt_path=old), steps=12, checkpoint=10)
    (tmp_path / "a" / LATEST).unlink()
    message = (
        rf"the checkpoints of this run are in {old}, and trainer.ckpt_path={tmp_path}/a/checkpoints"
        rf" holds none: to go on after step 10, set trainer.ckpt_path={old}; to train its 12 steps"
    )
    with pytest.raises(FolderError, match=message):
        RunFolders(config_of(tmp_path))
    RunFolders(config_of(tmp_path, ckpt_path=old)).close()


def test_a_checkpoint_in_the_folder_that_was_the_default_is_not_passed_by(tmp_path, monkeypatch):
    """Before runs had folders of their own, all of them saved in ~/ckpts."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    old = tmp_path / "home" / "ckpts"
    leave_run(config_of(tmp_path / "logs", "mine", ckpt_path=str(old)), steps=12, checkpoint=10)
    (old / OWNER).unlink()  # there were none
    message = (
        rf"a run named 'mine' has a checkpoint in {old}, where earlier versions saved by default, "
        rf"and trainer.ckpt_path={tmp_path}/mine/checkpoints holds none: to go on after step 10, "
        rf"set trainer.ckpt_path={old} "
    )
    with pytest.raises(FolderError, match=message):
        RunFolders(config_of(tmp_path, "mine"))
    RunFolders(config_of(tmp_path, "mine", ckpt_path=str(old))).close()
    RunFolders(config_of(tmp_path, "mine", resume_mode="none")).close()
    RunFolders(config_of(tmp_path, "another")).close()
    RunFolders(config_of(tmp_path, "mine", ckpt_path=str(tmp_path / "chosen"))).close()


# ------------------------------------------------------------------ real runs


def arguments(folder, name, **changes):
    settings = {
        "run_name": name,
        "log_path": folder,
        "ckpt_path": folder / "checkpoints",
        "ckpt_interval": 1,
        "max_training_steps": 200,
        "eval_interval": -1,
        "train_batch_size": 2,
        "policy_mini_batch_size": 2,
        **changes,
    }
    words = [f"--config.trainer.{key}={value}" for key, value in settings.items()]
    return [f"--config={QUICKSTART}", "--config.generator.n_samples_per_prompt=2", *words]


def start(*words):
    return subprocess.Popen(
        [sys.executable, "-m", "jaxrl.train", *words],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_sweep_with_one_checkpoint_folder(tmp_path, capsys, monkeypatch):
    """The natural mistake: run_name and lr differ, ckpt_path does not."""
    monkeypatch.chdir(ROOT)
    lr = "policy.optimizer_config.lr"
    both = [start(*arguments(tmp_path, f"lr{x}", **{lr: x})) for x in ("1e-3", "3e-3")]
    while all(run.poll() is None for run in both):  # started at once, one of them is refused
        time.sleep(0.1)
    (refused,), (running,) = (
        [run for run in both if (run.poll() is None) == goes_on] for goes_on in (False, True)
    )
    mine, other = (f"lr{x}" for x in (("1e-3", "3e-3") if running is both[0] else ("3e-3", "1e-3")))
    try:
        text = refused.communicate()[0]
        assert refused.returncode == 2
        (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
        who = f"the run {tmp_path}/{mine} (process {running.pid} on "
        assert line.startswith(f"error: another run goes on in {tmp_path}/checkpoints: {who}")
        assert "Traceback" not in text and not (tmp_path / other).exists()

        while not list((tmp_path / "checkpoints").glob("global_step_3")):
            assert running.poll() is None, running.communicate()[0]
            time.sleep(0.1)
        for words, name in (
            (arguments(tmp_path, "other"), "checkpoints"),  # the same config, another name
            (arguments(tmp_path, mine), "checkpoints"),  # the same command again
            (arguments(tmp_path, mine, ckpt_path=tmp_path / "c"), "exports"),
            (arguments(tmp_path, mine, ckpt_path=tmp_path / "c", export_path=tmp_path / "e"), mine),
        ):
            assert train.main([*words, f"--config.trainer.{lr}={mine[2:]}"]) == 2
            said = capsys.readouterr().err
            assert "another run goes on in " in said and f"/{name}: the run " in said
        words = arguments(tmp_path, "sft")
        words[:2] = ["--config=configs/sft_addition.py"]
        words = [word for word in words if "policy_mini" not in word]
        assert sft.main(words) == 2
        assert f"another run goes on in {tmp_path}/checkpoints: the run" in capsys.readouterr().err
        assert audit([str(tmp_path / mine)]) == 0  # readers are let in
        assert RecordedRun(tmp_path / mine).steps
    finally:
        running.send_signal(signal.SIGKILL)
        running.communicate()
    # dead, its checkpoints are still its own
    assert train.main(arguments(tmp_path, "other")) == 2
    assert f"belongs to the run {tmp_path}/{mine}, and this is" in capsys.readouterr().err
    newest = (tmp_path / mine / LATEST).read_text().strip()
    step = int(newest.rpartition("_")[2])
    again = arguments(tmp_path, mine, **{lr: mine[2:], "max_training_steps": step + 3})
    done = start(*again)
    text = done.communicate()[0]
    assert done.returncode == 0 and "resuming after step" in text, text
    assert audit([str(tmp_path / mine)]) == 0
    newest = (tmp_path / mine / LATEST).read_text().strip()
    assert newest == f"{tmp_path}/checkpoints/global_step_{step + 3}"
    resume = {"resume_mode": "from_path", "resume_path": newest}
    given = {lr: mine[2:], "max_training_steps": step + 4, "ckpt_path": tmp_path / "own"}
    done = start(*arguments(tmp_path, "from", **given, **resume))
    text = done.communicate()[0]
    assert done.returncode == 0, text
    assert (tmp_path / "own" / f"global_step_{step + 4}").is_dir()


# ------------------------------------------------------------------ what says so is damaged


def flip_a_bit(path, place):
    data = bytearray(path.read_bytes())
    data[place // 8 % len(data)] ^= 1 << place % 8
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["bit", "empty"])
def test_a_damaged_owner_is_told_by_where_the_folder_is_or_by_its_checkpoints(
    tmp_path, capsys, damage
):
    shared = str(tmp_path / "shared")
    for name, changes in (("a", {}), ("b", {"ckpt_path": shared})):
        config = config_of(tmp_path, name, **changes)
        leave_run(config, steps=4, checkpoint=4)
        owner = Path(config.trainer.ckpt_path, OWNER)
        right = owner.read_text()
        owner.write_text(right.replace(f"/{name}", "/c", 1) if damage == "bit" else "")
        by = "where it is" if name == "a" else "its checkpoints"
        folders = RunFolders(config)
        said = capsys.readouterr().err
        assert said.startswith(f"warning: {owner} is damaged (") and said.count("\n") == 1
        assert f"whose folder it is follows from {by}, and it is written anew" in said
        folders.own(4)
        folders.close()
        assert owner.read_text() == right
    owner.write_text("")
    with pytest.raises(FolderError, match=f"belongs to the run {tmp_path}/b, and this is"):
        RunFolders(config_of(tmp_path, "other", ckpt_path=shared))


def test_a_damaged_owner_that_nothing_else_tells_is_refused_as_damaged(tmp_path):
    shared = tmp_path / "shared"
    config = config_of(tmp_path, export_path=str(shared))
    leave_run(config, steps=4, checkpoint=4)
    (shared / "global_step_4").mkdir()
    right = (shared / OWNER).read_bytes()
    for place in range(0, 8 * len(right), 7):
        flip_a_bit(shared / OWNER, place)
        try:
            RunFolders(config).close()  # the name of the checksum, or a space
        except FolderError as error:
            assert f"{shared / OWNER} is damaged (" in str(error)
            assert "delete that file if it is this one" in str(error)
        else:
            assert unsealed((shared / OWNER).read_text())[0]["run"] == str(tmp_path / "a")
        (shared / OWNER).write_bytes(right)


def test_a_damaged_note_of_the_newest_checkpoint_is_called_damaged(tmp_path):
    config = config_of(tmp_path)
    leave_run(config, steps=4, checkpoint=4)
    shutil.rmtree(tmp_path / "a" / "checkpoints" / "global_step_4")
    path = tmp_path / "a" / LATEST
    path.write_text(path.read_text().replace("step_4", "step_6"))
    with pytest.raises(FolderError, match=f"gone .the newest was named by {path}, which is dama"):
        RunFolders(config)
