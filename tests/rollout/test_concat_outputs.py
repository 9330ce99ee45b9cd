"""Batches that are sampled in parts, and parts in a checkpoint."""

import numpy as np
import pytest

from jaxrl.config import GeneratorConfig
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.rollout.conversations.concat_outputs import (
    concat_batch,
    concat_outputs,
)
from jaxrl.rollout.conversations.conversation import ConversationGenerator, sample_key
from jaxrl.rollout.conversations.step_wise import merge_steps
from jaxrl.rollout.conversations.stream import Unit, units_from_bytes, units_to_bytes
from jaxrl.rollout.generator import generate_now
from jaxrl.rollout.protocol import Sampling
from tests.rollout.scripted import ScriptedEngine, TalkingEnv, make_prompt
from tests.test_train import ROOT

TOKENIZER = load_tokenizer(ROOT / "configs" / "tiny_char_model")
TIMED = "timing/environment"


class MoodyEnv(TalkingEnv):
    """Breaks where the row says so."""

    def step(self, action):
        if self.extras.get("breaks"):
            raise KeyError("moody")
        return super().step(action)


def prompts(breaks=()):
    said = {"a": ["1", None], "b": [None], "c": ["1", "2", None]}
    return [
        make_prompt(
            TOKENIZER, uid=name, env_class=f"{__name__}:MoodyEnv", says=says, breaks=name in breaks
        )
        for name, says in said.items()
    ]


def sample(chosen, part, **options):
    """Two samples of each prompt; four tokens in the first turn, three later."""
    engine = ScriptedEngine(lambda tokens, key: [5, 6, 7, 40] if len(tokens) < 8 else [3, 2, 40])
    settings = GeneratorConfig(max_turns=5, **options)
    generator = ConversationGenerator(engine, TOKENIZER, settings, max_env_workers=0)
    keys = [sample_key("test", p.uid, i) for p in chosen for i in range(2)]
    twice = [p for p in chosen for _ in range(2)]
    sampling = Sampling(8, stop_token_ids=(TOKENIZER.eos_token_id,))
    batch = {"prompts": twice, "keys": keys, "sampling": sampling, "part": part}
    return generate_now(generator, batch)


@pytest.mark.parametrize("merge", [None, False, True], ids=["plain", "step-wise", "merged"])
@pytest.mark.parametrize("breaks", [(), ("b",)], ids=["", "a part fails whole"])
def test_a_batch_in_parts_is_the_batch(merge, breaks):
    options = {} if merge is None else {"step_wise_trajectories": True}
    finish = merge_steps if merge else lambda output: output
    whole = finish(sample(prompts(breaks), False, **options))
    parts = [finish(sample([p], True, **options)) for p in prompts(breaks)]
    ours = concat_batch(parts)
    for output in (ours, whole):
        del output["rollout_metrics"][TIMED]
    for ids in (ours, whole):  # numbered by the generator within what it was given
        ids["trajectory_ids"] = [tuple(i) for i in ids["trajectory_ids"]]
    assert ours == whole
    assert ours["rollout_metrics"]["generate/max_turns"] == 3
    assert ours["rollout_metrics"]["generate/env_errors"] == 2 * len(breaks)


def test_a_batch_whose_parts_all_failed_is_refused_and_a_part_is_not():
    parts = [sample([p], True) for p in prompts("abc")]
    with pytest.raises(RuntimeError, match=r"all 6 trajectories .*KeyError.*moody"):
        concat_batch(parts)
    with pytest.raises(RuntimeError, match=r"all 2 trajectories .*KeyError.*moody"):
        sample(prompts("abc")[:1], False)


def row(tokens, **rest):
    """A part with one row, as of a generator of somebody's own."""
    return {
        "prompt_token_ids": [[1]],
        "response_ids": [tokens],
        "rewards": [1.0],
        "loss_masks": [[1] * len(tokens)],
        "stop_reasons": ["stop"],
        "rollout_logprobs": None,
        "policy_versions": [0],
        "rollout_metrics": {"mine": float(len(tokens))},
        **rest,
    }


def test_columns_that_parts_lack_are_filled_or_refused():
    told = {"reward_terms": [{"x": 1.0}], "kept": [[(6, 7)]], "context_versions": [[3]]}
    parts = [row([4, 5]), row([6], **told)]
    whole = concat_batch(parts)
    assert whole["reward_terms"] == [{}, {"x": 1.0}]
    assert whole["kept"] == [[(), ()], [(6, 7)]]
    assert whole["context_versions"] == [[-1, -1], [3]]
    assert whole["rollout_logprobs"] is None
    assert whole["rollout_metrics"] == {"mine": 1.5}
    with pytest.raises(ValueError, match="is_last_step for some prompts only"):
        concat_batch([row([4]), row([6], is_last_step=[True])])


def test_units_come_back_from_bytes_as_they_were():
    options = {"step_wise_trajectories": True}
    outputs = [sample([p], True, **options) for p in prompts("b")]
    units = [Unit(7 - i, output) for i, output in enumerate(outputs)]
    data = units_to_bytes(units)
    assert data.dtype == np.uint8
    again = units_from_bytes(data)
    assert [unit.ordinal for unit in again] == [7, 6, 5]
    expected = concat_batch([unit.output for unit in units])
    assert concat_batch([unit.output for unit in again]) == expected
    for ours, theirs in zip(again, units, strict=True):
        assert ours.output["rollout_metrics"] == theirs.output["rollout_metrics"]
        assert ours.output["response_ids"] == theirs.output["response_ids"]


def test_units_without_a_single_response_token_come_back():
    part = row([], rollout_logprobs=[[]], rewards=[[]])
    (unit,) = units_from_bytes(units_to_bytes([Unit(3, part)]))
    assert unit == Unit(3, part)
    assert concat_outputs([unit.output, row([1], rollout_logprobs=[[0.5]])])["response_ids"] == [
        [],
        [1],
    ]
