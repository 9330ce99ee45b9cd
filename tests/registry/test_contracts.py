"""The border of the maths: which arrays a loss and an estimator get, and what they say of them."""

import inspect
import re
from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.advantages import ESTIMATORS
from jaxrl.config import AlgorithmConfig
from jaxrl.losses import LOSSES
from jaxrl.registry import bind_estimator
from jaxrl.registry.bind import make_policy_loss
from jaxrl.registry.contracts import ARRAYS
from jaxrl.types import TrainBatch

ROWS, TOKENS = 2, 5
BUILTINS = [*LOSSES.values(), *ESTIMATORS.values()]


def batch(**changes):
    floats = np.full((ROWS, TOKENS), -1.0, np.float32)
    ids = np.arange(ROWS, dtype=np.int32)
    return TrainBatch(
        tokens=np.zeros((ROWS, TOKENS), np.int32),
        lengths=np.full(ROWS, TOKENS, np.int32),
        response_mask=-floats,
        loss_mask=-floats,
        rewards=floats,
        rollout_log_probs=floats,
        index=ids,
        policy_versions=ids,
        row_ids=ids,
        old_log_probs=floats,
        advantages=floats,
    ).replace(**changes)


def evaluate(loss, minibatch, shape=(ROWS, TOKENS)):
    return loss(jnp.zeros(shape), jnp.zeros((ROWS, TOKENS)), minibatch, jax.random.key(0))


@pytest.mark.parametrize("name", ["regular", "gspo", "tests.registry.test_contracts:user_loss"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"advantages": np.zeros(ROWS, np.float32)},
            r"advantages must be float \[B, T\] with B=2, T=5, got float32 of shape \(2,\)",
        ),
        (
            {"advantages": np.zeros((ROWS, TOKENS), np.int32)},
            r"advantages must be float \[B, T\] with B=2, T=5, got int32 of shape \(2, 5\)",
        ),
        (
            {"old_log_probs": np.zeros((ROWS, TOKENS, 1), np.float32)},
            r"old_log_probs must be float \[B, T\] with B=2, T=5, got float32 of shape \(2, 5, 1\)",
        ),
        (
            {"loss_mask": np.ones((ROWS, TOKENS + 1), np.float32)},
            r"loss_mask must be mask \[B, T\] with B=2, T=5, got float32 of shape \(2, 6\)",
        ),
        (
            {"index": np.zeros((ROWS, TOKENS), np.int32)},
            r"group_ids must be int \[B\] with B=2, T=5, got int32 of shape \(2, 5\)",
        ),
    ],
)
def test_a_wrong_array_is_named_before_a_loss_sees_it(name, changes, message):
    loss = make_policy_loss(AlgorithmConfig(policy_loss_type=name))
    evaluate(loss, batch())
    with pytest.raises(ValueError, match=f"^policy loss '{name}': {message}$"):
        evaluate(loss, batch(**changes))


def user_loss(log_probs, old_log_probs, advantages, config, loss_mask=None):
    return -log_probs * advantages, {}


def test_log_probs_say_how_many_rows_and_tokens_there_are():
    loss = make_policy_loss(AlgorithmConfig(policy_loss_type="regular"))
    with pytest.raises(ValueError, match=r"log_probs must be float \[B, T\] with B=10, got float"):
        evaluate(loss, batch(), shape=(ROWS * TOKENS,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_level_rewards": np.ones(ROWS)}, r"token_level_rewards must be float \[B, T\]"),
        ({"token_level_rewards": np.ones((ROWS, TOKENS), int)}, "token_level_rewards must be flo"),
        ({"response_mask": np.ones((ROWS, 1))}, r"response_mask must be mask .* got .* \(2, 1\)"),
        (
            {"index": np.zeros(ROWS + 1, int)},
            r"index must be int \[B\] with B=2, T=5, .* \(3,\)",
        ),
        ({"valid_mask": np.ones((ROWS, TOKENS), bool)}, r"valid_mask must be bool \[B\]"),
    ],
)
def test_a_wrong_array_is_named_before_an_estimator_sees_it(changes, message):
    floats = np.ones((ROWS, TOKENS), np.float32)
    arrays = {
        "token_level_rewards": floats,
        "response_mask": floats,
        "index": np.zeros(ROWS, np.int32),
        "valid_mask": None,
    }
    estimate = bind_estimator(AlgorithmConfig(advantage_estimator="grpo"))
    estimate(**arrays)
    with pytest.raises(ValueError, match=f"^advantage estimator 'grpo': {message}"):
        estimate(**arrays | changes)


def test_builtins_name_the_shapes_that_they_are_called_with():
    wrong = []
    for func in BUILTINS:
        annotations = get_type_hints(func, include_extras=True)
        for name in inspect.signature(func).parameters:
            if name in ARRAYS:
                kind = annotations.get(name)
                parts = (kind, *get_args(kind))
                texts = [text for part in parts for text in getattr(part, "__metadata__", ())]
                if texts != [ARRAYS[name]]:
                    wrong.append(f"{func.__name__}: {name} is {texts}, not {ARRAYS[name]!r}")
    assert not wrong, "\n".join(wrong)


def said_of_another_rank(name):
    """What a loss raises when it is called by itself with arrays of one axis."""
    ones = jnp.ones(TOKENS)
    supplied = {"rollout_log_probs": ones}
    if "key" in inspect.signature(LOSSES[name]).parameters:
        supplied["key"] = jax.random.key(0)
    if name == "dro":
        supplied["beta"] = 0.1
    try:
        LOSSES[name](ones, ones, ones, AlgorithmConfig(), **supplied)
    except Exception as error:
        return error


def test_builtin_losses_called_by_themselves_refuse_another_rank():
    wrong = []
    for name in LOSSES:
        error = said_of_another_rank(name)
        said = str(error) if isinstance(error, AssertionError) else ""
        if not re.search("has rank 1 .* but expected 2", said):
            wrong.append(f"{name}: {error!r}")
    assert not wrong, "\n".join(wrong)
