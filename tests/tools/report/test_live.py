"""The live page: its parts over HTTP, a run that is being written, and the page in a browser."""

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from jaxrl.data.recorded import to_arrays
from jaxrl.records.ledger import rollouts_path, write_rollouts
from jaxrl.tools.report import live
from jaxrl.tools.report.live import LiveRuns
from tests.records.ledger.scribe import Scribe
from tests.tools.report.browser import Browser, find_browser
from tests.tools.report.made_run import HOSTILE, make_run, rollouts, save_tokenizer
from tests.tools.report.unpack import unpack

ROOT = Path(__file__).parents[3]
CARDS = "document.querySelectorAll('.group [data-sample]').length"
in_browser = [
    pytest.mark.slow,
    pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed"),
]


@contextlib.contextmanager
def served(*folders, flags=()):
    """The address of a live page, served by the command."""
    command = [sys.executable, "-m", "jaxrl.report", *map(str, folders), "--live", "--port=0"]
    here = os.environ | {"PYTHONPATH": str(ROOT)}
    server = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True, env=here)
    try:
        yield re.match(r"(http://\S+/) shows", server.stdout.readline())[1]
    finally:
        server.terminate()
        server.wait()
        server.stdout.close()


def get(address, **headers):
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as answer:
        return answer.read().decode()


def refusal(address, **headers):
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(address, **headers)
    return caught.value.code, caught.value.read().decode()


def add_step(folder, step, groups=(("0:1", "2+2=", [("4", 1.0), ("5", 0.0)]),)):
    output, uids = rollouts(*groups, step=step)
    write_rollouts(rollouts_path(folder, step), to_arrays(output), uids)
    line = {"step": step, "reward/avg_raw_reward": step / 10, "timing/wall": 2.0}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line | {"timing/generate": 2.0}) + "\n")


@pytest.fixture
def at_once(monkeypatch):
    """No pause between two looks at the files."""
    monkeypatch.setattr(live, "PAUSES", (0.0, 0.0))


def about(runs):
    return json.loads(runs.part("manifest"))["runs"]


def test_parts_are_those_of_the_file(tmp_path):
    runs = LiveRuns([make_run(tmp_path / "run")], None)
    assert about(runs)[0]["recorded"] == [1, 2, 3]
    assert unpack(runs.part("m0"))[0]["names"] == sorted(
        ["reward/avg_raw_reward", "timing/wall", "timing/generate", "timing/other"]
    )
    step = json.loads(runs.part("t0-2"))
    assert (step["of"], len(step["groups"])) == (1, 1)
    header, arrays = unpack(step["groups"][0])
    assert header["uid"] == "0:1"
    words = unpack(runs.part("v0-0"))[0]
    assert "".join(words["entries"][number] for number in arrays["tokens"][:4]) == "2+2="
    # the vocabulary grows: what comes after its first three entries
    assert unpack(runs.part("v0-3"))[0]["entries"] == words["entries"][3:]
    assert json.loads(runs.part("p0")) == {"1": ["0:1"], "2": ["0:1"], "3": ["0:1"]}


@pytest.mark.parametrize(
    "name", ["t0-4", "t0", "m0-1", "m1", "v0", "x0", "../config.yaml", "t0-../../x", "m٣", ""]
)
def test_other_names_are_no_parts(tmp_path, name):
    runs = LiveRuns([make_run(tmp_path / "run")], None)
    with pytest.raises(KeyError):
        runs.part(name)


def test_a_run_that_is_being_written(tmp_path, at_once):
    folder = make_run(tmp_path / "run")
    runs = LiveRuns([folder], None)
    first = runs.part("version")
    assert runs.part("version") == first
    add_step(folder, 4)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "reward/av')  # half a line
    assert runs.part("version") != first
    (run,) = about(runs)
    assert (run["last_step"], run["recorded"]) == (4, [1, 2, 3, 4])
    header, arrays = unpack(runs.part("m0"))
    rewards = arrays[f"values{header['names'].index('reward/avg_raw_reward')}"]
    np.testing.assert_allclose(rewards, [0.1, 0.2, 0.3, 0.4], rtol=1e-6)


