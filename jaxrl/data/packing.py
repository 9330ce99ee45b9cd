"""Trajectories -> `TrainBatch`: host arrays, one trajectory per row, right padded to a bucket."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.data.columns import ROUTES, ROUTES_PROCESS, TOKEN_COLUMNS, Column
from jaxrl.data.routes import OwnRoutes, own_routes
from jaxrl.types import Array, GeneratorOutput, ModelRows, TrainBatch


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple


def length_bucket(length: int) -> int:
    """Return the smallest of 8, 12, 16, 24, 32, 48, 64, 96, ... that holds `length` tokens.

    Two buckets per octave: at most a third of a row is padding, and few shapes are ever compiled.
    """
    bucket = 8
    while bucket < length:
        half_more = bucket + bucket // 2
        bucket = half_more if half_more >= length else 2 * bucket
    return bucket


def buckets_between(shortest: int, longest: int) -> list[int]:
    """Return the buckets of all lengths from `shortest` to `longest`, ascending."""
    buckets = [length_bucket(shortest)]
    while buckets[-1] < longest:
        buckets.append(length_bucket(buckets[-1] + 1))
    return buckets


def empty_batch(
    rows: int,
    width: int,
    length: int | None = None,
    *,
    kept: int = 0,
    log_probs: bool = True,
    routes: np.ndarray | None = None,
) -> TrainBatch:
    """Make trajectories of `length` tokens (None = `width`) as `collate` would, masked.

    Args:
        kept: ids that are recorded with each token; 0 = None are.
        log_probs: the rollouts carry them.
        routes: [Lx, k] experts of every token; None = they are not replayed.
    """
    columns: dict[str, np.ndarray | None] = {
        column.batch: np.full((rows, width), column.blank, column.dtype)
        for column in TOKEN_COLUMNS
        if column.kinds
    }
    if not log_probs:
        columns["rollout_log_probs"] = None
    return TrainBatch(
        tokens=np.zeros((rows, width), np.int32),
        lengths=np.full(rows, width if length is None else length, np.int32),
        response_mask=np.zeros((rows, width), np.float32),
        index=np.zeros(rows, np.int32),
        policy_versions=np.zeros(rows, np.int32),
        row_ids=np.arange(rows, dtype=np.int32),
        kept=np.full((rows, width, kept), -1, np.int32) if kept else None,
        routes=None if routes is None else _same_routes(routes, rows, width),
        **columns,
    )


def token_level(
    output: GeneratorOutput, *, zero_reward_on_non_stop: bool, apply_overlong_filtering: bool
) -> GeneratorOutput:
    """Give each token its reward, and take from truncated responses what they lose.

    A reward for the whole response is put on its last token. An empty response has none:
    that reward is lost.

    Args:
        zero_reward_on_non_stop: a response that did not stop by itself earns nothing.
        apply_overlong_filtering: it is masked; nothing is learnt from it.

    Returns:
        The columns, and as `valid_mask` which rows the generator itself has not masked.
    """
    rewards = [
        r if isinstance(r, list) else [*[0.0] * (len(tokens) - 1), r][: len(tokens)]
        for r, tokens in zip(output["rewards"], output["response_ids"], strict=True)
    ]
    masks = output["loss_masks"]
    valid = [any(mask) for mask in masks]
    cut = [reason != "stop" for reason in output["stop_reasons"]]
    if zero_reward_on_non_stop:
        rewards = [[0.0] * len(r) if c else r for r, c in zip(rewards, cut, strict=True)]
    if apply_overlong_filtering:
        masks = [[0] * len(m) if c else m for m, c in zip(masks, cut, strict=True)]
    return {**output, "rewards": rewards, "loss_masks": masks, "valid_mask": valid}


def collate(
    output: GeneratorOutput,
    index: Sequence[int] | np.ndarray,
    width_of: Callable[[int], int] = length_bucket,
) -> TrainBatch:
    """Collate columns into a batch: one row per trajectory, or per step of one.

    Args:
        output: columns, with per-token rewards.
        index: prompt group of each row.
        width_of: tokens of the longest row -> columns.

    Raises:
        ValueError: a row whose lists differ in length; the message names the row and the column.
    """
    rows = len(output["response_ids"])
    prompts, responses = output["prompt_token_ids"], output["response_ids"]
    lengths = np.array([len(p) + len(r) for p, r in zip(prompts, responses, strict=True)], np.int32)
    width = width_of(int(lengths.max()))

    def response_array(column: Column) -> np.ndarray | None:
        if cast(dict, output).get(column.name) is None:
            return None
        if not column.kinds:
            return _tuples(output, column, width)
        array = np.full((rows, width), column.blank, column.dtype)
        for row, values in enumerate(cast(dict, output)[column.name]):
            if np.ndim(values) != 1 or len(values) != len(responses[row]):
                raise ValueError(
                    f"{column.name}[{row}] must have one entry for each of the "
                    f"{len(responses[row])} response tokens, got {values!r}"
                )
            start = len(prompts[row])
            array[row, start : start + len(values)] = values
        return array

    tokens = np.zeros((rows, width), np.int32)
    response_mask = np.zeros((rows, width), np.float32)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        tokens[row, : lengths[row]] = [*prompt, *response]
        response_mask[row, len(prompt) : lengths[row]] = 1
    return TrainBatch(
        tokens=tokens,
        lengths=lengths,
        response_mask=response_mask,
        index=np.asarray(index, np.int32),
        policy_versions=np.asarray(output["policy_versions"], np.int32),
        row_ids=np.arange(rows, dtype=np.int32),
        is_last_step=np.asarray(output["is_last_step"]) if "is_last_step" in output else None,
        valid_mask=np.asarray(output["valid_mask"]) if "valid_mask" in output else None,
        reward_terms=_reward_terms(output),
        turn_rewards=_of_rows(output, "turn_rewards"),
        greedy_rewards=_of_rows(output, "greedy_rewards"),
        demonstrated=np.asarray(output["demonstrated"]) if "demonstrated" in output else None,
        routes=_routes(output, width) if ROUTES in output else None,
        **{column.batch: response_array(column) for column in TOKEN_COLUMNS},
    )


def _of_rows(output: GeneratorOutput, name: str) -> np.ndarray | None:
    """Return a column with a number for each row; None where there is none."""
    column = cast(dict, output).get(name)
    return None if column is None else np.asarray(column, np.float32)


def _reward_terms(output: GeneratorOutput) -> np.ndarray | None:
    """Return rewards by name as [B, K], in alphabetical order; 0 where nothing was judged."""
    terms = output.get("reward_terms", [])
    names = sorted({name for row in terms for name in row})
    if not names:
        return None
    return np.array([[row.get(name, 0.0) for name in names] for row in terms], np.float32)


def _same_routes(routes: np.ndarray, rows: int, width: int) -> np.ndarray | OwnRoutes:
    """Return the experts [Lx, k] of all tokens as `collate` does; in a job the first knows them."""
    if jax.process_count() > 1:
        return own_routes([np.broadcast_to(routes, (width, *routes.shape))] * rows, [0] * rows)
    return np.broadcast_to(routes, (rows, width, *routes.shape))


def _routes(output: GeneratorOutput, width: int) -> np.ndarray | OwnRoutes:
    """Return experts as [B, T, Lx, k]; the highest number where they are not known.

    Where processes have them, it is what this one has.
    """
    entries = cast(dict, output)[ROUTES]
    if ROUTES_PROCESS in output:
        return own_routes(entries, cast(dict, output)[ROUTES_PROCESS])
    like = max(entries, key=len)
    array = np.full((len(entries), width, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)
    for row, known in enumerate(entries):
        array[row, : len(known)] = known.reshape(-1, *like.shape[1:])
    return array


def _tuples(output: GeneratorOutput, column: Column, width: int) -> np.ndarray:
    """Return a column of tuples of ids as [B, T, k], -1 where there is nothing."""
    entries = cast(dict, output)[column.name]
    most = max(len(ids) for row in entries for ids in row)
    array = np.full((len(entries), width, most), -1, column.dtype)
    prompts = output["prompt_token_ids"]
    for row, (prompt, tuples) in enumerate(zip(prompts, entries, strict=True)):
        for place, ids in enumerate(tuples, start=len(prompt)):
            array[row, place, : len(ids)] = ids
    return array


def one_per_row(
    tokens: Array,
    lengths: Array,
    mask: Array,
    beside: Mapping[str, Array | None] = MappingProxyType({}),
) -> ModelRows:
    """Make rows of the model with one trajectory each.

    Args:
        tokens: [B, T]; lengths: [B]; mask: [B, T] not 0 where wanted.
        beside: further fields of the rows by name, [B, T, ...] each, see `beside_tokens`.
    """
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return with_targets(
        tokens=tokens,
        positions=positions,
        segment_ids=(positions < lengths[:, None]).astype(np.int32),
        wanted=(mask != 0) & (positions > 0),
        **beside,
    )


def with_targets(
    *,
    tokens: Array,
    positions: Array,
    segment_ids: Array,
    wanted: Array,
    source: Array | None = None,
    routes: Array | None = None,
    **of_targets: Array | None,
) -> ModelRows:
    """Make rows of what is known of tokens; `wanted` and what is `of_targets` go to their places.

    Args:
        of_targets: what `beside_tokens` has but the routes.
    """

    def next_of(x: Array) -> np.ndarray:
        return np.pad(x[:, 1:], ((0, 0), (0, 1), *((0, 0),) * (x.ndim - 2)))

    return ModelRows(
        tokens=tokens,
        positions=positions,
        segment_ids=segment_ids,
        targets=next_of(tokens),
        wanted=next_of(wanted),
        source=source,
        routes=routes,
        **{name: None if x is None else next_of(x) for name, x in of_targets.items()},
    )


def beside_tokens(batch: TrainBatch) -> dict[str, Array | None]:
    """Return what the model's rows have of a batch beside tokens and mask, [B, T, ...] by name."""
    names = "kept", "routes", "teacher_ids", "teacher_log_probs", "teacher_states"
    return {name: getattr(batch, name) for name in names}


