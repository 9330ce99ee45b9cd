"""The page as a file, and the command that writes it."""

import base64
import hashlib
import json
import re
import shutil

import pytest

from jaxrl.report import main, report
from tests.tools.report.made_run import HOSTILE, make_run
from tests.tools.report.unpack import unpack

DATA = r'<script type="[^"]*" id="{}">([^<]*)</script>'


def element(text, name):
    return re.search(DATA.format(name), text)[1]


def without_data(text):
    return re.sub(DATA.format('[^"]*'), "", text)


def manifest(text):
    return json.loads(element(text, "manifest"))


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def test_the_page_of_a_real_run(finished, tmp_path, capsys):
    folder = tmp_path / "quickstart"
    shutil.copytree(finished[0] / "quickstart", folder)
    assert main([str(folder)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [f"{folder / 'report.html'}: {said[-1].split(': ')[1]}"]  # nothing is missing
    text = (folder / "report.html").read_text()
    (about,) = manifest(text)["runs"]
    assert about["left_out"] == {"kept": 64, "of": 64, "steps": 0}
    assert about["recorded"] == [1, 2, 3, 4]
    assert unpack(element(text, "v0-0"))[0]["known"]
    prompts, step = json.loads(element(text, "p0")), json.loads(element(text, "t0-2"))
    assert step["of"] == len(step["groups"]) == len(prompts["2"]) == 4
    header, arrays = unpack(step["groups"][1])
    assert header["uid"] == prompts["2"][1]
    assert len(header["rows"]) == 4
    # where it was sampled, and its row of the data: the right answer, four digits
    assert header["env"] == "sort_digits"
    assert len(json.loads(header["row"]["reward_spec"])["ground_truth"]) == 4
    # a dumped batch beside it: advantages, and the trainer's log-probs, near the sampler's
    assert set(arrays) >= {"log_probs", "advantages", "log_ratios", "trained"}
    assert abs(arrays["log_ratios"]).max() < 1e-3
    header, _ = unpack(element(text, "m0"))
    assert {"reward/avg_raw_reward", "policy/grad_norm", "eval/all/avg_score"} <= set(
        header["names"]
    )
    assert "generate" in header["phases"]
    assert "4 prompts x 4 samples = 16 rows per step" in json.loads(element(text, "c0"))["card"]


def test_what_a_trajectory_says_cannot_become_html(tmp_path):
    folder = make_run(
        tmp_path / "<script>alert(1)<",
        metrics=lambda step: {HOSTILE: 1.0},
        groups=lambda step: [(HOSTILE, HOSTILE, [(HOSTILE, 1.0)])],
        run_name=HOSTILE,
    )
    path, _ = report(folder)
    text = path.read_text()
    own = [
        f'id="{name}"' for name in ("manifest", "m0", "c0", "p0", "v0-0", "t0-1", "t0-2", "t0-3")
    ]
    assert text.count("<script") == text.count("</script") == len(own) + 1
    assert all(name in text for name in own)
    assert "hurt" not in without_data(text)
    assert "<img" not in text
    assert json.loads(element(text, "p0"))["1"] == [HOSTILE]


def test_nothing_can_be_fetched_and_no_other_script_runs(run):
    text = report(run)[0].read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    script = re.search(r"<script>(.*)</script>\n</body>", text, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; script-src 'sha256-{digest}';")
    page = without_data(text)
    assert not re.search(r'(src|href)="(?!#main)', page)
    assert re.findall(r"\w+://[\w./]*", page) == ["http://www.w3.org/2000/svg"]  # a name


def test_the_limit_holds_and_the_page_says_what_was_left_out(tmp_path):
    def groups(step):  # text that does not compress
        words = [hashlib.sha256(f"{step} {i}".encode()).hexdigest() for i in range(200)]
        return [(f"0:{g}", "?", [("".join(words[g * 20 : g * 20 + 20]), 1.0)]) for g in range(10)]

    folder = make_run(tmp_path / "run", steps=6, groups=groups)
    whole = report(folder)[0].stat().st_size
    path, _ = report(folder, max_mb=(whole - 20_000) / 1e6)
    assert path.stat().st_size <= whole - 20_000
    text = path.read_text()
    (about,) = manifest(text)["runs"]
    kept = about["left_out"]["kept"]
    assert 0 < kept < about["left_out"]["of"] == 60
    steps = [json.loads(element(text, f"t0-{step}")) for step in about["recorded"]]
    assert kept == sum(len(step["groups"]) for step in steps)
    assert {step["of"] for step in steps} == {10}


def test_two_runs(tmp_path):
    one, other = make_run(tmp_path / "one"), make_run(tmp_path / "other", steps=2)
    path, _ = report(one, other, output=tmp_path / "both.html")
    text = path.read_text()
    assert [x["name"] for x in manifest(text)["runs"]] == ["one", "other"]
    assert element(text, "t1-2")
    assert 'id="t1-3"' not in text
    assert not (one / "report.html").exists()


def test_a_run_that_lacks_nearly_everything(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("")
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for missing in ("no config.yaml", "no run.db", "no whole line", "no recorded trajectories"):
        assert missing in said


@pytest.mark.parametrize(
    "flags, says",
    [
        (["none"], "none is not a folder"),
        (["run", "none"], "none is not a folder"),
        (["none*"], "none* matches no run folder"),
        (
            ["run", "--port", "0"],
            "--port is for a page that is served: leave it out, or add --live",
        ),
        (
            ["run", "--live", "--max-mb", "1"],
            "--max-mb is for a page that is written: leave it out",
        ),
        (["run", "--live", "--host", "192.0.2.1", "--port", "1"], "--port=1 cannot be had"),
        (["run", "--output", "none/page.html"], "--output=none/page.html: none is not a folder"),
        (["run", "--output", "run"], "--output=run is a folder"),
        (["run", "--max-mb", "0"], "--max-mb=0: must be above 0"),
        (["run", "--max-mb", "0.01"], "without any trajectory the page has"),
        (["run", "--tokenizer", "run"], "holds no tokenizer"),
    ],
)
def test_bad_input(run, monkeypatch, capsys, flags, says):
    monkeypatch.chdir(run.parent)
    assert main(flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert says in error
    assert not (run / "report.html").exists()


def test_help(capsys):
    assert main(["--help"]) == 0
    assert "--live" in capsys.readouterr().out
    assert main(["run", "--unknown"]) == 2
    assert "--unknown" in capsys.readouterr().err
