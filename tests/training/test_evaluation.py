"""Scores per data source and over all, and the answers on disk."""

import json

import pytest

from jaxrl import config as cfg
from jaxrl.data.tokenizer import character_tokenizer
from jaxrl.training.evaluation import dump_evaluation, evaluate, source_metrics
from jaxrl.types import Prompt

TOKENIZER = character_tokenizer("0123456789>")
# Prompts a0, a1 of source "a", b0 of "b", x0 of none; two samples each, rewarded as follows.
REWARDS = {"a0": [1.0, 0.0], "a1": [0.0, 0.0], "b0": [[0.5, 0.25], [-1.0, 0.0]], "x0": [0.0, 2.0]}


def prompt(uid):
    extras = {"data_source": uid[0]} if uid != "x0" else {}
    return Prompt(
        uid=uid,
        messages=[{"role": "user", "content": uid[1]}],
        tokens=(int(uid[1]), 10),
        env_class="stub",
        extras=extras,
    )


def generate(prompts, step, samples):
    """Answers "7<n>" with n the number of the sample; the second one is cut off."""
    assert (step, samples) == (3, 2)
    calls.append([p.uid for p in prompts])
    return {
        "response_ids": [[7, n] for _ in prompts for n in range(samples)],
        "rewards": [r for p in prompts for r in REWARDS[p.uid]],
        "stop_reasons": ["stop", "length"] * len(prompts),
        "policy_versions": [3, 3] * len(prompts),
    }


calls: list[list[str]] = []


@pytest.fixture(name="result")
def result_fixture():
    calls.clear()
    prompts = [prompt(uid) for uid in REWARDS]
    settings = {"generator.eval_n_samples_per_prompt": 2, "trainer.eval_batch_size": 3}
    config = cfg.resolve(cfg.apply_overrides(cfg.TrainConfig(), settings))
    return evaluate(generate, prompts, 3, config, tokenizer=TOKENIZER)


def test_prompts_come_in_batches(result):
    assert calls == [["a0", "a1", "b0"], ["x0"]]


def test_metrics_literal(result):
    # a:       scores 1 0 0 0, mean 1/4; one of two prompts passes; positive mean 1/4;
    #          pass@1 is the share of samples above 0: (1/2 + 0) / 2
    # b:       scores 0.75 -1, mean -1/8; passes; positive 0.75 and 0, mean 0.375; pass@1 1/2
    # unknown: scores 0 2, mean 1; passes; positive mean 1; pass@1 1/2
    # all:     (1 + 0.75 - 1 + 2) / 8 = 0.34375; three of four pass; (1 + 0.75 + 2) / 8 = 0.46875;
    #          pass@1 (1 + 0 + 1 + 1) / 8 = 0.375
    metrics, _ = result
    names = "avg_score", "pass_at_1", "pass_at_2", "mean_positive_reward", "num_prompts"
    expected = {
        "a": (0.25, 0.25, 0.5, 0.25, 2),
        "b": (-0.125, 0.5, 1.0, 0.375, 1),
        "unknown": (1.0, 0.5, 1.0, 1.0, 1),
        "all": (0.34375, 0.375, 0.75, 0.46875, 4),
    }
    everywhere = {"avg_num_tokens": 2.0, "stop_ratio": 0.5, "env_errors": 0.0}
    wanted = {
        f"eval/{source}/{name}": value
        for source, values in expected.items()
        for name, value in {**dict(zip(names, values, strict=True)), **everywhere}.items()
    }
    assert {name: x for name, x in metrics.items() if "_ci_" not in name} == wanted
    # two prompts and four; one prompt says nothing of others
    intervals = {"/".join(name.split("/")[:2]) for name in metrics if "_ci_" in name}
    assert intervals == {"eval/a", "eval/all"}
    # the means of the four prompts are 1/2, 0, -1/8, 1: squared deviations 0.024414 + 0.118164 +
    # 0.219727 + 0.430664 = 0.792969, sd (0.792969 / 3)^1/2; t of 3 degrees 3.182446
    half = 3.182446 * (0.792969 / 3) ** 0.5 / 2
    assert metrics["eval/all/avg_score_ci_low"] == pytest.approx(0.34375 - half, abs=1e-5)


def test_a_source_cannot_be_called_all():
    other = Prompt("y", [], (1,), "stub", extras={"data_source": "all"})
    with pytest.raises(ValueError, match="data_source='all' is the name of all sources"):
        evaluate(generate, [other], 3, cfg.resolve(cfg.TrainConfig()), tokenizer=TOKENIZER)


def test_one_row_per_answer(result):
    _, rows = result
    assert [row["uid"] for row in rows] == ["a0", "a0", "a1", "a1", "b0", "b0", "x0", "x0"]
    assert rows[5] == {
        "uid": "b0",
        "data_source": "b",
        "env_class": "stub",
        "extras": {"data_source": "b"},
        "prompt": [{"role": "user", "content": "0"}],
        "response": "71",
        "tokens": [7, 1],
        "reward": [-1.0, 0.0],
        "score": -1.0,
        "stop_reason": "length",
        "policy_version": 3,
    }


def test_a_file_per_source_and_one_of_the_metrics(tmp_path, result):
    metrics, rows = result
    named = [{**row, "data_source": row["data_source"].replace("b", "org/b")} for row in rows]
    dump_evaluation(tmp_path / "new", named, metrics)
    files = {p.name: p.read_text().splitlines() for p in (tmp_path / "new").iterdir()}
    assert {name: len(lines) for name, lines in files.items()} == {
        "a.jsonl": 4,
        "org_b.jsonl": 2,
        "unknown.jsonl": 2,
        "aggregated_results.jsonl": 1,
    }
    assert [json.loads(line) for line in files["org_b.jsonl"]] == named[4:6]
    assert json.loads(files["aggregated_results.jsonl"][0]) == metrics


@pytest.mark.parametrize("ks", [[0], [1, 3]])
def test_k_beyond_the_samples_is_refused_before_a_run(ks):
    settings = {"generator.eval_n_samples_per_prompt": 2, "generator.eval_pass_at_k": ks}
    config = cfg.apply_overrides(cfg.load_config_file("configs/quickstart.py"), settings)
    with pytest.raises(ValueError, match=r"eval_pass_at_k=\[[03]\].*eval_n_samples_per_prompt=2"):
        cfg.validate(config, num_devices=8)


def test_greedy_samples_of_one_prompt_are_warned_of():
    settings = {"generator.eval_n_samples_per_prompt": 2}
    config = cfg.apply_overrides(cfg.load_config_file("configs/quickstart.py"), settings)
    with pytest.warns(UserWarning, match="2 greedy samples of a prompt are all the same"):
        cfg.validate(config, num_devices=8)


def test_failed_environments_are_counted_beside_the_score():
    row = {"reward": 0.0, "score": 0.0, "tokens": [7]}
    reasons = ["stop", "env_error", "env_error"]
    rows = [{**row, "uid": f"0:{i}", "stop_reason": said} for i, said in enumerate(reasons)]
    assert source_metrics(rows, 1, [1])["env_errors"] == 2.0
