"""Whole runs that go on in folders of which a digit has flipped: the same bits, one line for each.

`records/test_checkpoint_damage.py` flips every digit of a checkpoint's metadata.
"""

import re
import shutil

import pytest

from jaxrl.audit import audit
from jaxrl.records.run_config import read_config
from jaxrl.train import train
from tests.test_train import assert_bitwise_equal, metric_lines, small
from tests.test_train_async import quick

METADATA = "checkpoints/global_step_{}/meta/metadata"


def flip_a_digit(path, before):
    """Flip the lowest bit of the digit after what a pattern finds."""
    text = path.read_text()
    place = re.search(rf"{before}(?=\d)", text, re.DOTALL).end()
    path.write_text(f"{text[:place]}{int(text[place]) ^ 1}{text[place + 1 :]}")


def goes_on_as(whole, config, folder, capsys, before, newest, older):
    """A digit of the newest metadata costs that checkpoint, and nothing else."""
    kept, trainer = whole
    flip_a_digit(folder / METADATA.format(newest), before)
    capsys.readouterr()
    line = f"global_step_{newest} is damaged .*Falling back to step {older}; the damaged one is"
    with pytest.warns(UserWarning, match=line):
        again = train(config)
    assert_bitwise_equal(again.state, trainer.state)
    assert metric_lines(folder) == metric_lines(kept)
    assert not [x for check in audit(folder / "quickstart") for x in check.failures]
    return capsys.readouterr().err


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "before", ['"position": ', '"data": "[a-f]*', '"seed": ', '"mesh": {.*?: ', '"total_steps": ']
)
def test_a_run_whose_metadata_has_another_digit(finished, tmp_path, capsys, before):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    goes_on_as(finished, small(folder), folder, capsys, before, 4, 2)


def test_a_run_of_which_every_small_file_has_another_digit(finished, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    flip_a_digit(folder / "quickstart" / "config.yaml", "  seed: ")
    flip_a_digit(folder / "quickstart" / "latest_checkpoint.txt", "global_step_")
    flip_a_digit(folder / "checkpoints" / ".owner.json", '"seal": "[a-f]*')
    flip_a_digit(folder / "checkpoints" / ".leases" / "1", '"pid": ')
    config = small(folder)
    said = goes_on_as(finished, config, folder, capsys, '"position": ', 4, 2)
    damaged = [line for line in said.splitlines() if "is damaged (" in line]
    assert len(damaged) == 2  # what was read: the others are written anew
    assert f"{folder}/checkpoints/.owner.json is damaged" in damaged[0]
    assert f"{folder}/quickstart/config.yaml is damaged" in damaged[1]
    assert "waiting" not in said
    assert read_config(folder / "quickstart")["trainer"]["seed"] == 42


@pytest.mark.slow  # two runs; the digits alone are in records/test_checkpoint_damage.py
def test_a_lockstep_run_that_would_skip_prompts(tmp_path, capsys):
    whole = tmp_path / "whole"
    settings = {"trainer.ckpt_interval": 2, "trainer.max_ckpts_to_keep": -1}
    trainer = train(quick(whole, "lockstep", **settings))
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints" / "global_step_6")
    config = quick(folder, "lockstep", **settings)
    # an epoch ends with step 3
    goes_on_as((whole, trainer), config, folder, capsys, '"next_ordinal": ', 4, 3)
