"""Trajectories that a notebook shows."""

import pytest
import yaml

from jaxrl.data.recorded import to_arrays
from jaxrl.records.ledger import write_rollouts
from jaxrl.report import samples
from jaxrl.tools.report.inline import GIVEN, Samples
from tests.tools.report.test_trajectories import columns


@pytest.fixture
def run(tmp_path):
    (tmp_path / "rollouts").mkdir()
    arrays = to_arrays(columns())
    write_rollouts(tmp_path / "rollouts" / "step_000004.npz", arrays, ["p", "p", "q"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"trainer": {"run_name": "mine"}}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "reward/avg_raw_reward": 1.0}\n')
    return tmp_path


def orange(alpha):
    return f"rgba(234, 121, 20, {alpha})"


def test_what_the_policy_said_is_coloured_as_on_the_page(run):
    found = samples(run)
    assert found.step == 4
    reward, pieces = found.rows[1]
    assert reward == 2.75  # 0.25 + 0.5 + 2.0
    # without a tokenizer, ids; 0.6 x -log-prob / 5 of what was sampled: 1, 2 and 3
    assert pieces == [
        *((f"\u27e8{token}\u27e9", GIVEN) for token in (5, 6)),
        ("\u27e87\u27e9", orange("0.12")),
        ("\u27e88\u27e9", orange("0.24")),
        *((f"\u27e8{token}\u27e9", GIVEN) for token in (3, 4)),
        ("\u27e82\u27e9", orange("0.36")),
    ]
    assert str(found).splitlines()[:2] == [
        "step 4",
        "reward 1  \u27e85\u27e9\u27e86\u27e9\u27e87\u27e9",
    ]


def test_a_few_are_spread_over_the_step(run):
    assert [reward for reward, _ in samples(run, count=2).rows] == [1.0, 0.0]  # first and last
    assert len(samples(run, step=4, count=9).rows) == 3


def test_text_of_a_model_is_no_markup():
    shown = Samples(1, [(0.5, [("<img src=x>", GIVEN)])])._repr_html_()
    assert "&lt;img src=x&gt;" in shown and "<img" not in shown


def test_a_step_that_is_not_there_is_named(run, tmp_path):
    with pytest.raises(ValueError, match=r"no trajectories of step 3; it has those of steps 4$"):
        samples(run, step=3)
    with pytest.raises(ValueError):
        samples(tmp_path / "none")
