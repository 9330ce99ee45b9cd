"""The proof: sections in processes of their own, what is kept, the page, what may be sent."""

import dataclasses
import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.architecture import layer_params
from jaxrl.models.families import config_from_hf
from jaxrl.models.kernels.choice import Facts
from jaxrl.parallel.chips import GIB
from jaxrl.prove import main
from jaxrl.tools.prove import kernels, proof, sampling, training
from jaxrl.tools.prove.page import TITLES, html, shown
from jaxrl.tools.prove.proof import SECTIONS, as_json, prove
from jaxrl.tools.prove.runs import compared
from jaxrl.tools.prove.section import (
    Result,
    Task,
    contents_hash,
    read_result,
    shares_hold,
    write_result,
)
from jaxrl.tools.prove.shareable import shareable
from jaxrl.tools.prove.training import skewed_lengths
from jaxrl.tools.prove.work import WORK
from tests.tools.prove.sections import MACHINE

ROOT = Path(__file__).parents[3]
HERE = "tests.tools.prove.sections"
FAKES = ("passes", "skips", "raises", "dies")


@pytest.fixture
def fakes(monkeypatch, tmp_path):
    """Sections that need no time; the file that they count in."""
    sections = {"machine": f"{HERE}:machine"} | {name: f"{HERE}:{name}" for name in FAKES}
    monkeypatch.setattr(proof, "SECTIONS", sections)
    titles = {name: name for name in (*sections, "sleeps")}
    monkeypatch.setattr("jaxrl.tools.prove.page.TITLES", titles)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    count = tmp_path / "count"
    count.write_text("")
    monkeypatch.setenv("COUNT", str(count))
    return count


@pytest.mark.slow
def test_a_section_that_dies_leaves_the_others_and_what_is_done_is_kept(fakes, tmp_path):
    out, told = tmp_path / "out", []
    assert not prove(out, "quick", tell=told.append)
    assert fakes.read_text() == "quick\n"
    sent = json.loads((out / "proof.json").read_text())
    verdicts = {name: section["verdict"] for name, section in sent["sections"].items()}
    assert verdicts == {
        "machine": "passed",
        "passes": "passed",
        "skips": "skipped",
        "raises": "FAILED",
        "dies": "FAILED",
    }
    assert sent["sections"]["passes"]["rows"] == [{"mfu": 0.25, "seconds": 0.125}]
    assert 0 < sent["sections"]["passes"]["seconds"] < 1e5  # the process's, not what it says
    assert sent["sections"]["raises"]["reason"] == "RuntimeError: no room in <path>"
    killed = "ended with status -9 (killed: by the system, where memory ran out); dies.log: "
    assert sent["sections"]["dies"]["reason"] == f"{killed}reached the end of the memory"
    assert [text.split()[:2] for text in told] == [list(pair) for pair in verdicts.items()]
    assert "MFU" not in told[0] and "all of it" in told[1] and "one device" in told[2]
    page = (out / "proof.html").read_text()
    assert "2 passed, 1 skipped, 2 FAILED" in page and "25.0 %" in page

    told.clear()  # again: what has a result is not done twice, what died has none
    prove(out, "quick", tell=told.append)
    assert fakes.read_text() == "quick\n"
    assert ["done before" in text for text in told] == [False, True, True, True, False]
    prove(out, "quick", again=["passes"], tell=told.append)
    assert fakes.read_text() == "quick\n" * 2


@pytest.mark.slow
def test_results_of_another_mode_are_not_kept(fakes, tmp_path, monkeypatch):
    sections = {"machine": f"{HERE}:machine", "passes": f"{HERE}:passes"}
    monkeypatch.setattr(proof, "SECTIONS", sections)
    for mode in ("quick", "whole"):
        assert prove(tmp_path / "out", mode, tell=lambda text: None)
    assert fakes.read_text() == "quick\nwhole\n"


@pytest.mark.slow
def test_results_of_other_files_are_not_kept(fakes, tmp_path, monkeypatch):
    """After an edit or an upgrade what is done is done anew; the version is the same."""
    sections = {"machine": f"{HERE}:machine_with_sources", "passes": f"{HERE}:passes"}
    monkeypatch.setattr(proof, "SECTIONS", sections)
    source = tmp_path / "jaxrl" / "losses" / "ppo.py"
    source.parent.mkdir(parents=True)
    source.write_text("ratio = 1")
    monkeypatch.setenv("SOURCES", str(tmp_path / "jaxrl"))

    def times_done():
        assert prove(tmp_path / "out", "quick", tell=lambda text: None)
        return fakes.read_text().count("quick")

    assert times_done() == 1
    source.write_text("ratio = 2")
    assert times_done() == 2


