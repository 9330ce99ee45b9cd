"""The notebooks are clean, and run from top to bottom; jaxrl does what one expects in a kernel."""

import importlib.machinery
import importlib.util
import json
import textwrap
from pathlib import Path

import nbformat
import pytest

from jaxrl.records.json_lines import read_lines
from tests.examples.notebook_kernels import ROOT, run_notebook, streams

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def cells(path):
    """Code cells by id."""
    return {c.id: c for c in nbformat.read(path, 4).cells if c.cell_type == "code"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_has_no_outputs(path):
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5)  # from 4.5 on cells have ids
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or (cell.outputs, cell.execution_count) == ([], None)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_repository_is_found_or_asked_for(path, tmp_path, monkeypatch):
    code = cells(path)["install"].source
    monkeypatch.chdir(tmp_path)
    scope = {"SOURCE": ""}
    exec(code, scope)  # beside the package
    assert scope["ROOT"] == ROOT
    folder = importlib.machinery.ModuleSpec("jaxrl", None)  # a clone that pip did not install
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: folder)
    with pytest.raises(RuntimeError, match="into SOURCE in the cell above"):
        exec(code, {"SOURCE": ""})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="into SOURCE in the cell above"):
        exec(code, {"SOURCE": ""})
    scope = {"SOURCE": str(ROOT)}
    exec(code, scope)
    assert scope["ROOT"] == ROOT


@pytest.mark.slow
def test_the_quickstart(tmp_path):
    notebook = run_notebook(nbformat.read(NOTEBOOKS[0], 4), tmp_path)
    by_id = {cell.id: cell for cell in notebook.cells}
    (run,) = (tmp_path / "runs").iterdir()
    rewards = [line["reward/avg_raw_reward"] for line in read_lines(run / "metrics.jsonl")[1:]]
    assert len(rewards) == 120
    assert sum(rewards[:5]) / 5 < 0.1
    assert sum(rewards[-5:]) / 5 > 0.8
    assert "resuming after step 80" in streams(by_id["resume"])["stdout"]
    assert "Did you mean 'max_training_steps'" in streams(by_id["config"])["stdout"]
    assert [x.output_type for x in by_id["curve"].outputs] == ["display_data"]
    assert len(streams(by_id["samples"])["stdout"].splitlines()) == 8
    assert (run / "report.html").stat().st_size > 100_000
    # one stream; below the cards a few messages and one bar, however many steps there are
    written = streams(by_id["train"])
    assert written["stderr"] == ""
    lines = [line for line in written["stdout"].split("\n") if line.strip()]
    below = lines[lines.index("objective") :]  # the data card may say the same of two data sets
    assert len(set(below)) == len(below)
    (start,) = (number for number, line in enumerate(lines) if line.startswith("mesh {"))
    assert len(lines) - start <= 12  # 80 steps


@pytest.mark.slow
def test_write_your_own_loss(tmp_path):
    notebook = run_notebook(nbformat.read(NOTEBOOKS[1], 4), tmp_path)
    by_id = {cell.id: cell for cell in notebook.cells}
    assert streams(by_id["test"])["stdout"] == "as worked out\n"
    (runs,) = (tmp_path / "runs").iterdir()
    for name in ("regular", "soft_clip"):
        lines = read_lines(runs / name / "metrics.jsonl")
        rewards = [
            line["reward/avg_raw_reward"] for line in lines if "reward/avg_raw_reward" in line
        ]
        assert sum(rewards[:5]) / 5 < 0.1
        assert sum(rewards[-5:]) / 5 > 0.5
    table = streams(by_id["compare"])["stdout"]
    assert all(name in table for name in ("regular", "soft_clip", "gspo", "cosine"))


CELLS = """
    import json, os, signal, threading, time
    from pathlib import Path
    import jax.numpy as jnp
    from jaxrl.config import load_config_file
    from jaxrl.envs import Env, StepOutput
    from jaxrl.registry import PolicyLossRegistry, register_policy_loss, source_hashes
    from jaxrl.train import train
    from jaxrl.registry.pickling import pack, unpack
    from jaxrl.records.json_lines import read_lines

    def config(name, steps, loss="mine"):
        config = load_config_file({quickstart!r})
        trainer = config.trainer
        trainer.run_name, trainer.log_path, trainer.ckpt_path = name, "runs", f"runs/{{name}}/ckpt"
        trainer.export_path = f"runs/{{name}}/export"
        trainer.max_training_steps, trainer.ckpt_interval = steps, 2
        trainer.train_batch_size, trainer.policy_mini_batch_size = 8, 4
        trainer.eval_interval = trainer.hf_save_interval = trainer.print_example_interval = -1
        trainer.algorithm.policy_loss_type = loss
        return config
    #---
    @register_policy_loss("mine")
    def mine(log_probs, old_log_probs, advantages, config, loss_mask=None):
        return -advantages * log_probs, {{}}

    class Judge(Env):
        def step(self, action):
            reward = float("1" in action)
            return StepOutput(observations=[], reward=reward, done=True, metadata={{}})
    #---
    first = config("first", 2)
    first.environment.env_class = "__main__:Judge"
    first = train(first)
    before = source_hashes(first.config.trainer.algorithm)
    #---
    @register_policy_loss("mine")  # the cell was edited
    def mine(log_probs, old_log_probs, advantages, config, loss_mask=None):
        return -advantages * jnp.exp(log_probs - old_log_probs), {{}}
    after = source_hashes(first.config.trainer.algorithm)
    loaded, _ = unpack(pack(mine, "mine", {{}}), "mine")
    print(json.dumps([before, after, float(loaded(0.0, 0.0, 3.0, None)[0])]))
    #---
    lines = Path("runs", "long", "metrics.jsonl")
    def interrupt():
        while not lines.exists() or len(read_lines(lines)) < 5:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt).start()
    try:
        train(config("long", 2000))
    except KeyboardInterrupt:
        print("interrupted")
    print([thread.name for thread in threading.enumerate() if "jaxrl" in thread.name])
    done = int(read_lines(lines)[-1]["step"])
    #---
    again = train(config("long", done + 1))
    print(int(again.state.step) - done)
    #---
    served = config("served", 2)
    served.trainer.placement.rollout_num_nodes, served.trainer.placement.colocate_all = 1, False
    print(int(train(served).state.step))
    #---
    beside = config("beside", 3, "rollout_is")
    beside.trainer.fully_async.enabled = True
    beside.trainer.fully_async.num_parallel_generation_workers = 16
    beside.trainer.policy_mini_batch_size = 8
    print(int(train(beside).state.step))
"""


@pytest.mark.slow
def test_what_one_does_in_a_notebook(tmp_path):
    """In one kernel, whose event loop runs: cells edited, runs interrupted, gone on, servers."""
    text = textwrap.dedent(CELLS).format(quickstart=str(ROOT / "configs" / "quickstart.py"))
    code = [nbformat.v4.new_code_cell(part.strip()) for part in text.split("#---")]
    notebook = run_notebook(nbformat.v4.new_notebook(cells=code), tmp_path)
    written = [streams(cell) for cell in notebook.cells]
    before, after, loss = json.loads(written[3]["stdout"])
    assert before != after and all(len(x) == 64 for x in (*before.values(), *after.values()))
    assert loss == -3.0
    assert "interrupted\n[]\n" in written[4]["stdout"]
    assert "resuming after step" in written[5]["stdout"]
    assert [part["stdout"].strip().splitlines()[-1] for part in written[5:]] == ["1", "2", "3"]
    assert Path(tmp_path, "runs", "first", "metrics.jsonl").exists()
