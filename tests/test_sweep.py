"""Sweeps: methods, learning rates and seeds on one task; intervals, tables, runs that fail."""

import concurrent.futures
import json
import multiprocessing
import os
import sys

import numpy as np
import pytest
from scipy import stats

from jaxrl import config as cfg
from jaxrl.sweep import main
from jaxrl.tools.compare.variants import parse_variants
from jaxrl.tools.sweep.comparisons import against_first, holm, welch
from jaxrl.tools.sweep.summary import best_lr, over_seeds, ranked, summary, table
from jaxrl.tools.sweep.sweep import sweep
from jaxrl.tools.sweep.units import Outcome, take_cores, units
from jaxrl.train import train
from tests.test_train import QUICKSTART, metric_lines, small


def outcome(method="a", lr=1.0, seed=1, score=0.5, error=""):
    return Outcome(method, lr, seed, [0.1, 0.2], None if error else score, 0.3, error)


def test_an_interval_is_students():
    # 1, 2, 3: mean 2, standard error 1 / sqrt(3), t of 2 degrees at 97.5 % = 4.302653
    found, half = over_seeds([1.0, 2.0, 3.0]), 4.302653 / 3**0.5
    assert (found.mean, found.low, found.high) == pytest.approx((2, 2 - half, 2 + half))
    assert str(over_seeds([0.25] * 5)) == "0.250 [0.250, 0.250]"
    assert str(over_seeds([0.25])) == "0.250"


@pytest.mark.parametrize("seeds", [3, 5])
def test_an_interval_holds_the_truth_as_often_as_it_says(seeds):
    drawn = np.random.default_rng(seeds).normal(size=(2000, seeds))
    found = [over_seeds(scores) for scores in drawn]
    assert 0.93 < np.mean([x.low <= 0 <= x.high for x in found]) < 0.97


def test_equal_methods_rarely_differ_from_the_first_one():
    """Any of 12 in at most 5 % of the sweeps; one, not corrected, in more than that."""
    rng, any_of_them, uncorrected = np.random.default_rng(0), 0, 0
    for drawn in rng.normal(size=(500, 13, 3)):
        found = against_first(dict(enumerate(drawn)))
        any_of_them += min(found.values()) < 0.05
        uncorrected += min(welch(x, drawn[0]) for x in drawn[1:]) < 0.05
    assert any_of_them / 500 < 0.05 < uncorrected / 500


def test_a_difference_is_judged_by_welchs_t():
    # 1, 2, 3 and 4, 6, 8: u = 1/3, v = 4/3, t = 4 / sqrt(5/3) = 3.098, degrees of freedom
    # (5/3)^2 / (1/18 + 16/18) = 50/17
    assert welch([1, 2, 3], [4, 6, 8]) == pytest.approx(2 * stats.t.sf(4 / (5 / 3) ** 0.5, 50 / 17))
    for seed in range(5):
        rng = np.random.default_rng(seed)
        one, other = rng.normal(size=3 + seed), rng.normal(1, 2, size=5)
        expected = stats.ttest_ind(one, other, equal_var=False).pvalue
        assert welch(one, other) == pytest.approx(expected, rel=1e-9)
    assert (welch([1, 1], [1, 1]), welch([1, 1], [2, 2])) == (1.0, 0.0)


def test_holms_rule():
    # 3 x 0.01; 2 x 0.03; 1 x 0.04, but not below the one before
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_nothing_is_compared_with_a_single_run():
    assert against_first({"a": [1.0], "b": [1.0, 2.0], "c": [2.0, 3.0]}) == {}
    found = against_first({"b": [1.0, 2.0], "a": [1.0], "c": [2.0, 3.0]})
    assert found == {"c": pytest.approx(welch([1, 2], [2, 3]))}  # one comparison


def test_the_rate_with_the_best_mean_is_chosen_and_what_fails_earns_nothing():
    tried = [
        outcome(lr=1e-3, score=0.4),
        outcome(lr=1e-3, score=0.4),
        outcome(lr=1e-2, score=0.7),
        outcome(lr=1e-2, error="diverged"),  # 0.35
        outcome(lr=3e-3, score=0.4),  # equal to the smaller one
        outcome(lr=3e-3, score=0.4),
    ]
    assert best_lr(tried) == (1e-3, {1e-3: 0.4, 3e-3: 0.4, 1e-2: 0.35})