def test_the_hash_of_files_is_of_their_names_and_contents(tmp_path):
    package, other = tmp_path / "package", tmp_path / "recipe.py"
    (package / "__pycache__").mkdir(parents=True)
    file = package / "a.py"
    for one in (file, other):
        one.write_text("1")
    found = [contents_hash(package)]
    (package / "__pycache__" / "a.pyc").write_text("made by Python")
    (package / ".a.py.swp").write_text("made by an editor")
    assert contents_hash(package) == found[0]
    found.append(contents_hash(package, other))
    other.write_text("2")
    found.append(contents_hash(package, other))
    found.append(contents_hash(file.rename(package / "b.py").parent))
    assert len(set(found)) == 4


def test_a_result_is_read_as_it_was_written(tmp_path):
    write_result(tmp_path, "update", "quick", MACHINE, Result(False, reason="a bug"))
    assert read_result(tmp_path, "update", "quick", MACHINE) == Result(
        False, reason="a bug", rows=[], missing=[]
    )


def budget_of_quick(monkeypatch, seconds):
    work = dataclasses.replace(WORK["quick"], budget=seconds)
    monkeypatch.setitem(proof.WORK, "quick", work)


@pytest.mark.slow
def test_what_has_no_time_left_is_left_out_and_the_same_command_goes_on(
    fakes, tmp_path, monkeypatch
):
    sections = {name: f"{HERE}:{name}" for name in ("machine", "skips", "passes")}
    monkeypatch.setattr(proof, "SECTIONS", sections)
    out, told = tmp_path / "out", []
    out.mkdir()
    write_result(out, "skips", "quick", MACHINE, Result(None, reason="there is one device"))
    budget_of_quick(monkeypatch, 0)
    assert prove(out, "quick", tell=told.append)  # no failure
    assert fakes.read_text() == "" and not (out / "passes.json").exists()
    assert told[1].endswith("there is one device, done before")
    reason = "the 0 minutes of --quick were over; the same command goes on with it"
    assert told[2].split()[:3] == ["passes", "left", "out"] and told[2].endswith(reason)
    left_out = json.loads((out / "proof.json").read_text())["sections"]["passes"]
    assert (left_out["verdict"], left_out["reason"]) == ("left out", reason)
    page = (out / "proof.html").read_text()
    assert reason in page
    assert "1 passed, 1 skipped, 0 FAILED, 1 left out: the same command goes on" in page

    budget_of_quick(monkeypatch, 900)
    assert prove(out, "quick", tell=told.append)
    assert fakes.read_text() == "quick\n"
    assert told[-1].split()[:2] == ["passes", "passed"]
    page = (out / "proof.html").read_text()
    assert "2 passed, 1 skipped, 0 FAILED<" in page and "left out" not in page

    budget_of_quick(monkeypatch, 0)  # what is to be done anew has no old result, either
    assert prove(out, "quick", again=["passes"], tell=told.append)
    assert told[-1].split()[:3] == ["passes", "left", "out"]
    assert not (out / "passes.json").exists()


def test_a_section_that_runs_when_the_budget_is_spent_is_ended(fakes, tmp_path, monkeypatch):
    sections = {name: f"{HERE}:{name}" for name in ("machine", "sleeps", "passes")}
    monkeypatch.setattr(proof, "SECTIONS", sections)
    budget_of_quick(monkeypatch, 2)
    out, told = tmp_path / "out", []
    assert prove(out, "quick", tell=told.append)
    assert [text.split()[:3] for text in told[1:]] == [
        ["sleeps", "left", "out"],
        ["passes", "left", "out"],
    ]
    assert "was ended before it was done, as the 0 minutes of --quick were over" in told[1]
    assert not (out / "sleeps.json").exists() and not (out / "passes.json").exists()


def test_only_the_quick_proof_has_a_budget():
    assert {mode: work.budget for mode, work in WORK.items()} == {
        "whole": None,
        "quick": 15 * 60,
        "small": None,
    }


@pytest.mark.parametrize(
    ("gib", "head", "passed"), [(2.0, 0.5, None), (2.0, 1.5, False), (8.0, 0.5, True)]
)
def test_an_update_without_memory_is_skipped_and_its_head_kept(
    monkeypatch, tmp_path, gib, head, passed
):
    """Both need more than 2 GiB, one less than 8; a head that beats the maker's rate is wrong."""

    def assemble(task, name, shape, length):
        peak = {64: 4, 128: 16}[length] * GIB
        return training.Case(name, length, 256, None, np.array([2]), peak)

    def measured(task, case):
        row = {"model": case.name, "what": f"rows of {case.length}"}
        refusal = training._refusal(task.machine, case)
        return row | ({"note": refusal} if refusal else {"mfu": 0.25})

    monkeypatch.setattr(training, "assemble", assemble)
    monkeypatch.setattr(training, "_measured", measured)
    of_head = {"model": "small", "what": "head alone, whole", "mfu": head}
    monkeypatch.setattr(training, "_head", lambda task, name, shape: of_head)
    machine = dataclasses.replace(MACHINE, memory=gib * GIB)
    result = training.update(Task("small", tmp_path, machine))
    assert result.passed is passed
    assert result.rows[-1] == of_head and len(result.rows) == 3
    assert f"small head alone, whole {head:.1%}" in result.figure
    if passed is None:
        assert result.reason == (
            "no update fits: small, rows of 64, needs 4.0 GiB of a device by the plan, it has 2.0"
        )