def test_a_run_that_takes_steps_back(tmp_path, at_once):
    """A crash after step 3, of which the last checkpoint has step 1: the run goes on from there."""
    scribe = Scribe(tmp_path / "run")
    scribe.begin()
    scribe.step(1)
    saved = scribe.ledger.position()
    scribe.step(2)
    scribe.step(3)
    scribe.ledger.submit(lambda db: None).result()  # it is written
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    runs = LiveRuns([tmp_path / "run"], None)
    assert about(runs)[0]["last_step"] == 3
    assert about(runs)[0]["ends"] == {"trained": 12}  # 3 steps of 2 x 2
    scribe.ledger.close()
    scribe.begin(1, saved, first=2)
    scribe.step(2)
    scribe.ledger.submit(lambda db: None).result()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    runs.part("version")  # while the ledger is open, and much of it in its log
    scribe.ledger.close()
    (run,) = about(runs)
    assert (run["last_step"], run["ends"]) == (2, {"trained": 8})
    assert [attempt["taken_back"] for attempt in run["attempts"]] == [2, 0]


def test_a_run_that_is_moved_away_stays_as_it_was(tmp_path, at_once):
    folder = make_run(tmp_path / "run")
    runs = LiveRuns([folder], None)
    folder.rename(tmp_path / "elsewhere")
    runs.part("version")
    assert about(runs)[0]["last_step"] == 3


def test_a_run_that_begins_later_comes_last(tmp_path, at_once):
    """Runs are known by their numbers: those that are there keep theirs."""
    make_run(tmp_path / "b")
    runs = LiveRuns([tmp_path], None)
    first = runs.part("version")
    assert runs.part("version") == first
    make_run(tmp_path / "a", steps=2)
    assert runs.part("version") != first
    assert [(run["name"], run["last_step"]) for run in about(runs)] == [("b", 3), ("a", 2)]


def test_runs_go_on_beside_one_that_is_moved_away(tmp_path, at_once):
    for name in "ab":
        make_run(tmp_path / "runs" / name)
    runs = LiveRuns([tmp_path / "runs"], None)
    (tmp_path / "runs" / "a").rename(tmp_path / "elsewhere")
    add_step(tmp_path / "runs" / "b", 4)
    runs.part("version")
    assert [run["last_step"] for run in about(runs)] == [3, 4]
    (tmp_path / "runs").rename(tmp_path / "gone")
    runs.part("version")
    assert [run["last_step"] for run in about(runs)] == [3, 4]


def search(runs, **query):
    found = runs.found(0, live.Query.of(query), 0)
    assert found["next"] is None
    return [(hit["step"], hit["uid"], hit["sample"], hit["text"]) for hit in found["hits"]]


def test_search_over_all_steps(tmp_path):
    def groups(step):
        return [("0:1", "2+2=", [("4", 1.0), (f"is {step}", 0.0)]), ("0:2", "Why?", [("é", 0.5)])]

    runs = LiveRuns([make_run(tmp_path / "run", groups=groups)], None)
    assert search(runs, text="IS 2") == [(2, "0:1", 1, "is 2<eos>")]
    assert search(runs, text="why", min="0.5") == [(s, "0:2", 0, "é<eos>") for s in (1, 2, 3)]
    assert search(runs, text="0:2", max="0.4") == []  # a uid, and no reward so low
    assert [hit[:3] for hit in search(runs, stop="length")] == [(s, "0:1", 1) for s in (1, 2, 3)]
    assert search(runs, env="another") == []


def test_a_search_answers_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrl.tools.report.find.SECONDS", 0.0)
    runs = LiveRuns([make_run(tmp_path / "run")], None)
    found = runs.found(0, live.Query(), 0)
    assert (found["searched"], found["next"], len(found["hits"])) == (1, 2, 2)
    found = runs.found(0, live.Query(), 3)
    assert (found["searched"], found["next"]) == (1, None)


def test_the_prompts_of_steps_in_the_ledger(finished):
    folder = finished[0] / "quickstart"
    runs = LiveRuns([folder], None)
    prompts = json.loads(runs.part("p0"))
    assert {step: len(uids) for step, uids in prompts.items()} == dict.fromkeys("1234", 4)
    header, _ = unpack(json.loads(runs.part("t0-3"))["groups"][0])
    assert header["uid"] == prompts["3"][0]
    assert about(runs)[0]["stops"] == ["length", "stop"]