def test_the_table_is_by_score_and_names_failures():
    good = summary("good", [outcome(score=0.9), outcome(seed=2, score=0.7)], {})
    bad = summary("bad", [outcome(score=0.1), outcome(seed=2, error="a | b")], {})
    gone = summary("gone", [outcome(error="refused")], {})
    assert [x.method for x in ranked([gone, bad, good])] == ["good", "bad", "gone"]
    lines = table([gone, bad, good]).splitlines()[2:]
    # mean 0.8, standard error 0.1, t of one degree 12.706
    assert lines[0].startswith("| `good` | 1 | 2 | 0.800 [-0.471, 2.071] | 0.300 [0.300, 0.300] |")
    assert lines[1].startswith("| `bad` | 1 | 2 | 0.100 | 0.300 |  |")
    assert lines[1].endswith("| seed 2: a / b |")
    assert lines[2] == "| `gone` | 1 | 1 |  |  |  | seed 1: refused |"
    assert "0 comparisons with `gone`" in lines[4]


def test_the_table_compares_with_the_first_method():
    first = summary("b", [outcome(score=0.3), outcome(seed=2, score=0.5)], {})
    same = summary("a", [outcome(score=0.4), outcome(seed=2, score=0.4)], {})
    sure = summary("c", [outcome(score=0.999), outcome(seed=2, score=0.9991)], {})
    lines = table([first, same, sure]).splitlines()
    assert "| p of the reward against `b` |" in lines[0]
    p = 2 * stats.t.sf(0.59905 / 0.1, 1.000001)  # mean 0.4, standard error 0.1, of one degree
    assert lines[2].split(" | ")[5] == f"{2 * p:.3f}"  # of two comparisons
    assert [x.split(" | ")[5] for x in lines[3:5]] == ["1.000", ""]
    assert lines[6].endswith(
        "Welch's t of the rewards, 2 comparisons with `b`, corrected for their number by Holm's "
        "rule."
    )


def test_a_result_is_found_by_all_that_its_run_is_made_of(tmp_path):
    variants = parse_variants(cfg.resolve(small(tmp_path)), "regular,gspo", "grpo,rloo")
    runs = units(variants, (1e-3, 1e-2), (1, 2), tmp_path)
    assert len({x.result for x in runs}) == len(runs) == 16
    elsewhere = units(variants, (1e-3, 1e-2), (1, 2), tmp_path / "other")
    assert [x.result.name for x in runs] == [x.result.name for x in elsewhere]
    longer = cfg.apply_overrides(variants[0].config, {"trainer.max_training_steps": 5})
    other = units([variants[0].__class__("x", longer)], (1e-3,), (1,), tmp_path)
    assert other[0].result not in {x.result for x in runs}


def test_a_copy_of_the_repository_finds_the_same_results(tmp_path, monkeypatch):
    config, names = cfg.resolve(small(tmp_path)), []
    for folder in (tmp_path / "one", tmp_path / "other"):
        folder.mkdir()
        monkeypatch.chdir(folder)
        path = {"trainer.policy.model.path": str(folder / "configs" / "model")}
        own = cfg.apply_overrides(config, path)
        (run,) = units(parse_variants(own, "regular", "grpo"), (), (1,), tmp_path)
        names.append(run.result.name)
    assert names[0] == names[1]


LOSS = """
def broken(log_probs, old_log_probs, advantages, config, loss_mask=None):
    '''A user's loss that fails where it is computed, but not where it is looked at.'''
    if log_probs.shape[0] >= 0:
        raise ValueError("no such thing")
    return log_probs, {}
"""


