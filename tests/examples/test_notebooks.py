"""The notebooks are clean, and run from top to bottom; jaxrl does what one expects in a kernel."""

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

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
def test_one_cell_installs(path, tmp_path, monkeypatch):
    code, asked = cells(path)["install"].source, []
    monkeypatch.setattr(subprocess, "run", lambda argv, check: asked.append(argv[1:]))

    def install(source=""):
        exec(code.replace('SOURCE = ""', f"SOURCE = {source!r}"), {})
        return asked.pop()[-1] if asked else None

    assert install() is install("anything") is None  # jaxrl is here
    folder = importlib.machinery.ModuleSpec("jaxrl", None)  # is only called jaxrl
    find = importlib.util.find_spec
    package, looks = find("jaxrl"), []

    def found_after_pip(name):  # the first look of a cell finds none
        looks.append(name)
        return package if len(looks) % 2 == 0 else folder

    monkeypatch.setattr(importlib.util, "find_spec", found_after_pip)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="write where pip finds it into SOURCE"):
        install()
    looks.clear()
    git = "git+https://github.com/you/jaxrl"
    assert install(git) == f"jaxrl @ {git}"  # a machine without chips
    assert install("jaxrl-1-py3-none-any.whl") == "jaxrl-1-py3-none-any.whl"
    monkeypatch.chdir(path.parent)
    assert install() == str(ROOT)


@pytest.mark.parametrize(
    ("platform", "gpu", "asked", "stops"),
    [
        ("cpu", True, "", True),  # a driver that is too old: JAX warns, and takes the CPU
        ("cpu", True, "cpu", False),
        ("cpu", False, "", False),
        ("gpu", True, "", False),
        ("tpu", False, "", False),
    ],
)
def test_a_gpu_that_jax_does_not_use_stops_the_proof(monkeypatch, platform, gpu, asked, stops):
    monkeypatch.setenv("JAX_PLATFORMS", asked)
    printed = f"[Device(id=0)]\n{platform}\n"
    names = {
        "subprocess": SimpleNamespace(
            run=lambda *_, **__: SimpleNamespace(stdout=printed, returncode=0),
            PIPE=None,
            STDOUT=None,
        ),
        "sys": sys,
        "Path": lambda name: SimpleNamespace(exists=lambda: gpu and name == "/dev/nvidia0"),
    }
    code = cells(ROOT / "examples" / "notebooks" / "prove.ipynb")["devices"].source
    with pytest.raises(RuntimeError, match="580 or newer") if stops else nullcontext():
        exec(code, names)


def rewards(run):
    lines = read_lines(run / "metrics.jsonl")
    return [x["reward/avg_raw_reward"] for x in lines if "reward/avg_raw_reward" in x]


def outputs(cell):
    """What a cell shows beside text, by kind."""
    return [kind for x in cell.outputs if "data" in x for kind in x.data]


def executed(name, folder, **instead):
    """The cells of a notebook that ran, by id; the words of some of them are others: the last
    steps of a run learn what the reader has seen it learn by then."""
    notebook = nbformat.read(ROOT / "examples" / "notebooks" / f"{name}.ipynb", 4)
    for cell in notebook.cells:
        old, new = instead.get(cell.id, ("", ""))
        assert old in cell.source
        cell.source = cell.source.replace(old, new) if old else cell.source
    return {cell.id: cell for cell in run_notebook(notebook, folder).cells}


@pytest.mark.slow
def test_the_quickstart(tmp_path):
    by_id = executed(
        "quickstart",
        tmp_path,
        config=("trainer.max_training_steps = 80", "trainer.max_training_steps = 55"),
        resume=("120", "70"),
        own=("max_training_steps=60", "max_training_steps=12"),
    )
    (run,) = (tmp_path / "runs").glob("notebook_*")
    learned = rewards(run)
    assert len(learned) == 70
    assert sum(learned[:5]) / 5 < 0.1
    assert sum(learned[-5:]) / 5 > 0.5
    (own,) = (tmp_path / "runs").glob("fit-*")
    assert len(rewards(own)) == 12
    assert "resuming after step 55" in streams(by_id["resume"])["stdout"]
    assert "Did you mean 'max_training_steps'" in streams(by_id["config"])["stdout"]
    assert len(streams(by_id["answers"])["stdout"].splitlines()) == 8
    assert (run / "report.html").stat().st_size > 100_000
    assert "image/png" in outputs(by_id["train"])  # the plot that grew
    for name in ("card", "qwen", "first", "last"):
        assert "text/html" in outputs(by_id[name])
    # one stream; below the cards a few messages, however many steps there are
    written = streams(by_id["train"])
    assert "stderr" not in written or written["stderr"] == ""
    lines = [line for line in written["stdout"].split("\n") if line.strip()]
    assert len(lines) <= 45


@pytest.mark.slow
def test_write_your_own_loss(tmp_path):
    by_id = executed("write_your_own_loss", tmp_path)
    assert streams(by_id["test"])["stdout"] == "as worked out\n"
    (runs,) = (tmp_path / "runs").iterdir()
    for name in ("regular", "soft_clip"):
        learned = rewards(runs / name)
        assert sum(learned[:5]) / 5 < 0.1
        assert sum(learned[-5:]) / 5 > 0.5
    assert outputs(by_id["curves"]).count("image/png") == 1
    assert "text/html" in outputs(by_id["curves"])
    table = streams(by_id["compare"])["stdout"]
    assert all(name in table for name in ("regular", "soft_clip", "gspo", "cosine"))


@pytest.mark.slow
def test_tool_use(tmp_path):
    by_id = executed(
        "tool_use",
        tmp_path,
        imitate=(
            "trainer = shown.trainer\n",
            "trainer = shown.trainer\ntrainer.max_training_steps = 250\n",
        ),
        reward=("max_training_steps = 40", "max_training_steps = 25"),
    )
    said = streams(by_id["environment"])["stdout"].splitlines()
    assert "told ['<result>888</result>']" in said[0]
    assert "reward 1.0, done True" in said[2]
    (runs,) = (tmp_path / "runs").iterdir()
    learned = rewards(runs / "reward")
    assert len(learned) == 25
    assert sum(learned[-5:]) / 5 > sum(learned[:5]) / 5 + 0.15
    assert "image/png" in outputs(by_id["calls"])
    assert "text/html" in outputs(by_id["last"])


@pytest.mark.slow
def test_prove(tmp_path):
    shorter = ("steps=80", "steps=40")
    by_id = executed("prove", tmp_path, train=shorter, prove=("--quick", "--small"))
    (run,) = (tmp_path / "runs").glob("notebook_*")
    learned = rewards(run)
    assert len(learned) == 40 and sum(learned[-5:]) / 5 > sum(learned[:5]) / 5 + 0.4
    assert "image/png" in outputs(by_id["curve"])
    assert streams(by_id["devices"])["stdout"].strip().endswith("\ncpu")
    sent = json.loads((tmp_path / "proof" / "proof.json").read_text())
    verdicts = {name: section["verdict"] for name, section in sent["sections"].items()}
    assert verdicts == dict.fromkeys(verdicts, "passed") | {"memory": "skipped"}
    lines = streams(by_id["prove"])["stdout"].splitlines()
    assert [line.split()[0] for line in lines[: len(verdicts)]] == list(verdicts)
    assert lines[-1].startswith("proof/proof.html is the page")
    assert "text/html" in outputs(by_id["page"])


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
