"""What jaxrl makes of a golden case of advantages, batches, tokens and settings, beside SkyRL's."""

import json
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.advantages import ESTIMATORS
from jaxrl.array_ops import entropy, token_log_probs
from jaxrl.config import TrainConfig, resolve
from jaxrl.config.dataclass_config import flatten
from jaxrl.data.columns import trajectory_numbers
from jaxrl.data.packing import collate, token_level
from jaxrl.data.selection import (
    filter_rows,
    replace_rows,
    soft_overlong_punishment,
    zero_variance_groups,
)
from jaxrl.rollout.conversations.step_wise import merge_steps
from jaxrl.training.metrics import advantage_metrics, score_metrics
from jaxrl.training.rewards import advantages_of
from jaxrl.types import TrainBatch
from tests.golden import Case
from tests.golden.arrays import BITS, EXACT, Outputs, floats, metrics_within, unpadded, within

FLAT_CONFIG = flatten(resolve(TrainConfig()))


def estimate(case: Case, x: Any, index: Any, **keywords: Any) -> tuple[Any, Any]:
    return ESTIMATORS[case["estimator"]](
        x.rewards, x.response_mask, index, values=x.values, **keywords
    )


def advantages(case: Case, bits: int) -> Outputs:
    x = floats(case, bits)
    x.rewards = x.token_level_rewards
    index = np.unique(case.i["index"], return_inverse=True)[1]
    index = np.concatenate([index, np.arange(len(index), len(x.rewards))])  # padding: own groups
    ours = estimate(case, x, jnp.asarray(index), **case.get("kwargs", {}))
    if "raises" in case:  # ours has no error: nothing can be raised under jit
        return {"adv": (ours[0], np.zeros_like(ours[0]), EXACT)}
    index = index[: len(case.i["index"])]
    without = groups_without_success(case, case.i["token_level_rewards"].sum(-1), index)
    return estimates_within(case, bits, ours, case.i["response_mask"], without)


