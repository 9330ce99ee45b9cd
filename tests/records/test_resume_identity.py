"""A run folder that holds the steps of another run; the runs themselves are in `test_resume`."""

import json

import pytest
import yaml

from jaxrl import config as cfg
from jaxrl.files import DamagedFile, FolderError, sealed
from jaxrl.records import run_folders
from jaxrl.records.resume_identity import changed_fields
from jaxrl.records.run_config import read_config, write_config
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
    found = "a run of A", "b"
    monkeypatch.setattr(run_folders, "agree", lambda problem: asked.append(problem) or found)
    with pytest.raises(FolderError, match="holds the steps of a run of A.*, or b$"):
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


# ------------------------------------------------------------------ a config.yaml that is damaged


def leave_sealed(folder, config):
    run = leave_records(folder, config)
    write_config(run, json.loads(json.dumps(cfg.get_config_as_dict(config))))
    return run / "config.yaml"


def test_any_digit_of_a_config_that_flips_is_damage_or_no_change(tmp_path):
    file = leave_sealed(tmp_path, config_of(tmp_path))
    right, text = read_config(file.parent), file.read_text()
    digits = [place for place, sign in enumerate(text) if sign.isdigit()]
    assert len(digits) > 200
    for place in digits:
        file.write_text(f"{text[:place]}{int(text[place]) ^ 1}{text[place + 1 :]}")
        try:
            assert read_config(file.parent) == right
        except DamagedFile as error:
            assert str(error).startswith(f"{file} is damaged (")
        else:
            assert place > text.rindex("# sha256")  # in the mark of the checksum


def test_a_damaged_config_is_what_the_newest_checkpoint_says(tmp_path, capsys):
    """It is never the user's config that was changed."""
    config = config_of(tmp_path, **{LR: 1e-6, "trainer.ckpt_path": str(tmp_path / "saved")})
    file = leave_sealed(tmp_path, config)
    file.write_text(file.read_text().replace("lr: 1.0e-06", "lr: 3.0e-06"))
    with pytest.raises(FolderError, match=r"no checkpoint is left, and .*config.yaml is damaged"):
        refuse_records_of_another(config)
    for step in (1, 2):
        (tmp_path / "saved" / f"global_step_{step}" / "meta").mkdir(parents=True)
        meta = sealed({"config": cfg.get_config_as_dict(config)})
        meta = json.dumps(meta) if step == 1 else json.dumps(meta).replace("1e-06", "2e-06")
        (tmp_path / "saved" / f"global_step_{step}" / "meta" / "metadata").write_text(meta)
    refuse_records_of_another(config)
    said = capsys.readouterr().err
    assert said.startswith(f"warning: {file} is damaged (") and said.count("\n") == 1
    assert "global_step_1 says what it was" in said
    other = r"another config; .*lr': \(1e-06, 2e-06\).*undo the change"
    with pytest.raises(FolderError, match=other):
        refuse_records_of_another(cfg.apply_overrides(config, {LR: 2e-6}))
