"""A run folder that holds the steps of another run; the runs themselves are in `test_resume`."""

import json

import pytest
import yaml

from jaxrl import config as cfg
from jaxrl.files import FolderError
from jaxrl.records import run_folders
from jaxrl.records.resume_identity import changed_fields
from jaxrl.records.run_folders import refuse_records_of_another

LR = "trainer.policy.optimizer_config.lr"


def config_of(folder, **changes):
    return cfg.apply_overrides(
        cfg.TrainConfig(), {"trainer.log_path": str(folder), "trainer.run_name": "run", **changes}
    )


def leave_records(folder, config, lines='{"step": 1}\n'):
    run = folder / "run"
    run.mkdir()
    plain = json.loads(json.dumps(cfg.get_config_as_dict(config)))
    (run / "config.yaml").write_text(yaml.safe_dump(plain, sort_keys=False))
    (run / "metrics.jsonl").write_text(lines)
    return run


def test_a_bound_that_was_infinite_goes_on_as_the_large_one_that_is_asked_for():
    name = "trainer.policy.optimizer_config.max_grad_norm"
    old, new = (cfg.get_config_as_dict(cfg.TrainConfig()) for _ in range(2))
    settings = old["trainer"]["policy"]["optimizer_config"]
    settings["max_grad_norm"] = float("inf")
    now = new["trainer"]["policy"]["optimizer_config"]
    now["max_grad_norm"] = 1e9
    assert not changed_fields(old, new)
    now["max_grad_norm"] = 1.0
    assert changed_fields(old, new) == {name: (float("inf"), 1.0)}
    settings["max_grad_norm"] = -float("inf")
    assert changed_fields(old, new) == {name: (-float("inf"), 1.0)}


def test_a_run_without_known_ids_that_left_no_checkpoint_may_begin_again_with_them(tmp_path):
    run = leave_records(tmp_path, config_of(tmp_path))
    old = yaml.safe_load((run / "config.yaml").read_text())
    del old["trainer"]["policy"]["known_ids"]
    (run / "config.yaml").write_text(yaml.safe_dump(old))
    again = config_of(tmp_path, **{"trainer.policy.known_ids": 40})
    refuse_records_of_another(again)
    with pytest.raises(FolderError, match="another config"):
        refuse_records_of_another(cfg.apply_overrides(again, {LR: 2e-6}))


def test_another_config_is_refused_with_folder_difference_and_fix(tmp_path):
    run = leave_records(tmp_path, config_of(tmp_path, **{LR: 1e-6}))
    with pytest.raises(FolderError) as refused:
        refuse_records_of_another(config_of(tmp_path, **{LR: 2e-6, "trainer.epochs": 9}))
    assert str(refused.value) == (
        f"the run folder '{run}' holds the steps of a run with another config; (there, this run): "
        f"{{'{LR}': (1e-06, 2e-06)}}. This run would write over them: choose another "
        "trainer.run_name (and trainer.ckpt_path and trainer.export_path, if set), or undo the "
        "change"
    )


def test_the_same_config_and_what_a_resume_may_change_are_let_in(tmp_path):
    leave_records(tmp_path, config_of(tmp_path, **{LR: float("inf")}))
    refuse_records_of_another(config_of(tmp_path, **{LR: float("inf")}))
    further = {"trainer.epochs": 9, "trainer.resume_mode": "none", "trainer.ckpt_path": "other"}
    refuse_records_of_another(config_of(tmp_path, **{LR: float("inf")}, **further))


def test_a_field_that_is_newer_than_the_records_was_at_its_default(tmp_path):
    old, same = (cfg.get_config_as_dict(config_of(tmp_path)) for _ in range(2))
    del old["trainer"]["policy"]["optimizer_config"]["lr"]
    assert changed_fields(old, same) == {}
    changed = cfg.get_config_as_dict(config_of(tmp_path, **{LR: 2e-6}))
    assert changed_fields(old, changed) == {LR: (1e-6, 2e-6)}


def test_a_folder_without_steps_is_nobodys(tmp_path):
    refuse_records_of_another(config_of(tmp_path))
    run = leave_records(tmp_path, config_of(tmp_path, **{LR: 3.0}), lines="")
    refuse_records_of_another(config_of(tmp_path))
    (run / "rollouts").mkdir()
    (run / "rollouts" / "step_000001.npz").write_bytes(b"")
    with pytest.raises(FolderError, match=r"lr': \(3.0, 1e-06\)"):
        refuse_records_of_another(config_of(tmp_path))


@pytest.mark.parametrize("text", [None, "{", "- a list"])
def test_steps_of_an_unreadable_config_are_refused(tmp_path, text):
    file = leave_records(tmp_path, config_of(tmp_path)) / "config.yaml"
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(FolderError, match=r"config.yaml .* choose another trainer.run_name"):
        refuse_records_of_another(config_of(tmp_path))


def test_every_process_decides_as_the_first_does(tmp_path, monkeypatch):
    """A host that does not see the folder of process 0 must not go on without it."""
    asked = []
    monkeypatch.setattr(run_folders, "is_first", lambda: False)
    monkeypatch.setattr(run_folders, "agree", lambda problem: asked.append(problem) or "a run of A")
    with pytest.raises(FolderError, match="holds the steps of a run of A"):
        refuse_records_of_another(config_of(tmp_path))
    assert asked == [None]


def test_given_rows_are_the_same_in_another_folder(tmp_path):
    def config(folder, rows):
        return cfg.get_config_as_dict(config_of(folder, **{"data.train_data": [rows]}))

    first, other = f"rows-{'0a' * 8}.jsonl", f"rows-{'0b' * 8}.jsonl"
    old = config("a", f"runs/a/data/{first}")
    assert changed_fields(old, config("b", f"gs://bucket/b/data/{first}")) == {}
    assert changed_fields(old, config("a", f"runs/a/data/{other}")) == {
        "data.train_data": ([first], [other])
    }
    mine = config("a", "runs/a/data/mine.jsonl")  # a file of the user's is its path
    assert changed_fields(mine, config("a", "runs/b/data/mine.jsonl")) != {}