def groups_without_success(case: Case, scores: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Rows [B] bool whose advantage by maxrl would be over a mean that is not positive."""
    sums, counts = np.bincount(index, scores), np.bincount(index)
    return ((sums <= 0) & (counts > 1))[index] & (case["estimator"] == "maxrl")


def estimates_within(
    case: Case, bits: int, ours: Any, mask: np.ndarray, apart: np.ndarray
) -> Outputs:
    """Advantages and returns; padding is 0, where SkyRL leaves numbers that are never used.

    Args:
        apart: rows [B] bool that are outputs of their own.
    """
    found = {}
    for name, padded in zip(("adv", "ret"), ours, strict=True):
        expected = np.where(mask != 0, case.o[f"{name}{bits}"], 0)
        mine, tolerance = unpadded(padded, expected), BITS[bits].scaled(expected)
        if mine.shape != expected.shape:  # padding that is not 0
            found[name] = (mine, expected, tolerance)
            continue
        for part, rows in ((name, ~apart), (f"{name}:mean not positive", apart)):
            if rows.any():
                found[part] = (mine[rows], expected[rows], tolerance)
    return found


def trainer_advantages(case: Case, bits: int) -> Outputs:
    real = len(case["uids"]) - case["pad_size"]  # there are no rows of padding here
    names = ("rewards", "response_mask", "values")
    x = SimpleNamespace(**{k: jnp.asarray(case.i[k][:real], f"float{bits}") for k in names})
    index = np.unique(case["uids"][:real], return_inverse=True)[1]
    if case["step_wise"]:
        ours = step_wise_advantages(case, x, index, case["is_last_step"][:real])
    else:
        ours = estimate(case, x, jnp.asarray(index))
    case = Case(case, arrays={"in": case.i, "out": cut_rows(case.o, real)})
    batch = TrainBatch(
        tokens=None,
        lengths=None,
        response_mask=np.asarray(x.response_mask),
        loss_mask=None,
        rewards=np.asarray(x.rewards),
        rollout_log_probs=None,
        index=index,
        policy_versions=None,
        row_ids=None,
        advantages=np.asarray(ours[0]),
        is_last_step=np.array(case["is_last_step"][:real]) if case["step_wise"] else None,
    )
    last = np.array(case["is_last_step"][:real])
    scores = case.i["rewards"][:real].sum(-1)[last]
    without = groups_without_success(case, scores, index[last])[trajectory_numbers(last)]
    found = estimates_within(case, bits, ours, np.asarray(x.response_mask), without)
    return found | metrics_within(case, bits, advantage_metrics(batch), BITS[bits])


def step_wise_advantages(case: Case, x: Any, index: Any, last: list[bool]) -> Any:
    """What the trainer makes of rows that are steps."""
    batch = TrainBatch(
        tokens=None,
        lengths=None,
        response_mask=x.response_mask,
        loss_mask=x.response_mask,
        rewards=x.rewards,
        rollout_log_probs=None,
        index=index,
        policy_versions=None,
        row_ids=None,
        is_last_step=np.array(last),
    )

    def of_last_rows(
        state: Any, *, token_level_rewards: Any, response_mask: Any, index: Any, **_: Any
    ) -> Any:
        return state, *ESTIMATORS[case["estimator"]](token_level_rewards, response_mask, index)

    return advantages_of(of_last_rows, batch)[1:]


def cut_rows(arrays: dict[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    return {k: v[:rows] if v.ndim else v for k, v in arrays.items()}


def logprobs_entropy(case: Case, bits: int) -> Outputs:
    x = floats(case, bits)
    action = slice(-case["num_actions"] - 1, -1)

    def tokens(logits: Any) -> dict[str, Any]:
        logits = logits / case["temperature"]
        log_probs = token_log_probs(logits, jnp.roll(x.sequences, -1, axis=1))
        found = {"logprobs": log_probs, "entropy": entropy(logits) * x.attention_mask}
        return found | {f"action_{k}": v[:, action] for k, v in found.items()}

    @jax.jit  # the shapes of a case are its own
    def everything(logits: Any) -> dict[str, Any]:
        grads = {
            f"grad_{name}": jax.grad(lambda y, key=key: (tokens(y)[key] * x.weights).sum())(logits)
            for name, key in (("logprob", "action_logprobs"), ("entropy", "action_entropy"))
        }
        return tokens(logits) | grads

    return within(case, bits, everything(x.logits))


def batch_tensors(case: Case, bits: int) -> Outputs:
    """Ours is left-aligned: each row is compared where SkyRL's left-padded one has it."""
    rows = range(len(case["prompts"]))
    log_probs = case["logprobs"] or [[0.0] * len(r) for r in case["responses"]]
    batch = collate(
        {
            "prompt_token_ids": case["prompts"],
            "response_ids": case["responses"],
            "rewards": case["rewards"],
            "loss_masks": case["loss_masks"],
            "rollout_logprobs": log_probs,
            "stop_reasons": ["stop" for _ in rows],
            "policy_versions": [0 for _ in rows],
            "rollout_metrics": {},
        },
        index=list(rows),
    )
    ours = {
        "sequences": batch.tokens,
        "response_mask": batch.response_mask,
        "rewards": batch.rewards,
        "loss_mask": batch.loss_mask,
        "rollout_logprobs": batch.rollout_log_probs,
    }
    found = {}
    for name, array in ours.items():
        if name not in case.o:
            continue
        expected, moved = case.o[name], np.zeros_like(case.o[name])
        for row in rows:
            length = len(case["prompts"][row]) + len(case["responses"][row])
            start = 0 if name == "sequences" else len(case["prompts"][row])
            moved[row, expected.shape[1] - (length - start) :] = array[row, start:length]
        found[name] = (moved, expected, BITS[32])
    return found


def config_defaults(case: Case, bits: int) -> Outputs:
    home = os.path.expanduser("~")
    expected = json.loads(json.dumps(case["default"]).replace("/HOME", home))
    return {"default": (FLAT_CONFIG.get(case["id"], "missing"), expected, EXACT)}


def python_utils(case: Case, bits: int) -> Outputs:
    if case["function"] not in PYTHON_UTILS:
        return {"result": ("no counterpart", "", EXACT)}
    return dict(PYTHON_UTILS[case["function"]](case))


def generator_metrics(case: Case) -> Iterator[tuple[str, tuple]]:
    kind = "token" if isinstance(case["rewards"][0], list) else "sequence"
    expected = dict(case["out"])
    ours = score_metrics(case["rewards"], case["uids"], 1)
    yield f"{kind}.pass_at_n", (ours["pass_at_1"], expected.pop("pass_at_n"), BITS[64])
    for name, value in expected.items():
        yield f"{kind}.{name}", (ours[name], value, BITS[64])


def overlong_filtering(case: Case) -> Iterator[tuple[str, tuple]]:
    masks = case["loss_masks"]
    output = {
        "response_ids": masks,
        "loss_masks": masks,
        "rewards": [0.0 for _ in masks],
        "stop_reasons": case["stop_reasons"],
    }
    ours = token_level(output, zero_reward_on_non_stop=False, apply_overlong_filtering=True)
    yield "out", (ours["loss_masks"], case["out"], EXACT)


def zero_variance(case: Case) -> Iterator[tuple[str, tuple]]:
    same = zero_variance_groups(case["rewards"], case["uids"], case["loss_masks"], case["tol"])
    yield "out", (np.flatnonzero(~same).tolist(), case["out"], EXACT)


def replacement(case: Case) -> Iterator[tuple[str, tuple]]:
    """By structure, as the choice is random: whole good groups at their place, good stand-ins."""
    same = zero_variance_groups(case["rewards"], case["uids"])
    chosen = replace_rows(same, case["uids"], case["min_replace_ratio"], np.random.default_rng(0))
    yield "keep_sampling", (chosen is None, case["keep_sampling"], EXACT)
    if chosen is not None:
        rows, groups = chosen
        yield "size", (len(rows), len(case["out_uids"]), EXACT)
        yield "stand-ins are good", (bool(same[rows].any()), False, EXACT)
        kept = [row for row in range(len(same)) if not same[row]]
        yield "good groups stay", (rows[kept].tolist(), kept, EXACT)
        sources = [{case["uids"][r] for r in rows[groups == g]} for g in range(max(groups) + 1)]
        yield "whole groups", ([len(s) for s in sources], [1] * len(sources), EXACT)


def filtering(case: Case) -> Iterator[tuple[str, tuple]]:
    wanted, samples = case["train_batch_size"], case["n_samples_per_prompt"]
    uids, rewards = [], []
    for number, step in enumerate(case["steps"]):
        same = zero_variance_groups(step["rewards"], step["uids"])
        rows = filter_rows(same, step["uids"], wanted - len(uids) // samples)
        uids += [step["uids"][r] for r in rows]
        rewards += [step["rewards"][r] for r in rows]
        done = len(uids) == wanted * samples
        yield f"{number}.keep_sampling", (not done, step["keep_sampling"], EXACT)
        if done:
            yield f"{number}.uids", (uids, step["out_uids"], EXACT)
            yield f"{number}.rewards", (rewards, step["out_rewards"], EXACT)
        elif step["collected"] is not None:
            yield f"{number}.collected", (len(uids) // samples, step["collected"], EXACT)


def overlong_punishment(case: Case) -> Iterator[tuple[str, tuple]]:
    longest = case["max_generate_length"]
    lengths = np.array(case["response_lengths"])
    ours = np.array(case["rewards_in"]) - soft_overlong_punishment(
        lengths, longest, case["overlong_buffer_len"], case["penalty_factor"]
    )
    fits = lengths <= longest
    expected = np.array(case["rewards_out"])
    yield "within the limit", (ours[fits], expected[fits], BITS[64])
    yield "beyond the limit", (ours[~fits], expected[~fits], BITS[64])


def merged(case: Case) -> Iterator[tuple[str, tuple]]:
    ours = merge_steps({k: v for k, v in case["inp"].items() if v is not None})
    for name, expected in case["out"].items():
        yield name, (ours.get(name), expected, EXACT)


PYTHON_UTILS = {
    "merge_single_trajectory": merged,
    "get_metrics_from_generator_output": generator_metrics,
    "apply_overlong_filtering": overlong_filtering,
    "zero_variance_filter": zero_variance,
    "handle_replace_sampling": replacement,
    "handle_filter_sampling": filtering,
    "dapo_soft_overlong_punishment": overlong_punishment,
}