def row_slices(tree: Any, rows: int) -> Iterator[Any]:
    """Yield consecutive slices of `rows` rows of every array; the last is filled up with zeros.

    A row of zeros has length 0 and weight 0: it adds nothing to any sum.
    """
    total = jax.tree.leaves(tree)[0].shape[0]
    for start in range(0, total, rows):
        missing = max(start + rows - total, 0)

        def cut(x: Any, start: int = start, missing: int = missing) -> Any:
            rows_of_x = x[start : start + rows]
            if not missing:
                return rows_of_x
            module = np if isinstance(rows_of_x, np.ndarray) else jnp
            return module.pad(rows_of_x, ((0, missing), *((0, 0),) * (rows_of_x.ndim - 1)))

        yield jax.tree.map(cut, tree)


def group_numbers(index: np.ndarray) -> np.ndarray:
    """Give the prompt groups of a batch numbers from 0, in the order in which they come.

    Args:
        index: [B] group of each row, any numbers.

    Raises:
        ValueError: the rows of a group are not neighbours.
    """
    index = np.asarray(index)
    begins = np.diff(index, prepend=index[0] - 1) != 0
    numbers = np.cumsum(begins, dtype=np.int32) - 1
    if len(np.unique(index)) != begins.sum():
        again = next(g for g in index if np.count_nonzero(begins & (index == g)) > 1)
        raise ValueError(
            f"the rows of prompt group {again} are not neighbours in batch.index: groups may come "
            "in any order, but the samples of a prompt stay together"
        )
    return numbers


def minibatches(
    batch: TrainBatch, prompts: int, order: np.ndarray | None = None
) -> list[TrainBatch]:
    """Cut a batch into consecutive minibatches of `prompts` groups, numbered from 0 in each.

    Args:
        batch: the rows of a group are neighbours; the groups come in any order.
        order: the groups in another order than they come; the rows of each stay in theirs.

    Raises:
        ValueError: see `group_numbers`.
    """
    batch = batch.replace(index=group_numbers(batch.index))
    if order is not None:
        place = np.argsort(order)[batch.index]  # of each row's group
        rows = np.argsort(place, kind="stable")
        batch = jax.tree.map(lambda x: x[rows], batch.replace(index=place))
    index = np.asarray(batch.index)
    cuts = np.searchsorted(index, range(0, int(index[-1]) + 1 + prompts, prompts))
    slices = [
        jax.tree.map(lambda x, a=a, b=b: x[a:b], batch)
        for a, b in zip(cuts[:-1], cuts[1:], strict=True)
    ]
    return [m.replace(index=np.unique(m.index, return_inverse=True)[1]) for m in slices]