CALL = f"""
from pathlib import Path
from jaxrl.tools.prove import proof
proof.SECTIONS = {{"machine": "{HERE}:machine", "resume": "{HERE}:sleeps"}}
proof.prove(Path("out"), "quick")
"""


def test_a_killed_proof_takes_its_section_with_it(fakes, tmp_path):
    call = subprocess.Popen([sys.executable, "-c", CALL], cwd=tmp_path)
    until(fakes.read_text)
    call.send_signal(signal.SIGKILL)
    call.wait()
    section = int(fakes.read_text())
    until(lambda: not Path(f"/proc/{section}").exists() or "Z" in state(section))


def until(holds):
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def state(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--again=updates"], "--again=updates: there is no such section; there are machine"),
        (["--quick", "--small"], "--quick --small: give one of them"),
        (["--outt=x"], "did you mean --out?"),
        (["x"], "unrecognized arguments: x"),
    ],
)
def test_wrong_words(words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_platform_that_is_not_here_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu_of_another")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert main([f"--out={tmp_path / 'out'}"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: JAX_PLATFORMS=tpu_of_another: ") and told.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("cannot write /home/ann/proof/x.json: full", "cannot write <path>: full"),
        ("'/data/models/qwen'", "'<path>'"),
        ("--xla_dump_to=/tmp --xla_x=true", "--xla_dump_to=<path> --xla_x=true"),
        ("C:\\Users\\ann\\x.py", "<path>"),
        ("file:///srv/x and 10.0.0.7:8476", "<address> and <address>"),
        ("host42 (host42.lab) of ann", "<name> (<name>.lab) of <name>"),
        (
            "tokens/s, GB/s, 1/2, 3 and 4/5/6 of annual",
            "tokens/s, GB/s, 1/2, 3 and 4/5/6 of annual",
        ),
        (
            "580.65.06, NVIDIA H100 80GB HBM3, 81559 MiB",
            "580.65.06, NVIDIA H100 80GB HBM3, 81559 MiB",
        ),
        ("jax 0.10.2", "jax 0.10.2"),
    ],
)
def test_what_is_sent_names_no_place(text, sent):
    assert shareable({"a": [text, 1.5, None]}, ("host42", "ann")) == {"a": [sent, 1.5, None]}


def test_the_page_is_whole_and_shows_what_is_missing():
    found = {name: Result(True, "1 < 2 & so on") for name in SECTIONS}
    found["sync"] = Result(None, reason="<one> device", missing=["other devices"])
    found["update"] = Result(True, rows=[{"model": "a", "mfu": 0.4}, {"note": "needs 30 GiB"}])
    text = html(as_json("small", found))
    assert set(TITLES) == set(SECTIONS)
    assert all(f'<section id="{name}">' in text for name in SECTIONS)
    assert "1 &lt; 2 &amp; so on" in text and "&lt;one&gt; device" in text
    assert "<li>other devices</li>" in text and "40.0 %" in text and "needs 30 GiB" in text
    assert not re.search(r"<script|src=|url\(|https?://|\{\{", text)


def test_a_kernel_that_raises_leaves_the_others(monkeypatch, tmp_path):
    def raises(x):
        raise RuntimeError("no shared memory\nand more")

    def double(x):
        return 2 * x

    def comparisons(task, model):
        for name, run in (("breaks", raises), ("works", double), ("is off", jnp.square)):
            yield kernels.Comparison("product", name, run, double, (jnp.arange(3.0),), True)

    monkeypatch.setattr(kernels, "_comparisons", comparisons)
    found = kernels.kernels(Task("small", tmp_path, MACHINE))
    (model,) = WORK["small"].shapes
    assert [(row["implementation"], row["result"]) for row in found.rows] == [
        ("breaks", "FAIL"),
        ("works", "pass"),
        ("is off", "FAIL"),
    ]
    assert found.rows[0]["note"] == "RuntimeError: no shared memory"
    assert found.passed is False
    assert found.reason == (
        f"did not run: product breaks ({model}); off by more than 0.02: product is off ({model})"
    )
    # x^2 = (0, 1, 4), 2x = (0, 2, 4): off by 1 of sqrt(20)
    np.testing.assert_allclose(found.rows[2]["error"], 20**-0.5, rtol=1e-6)
    assert found.figure.startswith("2 compared in bfloat16")


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("queries", [1, 128])
def test_a_page_of_another_row_is_found_out(platform, queries):
    """As pages lie on each platform; computed here."""
    model = config_from_hf(dict(WORK["small"].shapes["small"]))
    facts = Facts(platform, jnp.dtype(jnp.float32), model)
    pair = kernels._to_pages(model, "xla", 3, queries, 200, facts)
    assert kernels._judged(pair, 1e-4, 1)["result"] == "pass"

    def others(q, *pages):
        return pair.run(q, *(jnp.roll(x, 1, axis=0) for x in pages))

    assert kernels._judged(pair._replace(run=others), 1e-4, 1)["result"] == "FAIL"


