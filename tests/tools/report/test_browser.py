"""The page in a headless Chromium, from file://, with its interaction.

Needs Chromium (`apt-get install chromium`); skipped where there is none.
"""

import json
import shutil

import pytest

from jaxrl.data.recorded import to_arrays
from jaxrl.records.ledger import rollouts_path, write_rollouts
from jaxrl.report import report
from tests.tools.report.browser import Browser, find_browser
from tests.tools.report.made_run import HOSTILE, TEXT, ids, make_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed"),
]
VIEWS = ("overview", "curves", "time", "trajectories", "config")
GROUPS = "document.querySelectorAll('.group').length"
ALL_BUTTONS = "[...document.querySelectorAll('button')]"
SAID = "document.querySelector('#main [role=status]').textContent"
CARDS = "document.querySelectorAll('.group [data-sample]').length"


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


@pytest.fixture(autouse=True)
def without_problems(browser):
    browser.problems.clear()
    browser.requests.clear()
    yield
    assert browser.problems == []
    assert {address.split(":")[0] for address in browser.requests} <= {"file", "about"}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Three steps of two prompts; an alarm at step 2; NaN at step 3."""

    def metrics(step):
        sizes = {"policy/grad_norm": 1.0 if step < 3 else float("nan"), "policy/final_loss": -0.5}
        return sizes | {HOSTILE: float(step), "policy/skipped_updates": 0.0}

    def groups(step):
        long = "word " * 400  # 2000 tokens
        return [
            ("0:1", "2+2=", [("4", 1.0), (TEXT, 0.0)]),
            (HOSTILE, HOSTILE, [(f"answer {step}", 0.5), (long, 0.0)]),
        ]

    folder = tmp_path_factory.mktemp("hostile") / "<b>run"
    return report(make_run(folder, metrics=metrics, groups=groups))[0]


@pytest.fixture(scope="module")
def real(finished, tmp_path_factory):
    """The run of the session against itself, some of whose steps are not recorded."""
    folder = tmp_path_factory.mktemp("real")
    for name in ("one", "other"):
        shutil.copytree(finished[0] / "quickstart", folder / name)
    (folder / "other" / "rollouts" / "step_000003.npz").unlink()
    return report(folder / "one", folder / "other")[0]


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_of_both_pages_is_drawn(browser, hostile, real, view):
    for path in (hostile, real):
        browser.open(path, f"#view={view}&step=2")
        assert (
            browser.run("document.querySelector('[role=tab][aria-selected=true]').textContent")
            == view
        )
        browser.wait("document.getElementById('main').innerText.length > 100")
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.run("typeof hurt") == "undefined"
    assert all(address.startswith(("file:", "about:")) for address in browser.requests)
    assert len([address for address in browser.requests if address.startswith("file:")]) == 2


def test_hostile_text_is_text(browser, hostile):
    browser.open(hostile, "#view=trajectories&step=2")
    browser.wait(f"{CARDS} === 4")
    assert browser.run("typeof hurt") == "undefined"
    assert browser.run("document.querySelectorAll('#main img, #main script').length") == 0
    assert browser.run("document.querySelector('h1').textContent") == "jaxrl <b>run"
    shown = browser.run("document.querySelectorAll('.sample .tokens')[1].textContent")
    # what cannot be seen is written out; tokens are bytes, a character stands at its last one
    rest = TEXT.replace("\n", "⏎\n").replace("\t", "⇥\t").replace("\x07", "␇")
    rest = rest.replace("\u202e", "‹U+202E›").replace("\u202c", "‹U+202C›")
    assert shown.replace("·", "") == f"{rest}<eos>"
    assert "日本" in shown.replace("·", "")
    # each ends with one; that of the longest response is not shown yet
    assert browser.run("document.querySelectorAll('.sample .tokens .special').length") == 3


def test_a_character_of_several_tokens_stands_at_the_last(browser, hostile):
    browser.open(hostile, "#view=trajectories&step=2")
    browser.wait(f"{CARDS} === 4")  # what tokens say is read with the first trajectories
    entries = "runs[0].vocabulary.entries"
    is_byte = "(x) => x === byte || (typeof x !== 'string' && x[0] === byte)"
    number = f"(byte) => {entries}.findIndex({is_byte})"
    given = "[0xf0, 0x9f, 0x8e, 0x89, '4', 0xf0, 0x9f, '4', 0xf0]"
    assert browser.run(f"pieces(0, {given}.map({number}))") == [
        *("", "", "", "🎉"),
        "4",
        *("", ""),
        "\ufffd4",  # one that was not finished
        "\ufffd",
    ]


def test_colours_and_what_is_said_of_a_token(browser, real):
    browser.open(real)
    rewards = "pointsOf(runs[0], 'reward/avg_raw_reward')"
    best = browser.run(f"{rewards}.steps[{rewards}.values.indexOf(Math.max(...{rewards}.values))]")
    # of the groups in view one has to have earned something
    browser.open(real, f"#view=trajectories&step={best}&groups=spread")
    browser.wait(f"{CARDS} > 0")
    painted = (
        "[...document.querySelectorAll('.tokens [data-i]')].filter(x => x.style.background).length"
    )
    legend = "document.querySelector('.tools .legend').textContent"
    for color, says in (
        ("log_probs", "log p"),
        ("log_ratios", "98 of 100"),
        ("advantages", "98 of 100"),
        ("rewards", "98 of 100"),
        ("mask", "sampled and trained"),
        ("values", "nothing to colour: no critic"),
        ("plain", ""),
    ):
        browser.run(
            "(() => { const s = [...document.querySelectorAll('select')].find(x => "
            "[...x.options].some(o => o.value === 'log_ratios'));"
            f"s.value = '{color}'; s.dispatchEvent(new Event('change')); }})()"
        )
        browser.wait(f"{legend}.includes({json.dumps(says)})")
        if color != "log_ratios":  # sampler and trainer of this run agree, but for rounding
            none = color in ("plain", "values")
            browser.wait(f"({painted} === 0) === {json.dumps(none)}")
    browser.run("document.querySelector('.sample').scrollIntoView({ block: 'center' })")
    place = browser.run(
        "(() => { const b = document.querySelector('.sample .tokens [data-i]')"
        ".getBoundingClientRect(); return [b.left + 2, b.top + 5]; })()"
    )
    browser.move(*place)
    browser.wait("!tip.hidden")
    said = browser.run("tip.textContent")
    for word in ("place 1 of", "log p -", "ratio trainer / sampler", "advantage", "reward"):
        assert word in said


def test_the_colour_of_a_number(browser, real):
    """Half of the largest: half of the strongest; above 0 cool, below warm."""
    browser.open(real, "#color=log_ratios")
    given = "{arrays: {mask: [1, 1, 0, 1], log_ratios: [0.1, -0.2, 0.2, NaN]}}"
    found = browser.run(f"[0, 1, 2, 3].map(i => background({given}, i, 0.2))")
    assert found == ["rgba(var(--cool), 0.28)", "rgba(var(--warm), 0.55)", "", ""]
    of_zeros = "[{samples: [{rows: [{arrays: {log_ratios: [0]}}]}]}]"
    assert browser.run(f"legend({of_zeros}, 0).textContent") == "all are 0"
    browser.open(real, "#color=log_probs")
    found = browser.run("background({arrays: {mask: [1], log_probs: [-2.5]}}, 0, 0)")
    assert found == "rgba(var(--warm), 0.30)"


def test_tokens_by_the_keyboard(browser, real):
    browser.open(real, "#view=trajectories&step=2")
    browser.wait(f"{CARDS} > 0")
    browser.run("document.querySelector('.sample .tokens').focus()")
    for _ in range(2):
        browser.press("ArrowRight", 39)
    assert browser.run("document.querySelector('.tokens .here').dataset.i") == "1"
    assert "place 2 of" in browser.run("tip.textContent")


def test_filters_and_search(browser, hostile):
    browser.open(hostile, "#view=trajectories&step=1&min=0.4")
    browser.wait(f"{CARDS} === 2")
    browser.open(hostile, "#view=trajectories&step=1&stop=length")
    browser.wait(f"{CARDS} === 2")
    browser.open(hostile, "#view=trajectories&step=1&text=ANSWER")
    browser.wait(f"{GROUPS} === 1 && {CARDS} === 1")
    browser.run(f"{ALL_BUTTONS}.find(x => x.textContent === 'find in all steps').click()")
    browser.wait("document.querySelectorAll('#found li').length === 3")
    browser.wait(f"{SAID}.startsWith('3 found in 3 of 3 steps')")
    browser.run("document.querySelectorAll('#found button')[2].click()")
    browser.wait("document.querySelectorAll('.found').length === 1")
    assert browser.run("document.getElementById('step').value") == "3"
    assert "answer 3" in browser.run("document.querySelector('.found').textContent")
    browser.open(hostile, "#view=trajectories&step=1&text=nowhere")
    browser.wait(
        "document.getElementById('main').textContent.includes('No trajectory of this step')"
    )


def test_turns_that_are_rows_of_their_own(browser, tmp_path):
    """Step-wise: the second trajectory is two rows, whose prompts are shown with them."""
    folder = make_run(tmp_path / "run", steps=1)
    output = {
        "prompt_token_ids": [ids("p"), ids("p"), ids("p, then q")],
        "response_ids": [ids("a"), ids("b"), ids("c")],
        "rewards": [[0.0], [0.0], [2.0]],
        "loss_masks": [[1], [1], [1]],
        "stop_reasons": ["stop"] * 3,
        "rollout_logprobs": None,
        "policy_versions": [0] * 3,
        "is_last_step": [True, False, True],
        "rollout_metrics": {},
    }
    write_rollouts(rollouts_path(folder, 1), to_arrays(output), ["0:1", "0:1"])
    browser.open(report(folder)[0], "#view=trajectories&min=1")
    browser.wait(f"{CARDS} === 1")
    shown = browser.run("[...document.querySelectorAll('.tokens')].map(x => x.textContent)")
    assert shown == ["p", "b", "p, then q", "c"]
    assert "carry no log-probs" in browser.run("document.querySelector('.legend').textContent")


def test_best_first_and_a_long_response(browser, hostile):
    browser.open(hostile, "#view=trajectories&step=1&order=low&groups=low")
    browser.wait(f"{CARDS} === 4")
    order = browser.run(
        "[...document.querySelectorAll('.about')].map(x => x.children[1].textContent)"
    )
    assert order == ["reward 0", "reward 0.5", "reward 0", "reward 1"]
    shown = "document.querySelectorAll('.sample')[0].querySelectorAll('[data-i]').length"
    assert browser.run(shown) == 1500
    browser.run("[...document.querySelectorAll('.tokens button')][0].click()")
    assert browser.run(shown) == 2001  # 400 words of 5 characters, <eos>


def test_curves_by_mouse_and_keyboard(browser, hostile):
    browser.open(hostile, "#view=curves&step=1&metric=avg_raw")
    browser.wait("document.querySelectorAll('figure svg .curve').length === 1")
    box = browser.run(
        "(() => { const b = document.querySelector('figure svg').getBoundingClientRect();"
        "return [b.left, b.top, b.width, b.height]; })()"
    )
    browser.move(box[0] + box[2] * 0.98, box[1] + box[3] / 2)
    browser.wait("!tip.hidden")
    assert browser.run("tip.textContent") == "step 3: 0.3"
    browser.move(box[0] + box[2] * 0.98, box[1] + box[3] / 2, click=True)
    assert browser.run("state.step") == 3
    browser.run("document.querySelector('figure svg').focus()")
    browser.press("ArrowLeft", 37)
    assert browser.run("state.step") == 2
    label = browser.run("document.querySelector('figure svg').getAttribute('aria-label')")
    assert "reward/avg_raw_reward. step 2: 0.2" in label
    assert "step=2" in browser.run("location.hash")


def test_the_time_of_the_chosen_step(browser, hostile):
    browser.open(hostile, "#view=time&step=1")
    said = "document.querySelector('figure [role=status]').textContent"
    assert browser.run(said) == "step 1: 2 s, generate 1.5 s, other 0.5 s"
    browser.run("document.getElementById('after').click()")
    assert browser.run(said).startswith("step 2: ")
    shares = browser.run("[...document.querySelectorAll('tbody tr')].map(x => x.innerText)")
    assert [row.split() for row in shares] == [
        ["generate", "75.0", "%", "1.5", "s"],
        ["other", "25.0", "%", "0.5", "s"],
    ]


def test_what_is_not_finite_is_marked(browser, hostile):
    browser.open(hostile, "#view=curves&metric=grad_norm&smooth=0.9&log=1")
    browser.wait("document.querySelectorAll('figure svg .notfinite').length === 1")
    assert browser.run("document.querySelectorAll('figure svg .raw').length") == 1
    # not_finite: grad_norm is NaN at step 3
    browser.open(hostile, "#view=overview")
    browser.wait("document.querySelectorAll('svg .alarm').length > 0")
    assert "not_finite" in browser.run("document.getElementById('main').textContent")


def test_smoothing_has_no_bias_to_the_start(browser, hostile):
    """Weight 0.5: 2; (2/4 + 4/2) / (1/4 + 1/2) = 2.5 / 0.75; NaN is skipped."""
    browser.open(hostile)
    found = browser.run("Array.from(smoothed([2, NaN, 4], 0.5), x => Number.isNaN(x) ? null : x)")
    assert found == pytest.approx([2, None, 2.5 / 0.75])


def test_an_interval_is_a_band_about_its_curve(browser, tmp_path):
    def metrics(step):
        scores = {"eval/all/avg_score": 0.5, "eval/all/avg_score_ci_low": 0.25}
        return scores | {"eval/all/avg_score_ci_high": 0.75}

    page, _ = report(make_run(tmp_path / "run", metrics=metrics))
    browser.open(page, "#view=curves&metric=avg_score&step=2")
    browser.wait("document.querySelectorAll('figure svg .interval').length === 1")
    assert browser.run("document.querySelectorAll('figure').length") == 1
    label = browser.run("document.querySelector('figure svg').getAttribute('aria-label')")
    assert label.startswith("eval/all/avg_score. step 2: 0.5 (0.25 to 0.75).")


def test_two_runs_side_by_side(browser, real):
    browser.open(real, "#view=trajectories&step=2")
    browser.wait(f"{CARDS} > 0")
    for part in ("[data-sample] .about", ".tokens"):
        left, right = browser.run(
            "[...document.querySelector('.group .columns').children]"
            f".map(x => x.querySelector('{part}').textContent)"
        )
        assert left == right
    browser.open(real, "#view=trajectories&step=3")
    browser.wait(f"{GROUPS} === 4")
    said = browser.run("document.getElementById('main').textContent")
    assert "other: no trajectories of step 3 are in this page." in said
    browser.open(real, "#view=curves&metric=avg_raw_reward")
    browser.wait("document.querySelectorAll('figure')[0].querySelectorAll('.curve').length === 2")


def test_headings_leave_no_level_out(browser, hostile):
    for view in VIEWS:
        browser.open(hostile, f"#view={view}&step=2")
        browser.wait("document.querySelector('main h2') !== null")
        levels = browser.run("[...document.querySelectorAll('h1,h2,h3')].map(x => +x.tagName[1])")
        assert levels[0] == 1
        assert all(b - a <= 1 for a, b in zip(levels, levels[1:], strict=False)), view


def test_every_control_has_a_name(browser, real):
    for view in VIEWS:
        browser.open(real, f"#view={view}")
        nameless = browser.run(
            "[...document.querySelectorAll('input, select, button, svg[tabindex]')].filter(x => "
            "!(x.labels?.length || x.getAttribute('aria-label') || x.textContent.trim())).length"
        )
        assert nameless == 0


CONTRAST = """(() => {
  const rgb = (color) => { const c = document.createElement("canvas").getContext("2d");
    c.fillStyle = color; c.fillRect(0, 0, 1, 1); return [...c.getImageData(0, 0, 1, 1).data]; };
  const light = ([r, g, b]) => [r, g, b].map((x) => x / 255)
    .map((x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const style = getComputedStyle(document.documentElement);
  const of = (name) => rgb(style.getPropertyValue(`--${name}`).trim());
  const over = (name, alpha) => of("page").map((x, i) =>
    Number(style.getPropertyValue(`--${name}`).split(",")[i] ?? 0) * alpha + x * (1 - alpha));
  const pairs = [];
  for (const text of ["text", "faint", "link", "bad"]) {
    for (const under of ["page", "panel"]) pairs.push([of(text), of(under)]);
  }
  for (const [name, alpha] of [["warm", 0.6], ["cool", 0.55], ["grey", 0.28]]) {
    pairs.push([of("text"), over(name, alpha)]);
  }
  pairs.push([of("text"), of("mark")]);
  for (let i = 0; i < 7; i++) pairs.push([of(`run${i}`), of("page")]); // numbers of several runs
  return Math.min(...pairs.map(([a, b]) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  }));
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_the_contrast_of_wcag_aa(browser, hostile, dark):
    browser.resize(1280, 900, dark=dark)
    browser.open(hostile)
    assert browser.run(CONTRAST) >= 4.5
    browser.resize(1280, 900)


def test_a_telephone(browser, real):
    browser.resize(390, 800)
    browser.open(real)  # "larger" is larger here, too
    height = "document.querySelector('figure svg').clientHeight"
    small = browser.run(height)
    browser.run("document.querySelector('figcaption button').click()")
    assert browser.run(height) > small
    for view in VIEWS:
        browser.open(real, f"#view={view}")
        assert browser.run("document.documentElement.scrollWidth <= innerWidth"), view
    browser.resize(1280, 900)
