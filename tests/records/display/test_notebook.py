"""A plot that grows in a notebook: one picture and one line, however many steps there are."""

import textwrap

import nbformat
import pytest

from tests.examples.notebook_kernels import run_notebook, streams

CELL = """
    import time
    from jaxrl import activity
    from jaxrl.records.display import display_of

    display = display_of("run", "auto")
    display.course.begin(0, 40)
    clock = [0.0]
    display.clock = lambda: clock[0]
    display.card("whole", lambda columns: f"folded to {columns}")
    with display, activity.doing("rollouts", 512) as rollouts:
        for step in range(1, 41):
            clock[0] += 1.0
            display.stepped(step, {"reward/avg_raw_reward": step / 40, "timing/step": 1.0})
            display.sample("2+2=<4>")
            rollouts.done = step
            activity.detail("not shown")
"""


def test_one_picture_and_one_line(tmp_path):
    cell = nbformat.v4.new_code_cell(textwrap.dedent(CELL))
    notebook = run_notebook(nbformat.v4.new_notebook(cells=[cell]), tmp_path)
    (cell,) = notebook.cells
    assert streams(cell) == {"stdout": "folded to 100\n", "stderr": ""}
    picture, status = [x.data for x in cell.outputs if x.output_type == "display_data"]
    assert picture["image/png"].startswith("iVBORw0KGgo")  # \\x89PNG
    assert status["text/html"] == ("<pre>ended after 0:40, at step 40 of 40\n2+2=&lt;4&gt;</pre>")


@pytest.mark.slow
def test_a_run_in_a_notebook(tmp_path):
    from tests.examples.notebook_kernels import ROOT

    code = f"""
        from jaxrl.config import load_config_file
        from jaxrl.train import train
        config = load_config_file({str(ROOT / "configs" / "quickstart.py")!r})
        config.trainer.max_training_steps = 3
        config.trainer.train_batch_size, config.trainer.policy_mini_batch_size = 4, 4
        config.trainer.eval_interval = config.trainer.hf_save_interval = -1
        trainer = train(config)
    """
    cell = nbformat.v4.new_code_cell(textwrap.dedent(code))
    (cell,) = run_notebook(nbformat.v4.new_notebook(cells=[cell]), tmp_path).cells
    assert streams(cell)["stderr"] == ""
    lines = streams(cell)["stdout"].splitlines()
    assert [line for line in lines if line.startswith("objective")] == ["objective"]
    assert not [line for line in lines if line.startswith("step ")]
    picture, status = [x.data for x in cell.outputs if x.output_type == "display_data"]
    assert "image/png" in picture
    assert ", at step 3 of 3\n--- step 3, reward " in status["text/html"]
