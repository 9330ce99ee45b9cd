"""What a policy is told in hindsight, and which of its words then belong to which token."""

import numpy as np
import pytest

from jaxrl.config.algorithm import DistillationConfig
from jaxrl.data.packing import collate, length_bucket
from jaxrl.data.tokenizer import character_tokenizer
from jaxrl.training.teacher import Hindsight

CHARACTERS = character_tokenizer(list("0123456789abc>?:"))
SETTINGS = DistillationConfig(
    coef=1.0, teacher="hindsight", solution_hint="?{solution}", feedback_hint=":{feedback}"
)


def encode(text):
    return CHARACTERS(text, add_special_tokens=False)["input_ids"]


def sampled(answers, rewards, feedback=None, prompts=("42", "42", "7", "7")):
    """Rollouts of the prompts' answers, each ended and rewarded at its end."""
    eos = CHARACTERS.eos_token_id
    responses = [[*encode(answer), eos] for answer in answers]
    zeros = [[0.0] * (len(r) - 1) for r in responses]
    output = {
        "prompt_token_ids": [encode(f"{prompt}>") for prompt in prompts],
        "response_ids": responses,
        "rewards": [[*z, r] for z, r in zip(zeros, rewards, strict=True)],
        "loss_masks": [[1] * len(r) for r in responses],
        "stop_reasons": ["stop"] * len(responses),
        "rollout_logprobs": [[-1.0] * len(r) for r in responses],
        "policy_versions": [0] * len(responses),
        "rollout_metrics": {},
    }
    return output | ({"feedback": feedback} if feedback else {})


ANSWERS, REWARDS = ["24", "42", "7", "123"], [1.0, 0.2, 0.0, 0.5]
GROUPS = np.array([0, 0, 1, 1])
BLANK = [np.full(2, -1, np.int32), np.zeros(3, np.float32)]


def test_a_right_answer_is_told_to_the_others_of_its_prompt():
    """Row 1 alone: row 0 is right itself and knows no other, and in the second group none is."""
    hints = Hindsight(CHARACTERS, SETTINGS, {}, 18).hints(sampled(ANSWERS, REWARDS), GROUPS)
    assert hints.shape == (4, 3)
    assert hints[1].tolist() == encode("?24")
    assert (hints[[0, 2, 3]] == -1).all()


def test_feedback_is_told_too_and_hints_are_cut_off():
    output = sampled(ANSWERS, REWARDS, feedback=["", "abc", "c", ""])
    hints = Hindsight(CHARACTERS, SETTINGS, {}, 18).hints(output, GROUPS)
    assert hints[1].tolist() == encode("?24:abc")
    assert hints[2].tolist() == [*encode(":c"), *[-1] * 5]
    short = DistillationConfig(**{**vars(SETTINGS), "max_hint_tokens": 4})
    assert Hindsight(CHARACTERS, short, {}, 18).hints(output, GROUPS)[1].tolist() == encode("?24:")
    silent = DistillationConfig(**{**vars(SETTINGS), "solution_hint": ""})
    told = Hindsight(CHARACTERS, silent, {}, 18).hints(output, GROUPS)
    assert told[1].tolist() == encode(":abc")


def test_a_quoted_text_does_not_end_the_turn():
    output = sampled(ANSWERS, REWARDS, feedback=["", "", "a<eos>b", ""])
    told = Hindsight(CHARACTERS, SETTINGS, {}, 18).hints(output, GROUPS)
    assert CHARACTERS.eos_token_id not in told[2]


def test_what_is_said_in_hindsight_is_of_the_same_tokens():
    """A scorer that answers with the token itself and its place: each comes back to its own."""
    hindsight = Hindsight(CHARACTERS, SETTINGS, {}, 18)
    output = sampled(ANSWERS, [1.0, 0.2, 0.0, 1.0], feedback=["", "", "ab", ""])
    batch = collate(output, GROUPS, length_bucket)
    batch = batch.replace(hints=hindsight.hints(output, GROUPS))
    seen = []

    def score(rows):
        seen.extend(
            CHARACTERS.decode(t[:n]) for t, n in zip(rows.tokens, rows.lengths, strict=True)
        )
        place = np.broadcast_to(np.arange(rows.tokens.shape[1]), rows.tokens.shape)
        ids = np.stack([rows.tokens, rows.tokens + 1], -1)
        marks = np.where(rows.loss_mask != 0, place, -99).astype(np.float32)
        return ids, np.stack([marks] * 3, -1)

    found = hindsight.ask(batch, score, length_bucket, BLANK)
    # of "42>" the words "42", what became of it, and then the answer as it was given
    assert seen == ["42?24>42<eos>", "7?123:ab>7<eos>"]
    assert found.hints is None
    told = np.zeros(batch.tokens.shape, bool)
    told[1, 3:6] = told[2, 2:4] = True
    np.testing.assert_array_equal(found.taught, told)
    np.testing.assert_array_equal(found.teacher_ids[told][:, 0], batch.tokens[told])
    np.testing.assert_array_equal(found.teacher_ids[told][:, 1], batch.tokens[told] + 1)
    # 3 more tokens before "42>" ends, 7 before "7>" does
    assert found.teacher_log_probs[1, 3:6, 0].tolist() == [6, 7, 8]
    assert found.teacher_log_probs[2, 2:4, 0].tolist() == [9, 10]
    assert found.tokens is batch.tokens


def test_where_nothing_can_be_said_nobody_is_asked():
    output = sampled(ANSWERS, [0.0] * 4)
    hindsight = Hindsight(CHARACTERS, SETTINGS, {}, 18)
    batch = collate(output, GROUPS, length_bucket)
    for hints in (hindsight.hints(output, GROUPS), None):
        found = hindsight.ask(batch.replace(hints=hints), None, length_bucket, BLANK)
        assert found.teacher_ids.shape == (*batch.tokens.shape, 2)
        assert (found.taught == 0).all()


def test_a_prompt_that_does_not_end_with_a_user_is_refused():
    output = sampled(ANSWERS, REWARDS)
    output["prompt_token_ids"][1] = encode("42")
    hindsight = Hindsight(CHARACTERS, SETTINGS, {}, 18)
    batch = collate(output, GROUPS, length_bucket)
    batch = batch.replace(hints=hindsight.hints(output, GROUPS))
    with pytest.raises(ValueError, match="prompt of row 1 does not end with those"):
        hindsight.ask(batch, None, length_bucket, BLANK)
