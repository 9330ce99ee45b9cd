"""Whole runs in the exact mode: no scoring pass, what is refused, and in which words."""

import json

import numpy as np
import pytest

from jaxrl.config import TrainConfig, validate
from jaxrl.records.batch_file import batch_path, load_batch
from jaxrl.train import train
from tests.test_train import small

pytestmark = pytest.mark.usefixtures("as_users_compile")
EXACT = {
    "trainer.exact": "log_probs",
    "trainer.bf16": True,
    "generator.inference_engine.model_dtype": "bfloat16",
}


@pytest.mark.slow
def test_the_policy_is_what_was_sampled_from(tmp_path):
    """Eight devices, two updates on each batch; the pass that is left out would say the same."""
    steps = {"trainer.max_training_steps": 2, "trainer.eval_interval": -1}
    steps |= {"trainer.exact_checked_rows": 3}
    train(small(tmp_path, **EXACT, **steps, **{"trainer.eval_before_train": False}))
    lines = (tmp_path / "quickstart" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    batch = load_batch(batch_path(tmp_path / "exports", 1))
    assert found[0]["exact/tokens_not_scored"] == np.asarray(batch.lengths)[3:].sum()
    assert [x["policy/rollout_train_logprobs_abs_diff_max"] for x in found] == [0, 0]
    assert np.array_equal(batch.old_log_probs, batch.rollout_log_probs)
    assert np.abs(batch.rollout_log_probs).max() > 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"trainer.policy.model.lora.rank": 8}, "adds adapters to their matrices"),
        ({"trainer.bf16": True}, r"compute in one dtype, not \('bfloat16', 'float32'\)"),
        ({"generator.sampling_params.top_p": 0.9}, "keep_sampling_mask=True"),
        ({"generator.sampling_params.repetition_penalty": 1.1}, "repetition_penalty must be 1"),
        ({"trainer.policy.mesh.context": 2}, "mesh.context must be 1"),
    ],
)
def test_what_would_break_it_is_refused(overrides, words):
    settings = {"trainer.exact": "log_probs", "trainer.bf16": False}
    with pytest.raises(ValueError, match=f"trainer.exact='log_probs': .*{words}"):
        validate(TrainConfig.from_cli_overrides(settings | overrides), num_devices=2)


def test_a_tree_has_rows_of_two_powers():
    settings = {"trainer.exact": "full", "trainer.bf16": False}
    settings |= {"trainer.micro_train_batch_size_per_gpu": 3}
    with pytest.raises(ValueError, match="micro_train_batch_size_per_gpu=3: .*2\\^k rows"):
        validate(TrainConfig.from_cli_overrides(settings))


@pytest.mark.parametrize("field", ["exact_tile", "exact_checked_rows"])
def test_without_the_mode_its_settings_have_no_effect(field):
    with pytest.raises(ValueError, match=f"{field}=64: has no effect"):
        validate(TrainConfig.from_cli_overrides({f"trainer.{field}": 64}))