@pytest.mark.slow
def test_every_call_of_a_measurement_prefills_its_prompts(tmp_path, monkeypatch):
    engines = []

    class Noted(sampling.NativeEngine):
        def __init__(self, *given, **options):
            super().__init__(*given, **options)
            engines.append(self)

    monkeypatch.setattr(sampling, "NativeEngine", Noted)
    here = dataclasses.replace(MACHINE, platform="cpu")
    assert sampling.decode(Task("small", tmp_path, here)).passed
    # in (2 + 2) x 2 calls a prompt of 8 tokens, whose last is decoded, once on each row's device
    assert [engine.prefilled_tokens for engine in engines] == [8 * 7 * 4, 8 * 7 * 8]


def test_figures():
    assert shown("mfu", 0.4321) == "43.2 %"
    assert shown("seconds", 0.0123456) == "0.01235"
    assert shown("tokens_per_second", 123456.7) == "123,457"
    assert shown("slots", 64) == "64"
    assert shown("note", None) == ""
    assert shown("figure", [1e-7, 5e-4]) == "1e-07 0.0005"


def test_a_share_above_what_the_maker_promises_is_no_measurement():
    assert shares_hold(MACHINE, [0.4, 0.9]) == ""
    assert "1.20" in shares_hold(MACHINE, [0.4, 1.2])


def test_lengths_of_an_update():
    """Of min(x, 1), x exponential of scale 0.45, the mean is 0.45 (1 - e^(-1/0.45)) = 0.40."""
    lengths = skewed_lengths(1000, 2048)
    assert lengths.max() == 2048 and lengths.min() >= 2
    np.testing.assert_allclose(lengths.mean() / 2048, 0.45 * (1 - np.exp(-1 / 0.45)), rtol=0.01)


def test_sizes_are_those_of_the_models():
    """Layers: 24 x (896 x 64 x (2 x 14 + 2 x 2) + 3 x 896 x 4864); head: 896 x 151,936."""
    model = config_from_hf(dict(WORK["quick"].shapes["qwen2.5-0.5b"]))
    assert layer_params(model) + 896 * 151_936 == 357_826_560 + 136_134_656
    assert list(WORK["whole"].shapes) == ["qwen2.5-0.5b", "qwen2.5-1.5b"]


@pytest.mark.parametrize(
    ("different", "passed"),
    [([0], True), ([0, 3], True), ([2], False), ([2, 0], False), ([2, 3], None)],
)
def test_a_resume_is_judged_where_runs_repeat(different, passed):
    """The killed run's differences come first, those of a run that was left alone second."""
    rows = [{"run": "", "different": n, "such_as": "x" * n} for n in different]
    assert compared("killed", "quick", rows).passed is passed


@pytest.mark.parametrize(("mode", "flag"), [("whole", ""), ("quick", " --quick")])
def test_the_command_that_repeats_a_resume_names_the_mode(mode, flag):
    """Without it the call would be of another mode, and do every section anew."""
    rows = [{"run": "", "different": 1, "such_as": "x"}] * 2
    assert f"`jaxrl prove{flag} --again=resume`" in compared("killed", mode, rows).reason


@pytest.mark.slow
def test_the_small_proof_on_this_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)
    status = main(["--quick", f"--out={tmp_path / 'out'}"])
    told = capsys.readouterr().out
    assert status == 0, told
    text = (tmp_path / "out" / "proof.json").read_text()
    sent = json.loads(text)
    assert sent["mode"] == "small" and list(sent["sections"]) == list(SECTIONS)
    verdicts = {name: section["verdict"] for name, section in sent["sections"].items()}
    assert verdicts == dict.fromkeys(SECTIONS, "passed") | {"memory": "skipped"}
    names = {
        socket.gethostname(),
        getpass.getuser(),
        str(tmp_path),
        str(ROOT),
        os.path.expanduser("~"),
    }
    for name in names - {"root"}:
        assert name not in text and name not in (tmp_path / "out" / "proof.html").read_text()