def test_over_http(tmp_path):
    one, other = make_run(tmp_path / "runs" / "one"), make_run(tmp_path / "runs" / "other")
    with served(tmp_path / "runs") as address:
        page = get(address)
        assert "connect-src 'self'" in page
        assert 'id="manifest"' not in page  # nothing is in it, all is fetched
        said = json.loads(get(f"{address}part/manifest"))["runs"]
        assert [run["folder"] for run in said] == [str(one), str(other)]
        found = json.loads(get(f"{address}find?run=1&from=2&text=4"))
        assert [hit["step"] for hit in found["hits"]] == [2, 3]
        # paths, other names, searches that are none
        assert refusal(f"{address}part/..%2f..%2fconfig.yaml")[0] == 404
        assert refusal(f"{address}config.yaml")[0] == 404
        assert refusal(f"{address}find?run=0&from=x")[0] == 400
        assert refusal(f"{address}find?run=7&from=0")[0] == 400
        # a page of elsewhere whose name leads here (DNS rebinding)
        assert refusal(f"{address}part/m0", Host="evil.example:7007")[0] == 403
        assert get(f"{address}part/version", Host="localhost:9999")  # a tunnel


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


def open_page(browser, address, hash=""):
    browser.open_address("about:blank", "true")  # a page of before asks a server that has ended
    browser.problems.clear()
    browser.open_address(f"{address}{hash}")