def test_a_sweep_is_its_runs_and_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    """The score is that of `jaxrl train` with the same seed; one loss fails in its first step.

    What is stopped has a thread in place of its process, which would import and compile it all. It
    leaves the last run, which has one; the loss is in a file of its own: that process does not
    import what the tests do.
    """
    (tmp_path / "loss_of_a_sweep.py").write_text(LOSS)
    monkeypatch.syspath_prepend(tmp_path)
    settings = {
        "trainer.max_training_steps": 3,
        "trainer.eval_interval": 3,
        "trainer.algorithm.use_kl_loss": False,
        "generator.sampling_params.max_generate_length": 3,  # with 5 of a prompt: of one width
    }
    config = cfg.resolve(small(tmp_path / "own", **settings))
    variants = parse_variants(config, "loss_of_a_sweep:broken,regular", None)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(concurrent.futures, "ProcessPoolExecutor", _threads)
        sweep(variants, tmp_path / "out", seeds=[1, 2], say=_stop_after_third)
    results = tmp_path / "out" / "results"
    kept = {x: x.stat().st_mtime_ns for x in results.iterdir()}
    assert len(kept) == 3
    said = []
    found = sweep(variants, tmp_path / "out", seeds=[1, 2], say=said.append)
    assert all(x.stat().st_mtime_ns == time for x, time in kept.items())
    assert len(said) == 4
    train(small(tmp_path / "own", **settings, **{"trainer.seed": 2}))
    lines = metric_lines(tmp_path / "own")
    rewards = [x["reward/avg_raw_reward"] for x in lines if "reward/avg_raw_reward" in x]
    assert any(rewards)
    broken, regular = found
    np.testing.assert_allclose(regular.outcomes[1].rewards, rewards, atol=1e-6)
    assert regular.outcomes[1].score == pytest.approx(rewards[-1], abs=1e-6)
    assert broken.score is None
    assert all("no such thing" in x for x in broken.failures)
    assert (tmp_path / "out" / "sweep.png").stat().st_size > 10_000
    numbers = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert [x["method"] for x in numbers] == ["loss_of_a_sweep:broken", "regular"]
    before = (tmp_path / "out" / "table.md").read_text()
    kept = {x: x.stat().st_mtime_ns for x in results.iterdir()}
    sweep(variants, tmp_path / "out", seeds=[1, 2], say=said.append)
    assert (tmp_path / "out" / "table.md").read_text() == before
    assert {x: x.stat().st_mtime_ns for x in results.iterdir()} == kept and len(kept) == 4


def _threads(count, context, **share):
    return concurrent.futures.ThreadPoolExecutor(count, **share)


def _stop_after_third(line):
    if line.startswith("3 of 4: "):
        raise KeyboardInterrupt


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process has all cores")
def test_processes_beside_each_other_have_cores_of_their_own():
    """Two have them all between them; of more than there are cores, some have all of them.

    One is a process, as in a sweep. The others are threads: these have cores of their own, too, and
    take their numbers from the same queue.
    """
    mine = os.sched_getaffinity(0)
    context = multiprocessing.get_context("spawn")
    for processes in (2, len(mine) + 1):
        numbers = context.SimpleQueue()
        for number in range(processes):
            numbers.put(number)
        share = {"initializer": take_cores, "initargs": (numbers, processes)}
        pools = [concurrent.futures.ThreadPoolExecutor(1, **share) for _ in range(processes)]
        if processes == 2:
            pools[0] = concurrent.futures.ProcessPoolExecutor(1, context, **share)
        taken = []
        for pool in pools:
            with pool:
                taken.append(pool.submit(os.sched_getaffinity, 0).result())
        assert os.sched_getaffinity(0) == mine == set().union(*taken)
        if processes <= len(mine):
            assert sum(map(len, taken)) == len(mine)
        else:
            assert taken.count(mine) == 1 + (len(mine) == 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lrs=1e-3"], "lrs and tuning_seeds belong together"),
        (["--lrs=1e-3", "--tuning-seeds=2"], "tuning_seeds: 2 is one of seeds"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, capsys, words, said):
    given = [f"--config={QUICKSTART}", "--losses=regular", "--seeds=1,2", f"--out={tmp_path}"]
    assert main([*given, *words]) == 2
    assert said in capsys.readouterr().err
