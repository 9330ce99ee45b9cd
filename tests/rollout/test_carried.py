"""What a sample has when it goes on in the next step, and what is asked for of it."""

import numpy as np
import pytest

from jaxrl.rollout.conversations.carried import (
    CARRIED,
    NO_ROWS,
    NOTHING,
    goes_on,
    going_on,
    joined,
    next_piece,
    unfinished,
    with_samples,
)
from jaxrl.rollout.conversations.conversation import generator_input
from jaxrl.rollout.conversations.stream import Unit, units_from_bytes, units_to_bytes
from jaxrl.rollout.protocol import Completion, Sampling
from jaxrl.types import Measured, Prompt

SAMPLING = Sampling(max_tokens=10, min_tokens=4)
UIDS = "0:3", "0:3#2"
PROMPT = Prompt("0:3", [], (5, 6), "sort_digits")


def completion(tokens, reason, version, routes=None, **more):
    count = len(tokens)
    return Completion(
        list(tokens), [-0.1] * count, reason, [version] * count, routes=routes, **more
    )


@pytest.mark.parametrize(
    ("drawn", "most", "max_tokens", "min_tokens"),
    [(0, 3, 3, 3), (3, 3, 3, 1), (9, 3, 1, 0), (0, 100, 10, 4)],  # 10 - 9 = 1; 4 - 3 = 1
)
def test_the_next_piece_is_what_is_left_but_no_more_than_a_step_draws(
    drawn, most, max_tokens, min_tokens
):
    piece = next_piece(SAMPLING, completion([1] * drawn, CARRIED, 0), most)
    assert (piece.max_tokens, piece.min_tokens) == (max_tokens, min_tokens)


def test_a_whole_answer_is_asked_for_as_it_is():
    assert next_piece(SAMPLING, None, 3) is SAMPLING
    assert next_piece(SAMPLING, NOTHING, None) is SAMPLING


def test_a_piece_joins_what_was_there():
    first = completion([1, 2], "length", 0, np.full((3, 1, 1), 7, np.uint8), steps=2)
    piece = completion([3], "stop", 4, np.full((4, 1, 1), 9, np.uint8), steps=1)
    whole = joined(joined(NOTHING, first), piece)
    assert whole.tokens == [1, 2, 3]
    assert whole.versions == whole.context_versions == [0, 0, 4]
    assert whole.log_probs == [-0.1] * 3
    assert whole.stop_reason == "stop"
    assert whole.steps == 3
    # of prompt (2) and [1] the first piece knows the experts, of [2] the second
    assert whole.routes.ravel().tolist() == [7, 7, 7, 9]


@pytest.mark.parametrize(
    ("tokens", "reason", "expected"),
    # 2 tokens before; of 10 a step draws 3; 2 were all that an engine had room for
    [(3, "length", True), (2, "length", False), (3, "stop", False), (3, "abort", False)],
)
def test_only_what_its_piece_cut_off_goes_on(tokens, reason, expected):
    begun, piece = completion([1, 1], CARRIED, 0), completion([1] * tokens, reason, 0)
    assert goes_on(begun, piece, SAMPLING, 3) == expected
    assert not goes_on(completion([1] * 7, CARRIED, 0), piece, SAMPLING, 3)  # 7 + 3 are all


def rows(*answers, reasons, version):
    """A generator's output: a row for each answer."""
    return {
        "prompt_token_ids": [[5, 6]] * len(answers),
        "response_ids": [list(answer) for answer in answers],
        "rewards": [1.0 if reason == "stop" else [0.0] * 2 for reason in reasons],
        "loss_masks": [[1] * len(answer) for answer in answers],
        "stop_reasons": list(reasons),
        "rollout_logprobs": [[-0.5] * len(answer) for answer in answers],
        "policy_versions": [version] * len(answers),
        "token_versions": [[version] * len(answer) for answer in answers],
        "context_versions": [[version] * len(answer) for answer in answers],
        "rollout_metrics": {"generate/avg_turns": 1.0},
        "measured": [Measured("sort_digits", {}, 0.0, [], "", None, 2) for _ in answers],
    }


def test_a_group_is_asked_for_what_is_missing_until_nothing_is():
    fresh = [Unit(8, NO_ROWS), Unit(9, NO_ROWS)]
    assert [unfinished(unit, 3) for unit in fresh] == [[0, 1, 2], [0, 1, 2]]
    assert going_on(PROMPT, fresh[0], 3, "0:3#2").begun == dict.fromkeys(range(3), NOTHING)

    reasons = ["stop", CARRIED, "stop", "stop", "length", CARRIED]
    answers = [1], [2, 3], [4], [5], [6], [7, 8]
    units = with_samples(fresh, rows(*answers, reasons=reasons, version=0), 3)
    units = units_from_bytes(units_to_bytes(units))  # as a checkpoint keeps them
    assert [unit.ordinal for unit in units] == [8, 9]
    assert [unfinished(unit, 3) for unit in units] == [[1], [2]]

    asked = [going_on(PROMPT, unit, 3, uid) for unit, uid in zip(units, UIDS, strict=True)]
    assert {i: x.tokens for i, x in asked[0].begun.items()} == {1: [2, 3]}
    assert asked[1].begun[2].log_probs == [-0.5, -0.5]
    assert asked[1].begun[2].steps == 2
    batch = generator_input([*asked, PROMPT], 3, (7, "train", 2), SAMPLING)
    assert [tuple(x) for x in batch["trajectory_ids"]] == [
        *(("0:3", 1), ("0:3#2", 2)),
        *(("0:3", i) for i in range(3)),
    ]
    assert [x and x.tokens for x in batch["begun"]] == [[2, 3], [7, 8], None, None, None]
    assert len(set(batch["keys"])) == 4  # sample 1 of 0:3 is asked for twice

    new = rows([2, 3, 9], [7, 8, 9, 9], reasons=["stop", "length"], version=1)
    ended = with_samples(units, new, 3)
    assert [unfinished(unit, 3) for unit in ended] == [[], []]
    assert ended[0].output["response_ids"] == [[1], [2, 3, 9], [4]]
    assert ended[0].output["policy_versions"] == [0, 1, 0]
    assert ended[1].output["response_ids"] == [[5], [6], [7, 8, 9, 9]]