class TestInBrowser:
    pytestmark = in_browser

    def test_new_steps_come_without_reload(self, browser, tmp_path):
        folder = make_run(tmp_path / "run", steps=30)
        with served(folder) as address:
            open_page(browser, address, "#view=curves&step=7")
            browser.run("window.before = true; scrollTo(0, 120)")
            top = browser.run("scrollY")
            add_step(folder, 31)
            browser.wait("document.getElementById('news').textContent === 'live: step 31'")
            assert browser.run("[state.step, before, scrollY]") == [7, True, top]
            assert browser.run("document.getElementById('slider').max") == "31"
            label = "document.querySelector('figure svg').getAttribute('aria-label')"
            browser.run("document.getElementById('follow').click()")
            browser.wait(f"{label}.includes('step 31: 3.1')")
            add_step(folder, 32)  # followed
            browser.wait(f"{label}.includes('step 32: 3.2')")
            # one that is read now, with tokens that no step had before
            add_step(folder, 33, [("0:9", "é", [(HOSTILE, 1.0), ("zZ", 0.0)])])
            browser.wait("state.step === 33")
            browser.run("document.getElementById('tab-trajectories').click()")
            browser.wait(f"{CARDS} === 2")
            text = browser.run("document.querySelectorAll('.sample .tokens')[0].textContent")
            assert text == f"{HOSTILE}<eos>"
            add_step(folder, 34)  # it does not take away what is being read
            browser.wait("document.getElementById('news').textContent === 'live: step 34'")
            assert browser.run("state.step") == 33
        browser.wait("document.getElementById('news').textContent.startsWith('the server does')")
        assert browser.run(CARDS) == 2
        assert browser.run("typeof hurt") == "undefined"

    def test_search_a_prompt_alone_and_another_step(self, browser, tmp_path):
        def groups(step):
            return [
                ("0:1", "2+2=", [("4", 1.0), (f"is {step}", 0.0), ("5", 0.0)]),
                (f"0:{step + 1}", "Why?", [("é", 0.5)]),
            ]

        with served(make_run(tmp_path / "run", groups=groups)) as address:
            open_page(browser, address, "#view=trajectories&step=1&text=IS")
            browser.wait(f"{CARDS} === 1")
            click = "[...document.querySelectorAll('button')].find(x => x.textContent === '{}')"
            browser.run(f"{click.format('find in all steps')}.click()")
            browser.wait("document.querySelectorAll('#found li').length === 3")
            browser.run("document.querySelectorAll('#found button')[1].click()")
            browser.wait("document.querySelectorAll('.found').length === 1")
            assert browser.run("state.step") == 2
            # the samples of a prompt, at two steps
            open_page(browser, address, "#view=trajectories&step=3")
            browser.wait(f"{CARDS} === 4")
            browser.run(f"{click.format('only this prompt')}.click()")
            browser.wait(f"{CARDS} === 3")
            browser.run("document.querySelector('.group details:last-of-type summary').click()")
            browser.wait(f"{click.format('step 1')} !== undefined")
            browser.run(f"{click.format('step 1')}.click()")
            browser.wait(f"{CARDS} === 6")
            sides = browser.run(
                "[...document.querySelectorAll('.group .columns > div')].map(x => x.innerText)"
            )
            assert sides[0].startswith("step 3: ") and "is 3" in sides[0]
            assert sides[1].startswith("step 1: ") and "is 1" in sides[1]
            said = browser.run("document.getElementById('main').innerText")
            assert "the distributions" in said
            assert "against=1" in browser.run("location.hash")
            assert not browser.problems

    def test_three_runs(self, browser, tmp_path):
        for k, name in enumerate(("a", "b", "c")):
            make_run(tmp_path / "runs" / name, policy_mini_batch_size=k + 1)
        save_tokenizer(tmp_path / "runs" / "no_run")
        with served(tmp_path / "runs") as address:
            open_page(browser, address, "#view=curves&metric=avg_raw")
            browser.wait("document.querySelectorAll('figure svg .curve').length === 3")
            keys = browser.run("[...document.querySelectorAll('.key')].map(x => x.textContent)")
            assert keys == ["a", "b", "c"]
            open_page(browser, address, "#view=config")
            browser.wait("document.querySelector('tr.differs') !== null")
            row = "[...document.querySelectorAll('tr.differs')].map(x => x.innerText.trim())"
            assert any(
                "policy_mini_batch_size" in text and text.split()[1:4] == ["1", "2", "3"]
                for text in browser.run(row)
            )
            open_page(browser, address, "#view=trajectories&step=2")
            browser.wait(f"{CARDS} === 6")
            for width in (1000, 400):
                browser.resize(width, 900)
                assert browser.run("document.documentElement.scrollWidth <= innerWidth")
            browser.resize(1280, 900)
            assert not browser.problems

    def test_seven_runs(self, browser, tmp_path):
        """Of lengths 3 to 9; all but the first have an alarm at step 2."""

        def metrics(k):
            entropy = {"policy/policy_entropy": 1.2345 + k}
            return lambda step: entropy | {"policy/grad_norm": math.nan if k and step == 2 else 1.0}

        folder = tmp_path / "runs"
        for k in range(7):
            make_run(folder / f"long_name_of_run_{k}", steps=3 + k, metrics=metrics(k))
        charts = "[...document.querySelectorAll('figure')]"
        with served(folder) as address:
            open_page(browser, address, "#view=overview")
            # the newest step is the one that is chosen, as the box says
            chosen = "[state.step, ...['slider', 'step'].map(x => byId(x).value), follow.checked]"
            assert browser.run(chosen) == [9, "9", "9", True]
            browser.wait("document.querySelectorAll('.curve').length > 20")
            for width in (1000, 400):
                browser.resize(width, 1400)
                for view in ("overview", "curves", "time", "trajectories", "config"):
                    browser.run(f"byId('tab-{view}').click()")
                    browser.wait("!byId('main').textContent.includes('Reading')")
                    fits = "document.documentElement.scrollWidth <= innerWidth"
                    assert browser.run(fits), (view, width)
                browser.run("byId('tab-overview').click()")
                browser.wait(f"{charts}[1].querySelectorAll('output > span').length === 7")
                titles = "[...document.querySelectorAll('figcaption b')]"
                assert browser.run(f"{titles}.every(b => b.offsetHeight < 30)")  # one line each
            browser.resize(1280, 900)
            # an alarm of one run lies over the curve of that run alone
            browser.wait(f"{charts}[0].querySelectorAll('.alarmed').length === 6")
            assert browser.run("document.querySelectorAll('svg .alarm').length") == 0
            said = browser.run(f"{charts}[0].querySelector('.alarmed title').textContent")
            assert said == "long_name_of_run_1: not_finite, steps 2 to 2"
            # what is equal is said once
            notes = "[...document.querySelectorAll('.notes li')].map(x => x.textContent)"
            (note,) = browser.run(notes)
            assert note.startswith("all runs: no run.db")
            # a run that begins now
            make_run(folder / "another", steps=11, metrics=metrics(0))
            browser.wait("document.querySelectorAll('h1 .key').length === 8")
            browser.wait(f"{charts}[1].querySelectorAll('output > span').length === 8")
            assert browser.run(chosen) == [11, "11", "11", True]
            # trajectories are not taken away while they are read, and followed after that
            browser.run("byId('tab-trajectories').click()")
            browser.run("byId('before').click()")
            assert browser.run("[state.step, byId('follow').checked]") == [10, False]
            browser.run("byId('tab-overview').click(); byId('follow').click()")
            browser.run("byId('tab-trajectories').click()")
            assert browser.run("byId('follow').disabled")
            add_step(folder / "another", 12)
            browser.wait("byId('news').textContent === 'live: step 12'")
            assert browser.run("state.step") == 11
            browser.run("byId('tab-curves').click()")
            assert browser.run("state.step") == 12
            assert not browser.problems
