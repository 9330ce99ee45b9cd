"""Optimizer updates of policy or critic: gradients in microbatches, apply."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.array_ops import Array
from jaxrl.data.microbatches import (
    Microbatching,
    computed_tokens,
    microbatches,
    plan_batch,
)
from jaxrl.data.packing import group_numbers, minibatches, row_slices
from jaxrl.data.prefix_trees import UNSHARED
from jaxrl.models.exact import each
from jaxrl.models.lora import trained, with_token_keys, with_trained
from jaxrl.parallel.jit_once import Bound, jit_once
from jaxrl.parallel.offload import on_device
from jaxrl.training.forward_pass import Forward, ForwardPass
from jaxrl.training.objective import LOADS, Metrics, Objective
from jaxrl.types import CriticState, ModelRows, TrainBatch, TrainState

State = TypeVar("State", TrainState, CriticState)
Apply = Callable[..., tuple[Any, Metrics]]  # (state, gradients) -> state, metrics


class RunningSum:
    """Add up the gradients of microbatches one after the other.

    Args:
        zeros: where it begins.
    """

    def __init__(self, zeros: Any) -> None:
        self._sum = zeros

    def begin(self) -> Any:
        """Return what the next microbatch adds its gradient to."""
        return self._sum

    def put(self, new: Any) -> None:
        """Take what `begin` returned, with a microbatch's gradient in it."""
        self._sum = new

    def finish(self) -> Any:
        """Return the gradient of all microbatches."""
        return self._sum


class PairwiseSum:
    """Add up the gradients of microbatches in a balanced tree: neighbours, then neighbouring sums.

    With microbatches of 2^k rows, which are added up in such a tree themselves, it is the same tree
    for every k. It holds a sum of each size that waits for its neighbour: log2 of their number.

    Args:
        zeros: makes a sum of nothing.
        plus: of two sums, the earlier one first, which it may donate.
        tie: makes the gradient of a sum.
    """

    def __init__(
        self,
        zeros: Callable[[], Any],
        plus: Callable[[Any, Any], Any],
        tie: Callable[[Any], Any],
    ) -> None:
        self._zeros, self._plus, self._tie = zeros, plus, tie
        self._waiting: dict[int, Any] = {}  # by log2 of the microbatches in it

    def begin(self) -> Any:
        """Return what the next microbatch adds its gradient to: nothing."""
        return self._zeros()

    def put(self, new: Any) -> None:
        """Take the gradient of the next microbatch."""
        level = 0
        while level in self._waiting:
            new, level = self._plus(self._waiting.pop(level), new), level + 1
        self._waiting[level] = new

    def finish(self) -> Any:
        """Return the gradient of all; what has no neighbour is added to what came before it."""
        last, *earlier = [self._waiting[level] for level in sorted(self._waiting)]
        for sum_of_more in earlier:
            last = self._plus(sum_of_more, last)
        return self._tie(last)


def untied(params: Any) -> Any:
    """Return parameters of which each is used once: the head apart from the embeddings.

    What a matrix gets from two uses would be added up microbatch by microbatch.
    """
    return params if "unembed" in params else params | {"unembed": params["embed"].T}


def tied(gradients: Any) -> Any:
    """Return the gradient of parameters from that of `untied`, of a model whose head is tied."""
    rest = {name: g for name, g in gradients.items() if name != "unembed"}
    return rest | {"embed": gradients["embed"] + gradients["unembed"].T}


@dataclasses.dataclass(frozen=True)
class Slope:
    """Know how the gradient of an objective comes about; equal ones are one program.

    Attributes:
        forward: jitted, `(params, rows, **options)` -> outputs; with what is to be known of experts
            where the options ask for `loads`.
        options: of `forward`.
        objective: what is minimised, of the outputs.
        full: see `Updater`.
    """

    forward: Forward
    options: tuple[tuple[str, Any], ...]
    objective: Objective
    full: bool

    def variables(self, params: Any) -> Any:
        """Return the parameters that get a gradient."""
        return untied(params) if self.full else trained(params)

    def outputs(
        self, params: Any, rows: ModelRows
    ) -> tuple[tuple[Array, ...], Callable[[Any], Any], Metrics]:
        """Return the outputs, what pulls their cotangents back, and what is known of experts."""
        options = dict(self.options)

        def forward(variables: Any) -> tuple[tuple[Array, ...], Metrics]:
            found = self.forward(with_trained(params, variables), rows, **options)
            return (found[0], {LOADS: found[1]._asdict()}) if options.get("loads") else (found, {})

        return jax.vjp(forward, self.variables(params), has_aux=True)

    def at(self, outputs: int) -> Callable[..., tuple[tuple[Array, ...], Metrics]]:
        """Return (*outputs, batch, weights, key) -> the objective's gradient by them, metrics."""
        return jax.grad(self.objective.loss, tuple(range(outputs)), has_aux=True)


def zeros(slope: Slope, params: Any) -> Any:
    """Return gradients of nothing, of what is trained."""
    return jax.tree.map(jnp.zeros_like, slope.variables(params))


def _add(x: Any, y: Any) -> Any:
    return jax.tree.map(jnp.add, x, y)


def accumulate(
    slope: Slope,
    grads: Any,
    params: Any,
    rows: ModelRows,
    batch: TrainBatch,
    weights: Any,
    key: Array,
) -> tuple[Any, Metrics]:
    """Return the gradients with those of a microbatch added to them, and its metrics."""
    outputs, to_params, of_experts = slope.outputs(params, rows)
    gradient = slope.at(len(outputs))
    cotangents, metrics = gradient(*outputs, batch, weights, key)
    if slope.full:  # of each row alone: what is fused may be rounded by the shape of the whole

        def of_row(row: tuple) -> tuple[Array, ...]:
            found, *others = jax.tree.map(lambda x: x[None], row)
            return jax.tree.map(lambda x: x[0], gradient(*found, *others, key)[0])

        cotangents = each(of_row, (outputs, batch, weights))
    return _add(grads, to_params(cotangents)[0]), metrics | of_experts


def pull_back(
    slope: Slope, grads: Any, params: Any, rows: ModelRows, cotangents: Any
) -> tuple[Any, Metrics]:
    """Return the gradients with those of a microbatch added, from the cotangents of its outputs."""
    _, to_params, of_experts = slope.outputs(params, rows)
    return _add(grads, to_params(cotangents)[0]), of_experts


def cotangents_of(slope: Slope, *given: Any) -> tuple[tuple[Array, ...], Metrics]:
    """Return the objective's gradient and metrics; given are outputs, batch, weights, key."""
    return slope.at(len(given) - 3)(*given)


class Updater:
    """Hold the jitted pieces of an update, compiled once per shape.

    Args:
        forward_pass: with its devices. Where params have adapters (`lora.attach`) only
            these get a gradient.
        apply: `(state, gradients) -> (state, metrics)`.
        objective: what is minimised, of the outputs of the forward pass.
        shardings: the state's; gradients are placed like the parameters.
        microbatching: how minibatches are cut.
        options: of the forward pass.
        offloaded: shardings between updates of the parts of the state that wait in host memory, by
            name.
        full: add up gradients in a tree over the rows of the minibatch, see `trainer.exact`; a
            microbatch has 2^k rows.
    """

    def __init__(
        self,
        forward_pass: ForwardPass,
        apply: Apply,
        *,
        objective: Objective,
        shardings: Any,
        microbatching: Microbatching,
        offloaded: Mapping[str, Any] = MappingProxyType({}),
        options: Mapping[str, Any] = MappingProxyType({}),
        full: bool = False,
    ) -> None:
        self.full = full
        self.objective, self.microbatching, self.offloaded = objective, microbatching, offloaded
        self.forward_pass, self.place = forward_pass, forward_pass.place
        self.options = dict(options)
        of_gradients = shardings.params
        if full and "unembed" not in shardings.params:
            spec = PartitionSpec(*shardings.params["embed"].spec[::-1])
            mesh = shardings.params["embed"].mesh
            of_gradients = of_gradients | {"unembed": NamedSharding(mesh, spec)}
        slope = Slope(forward_pass.forward, tuple(sorted(options.items())), objective, full)
        sums = {"donate_argnums": 0, "out_shardings": (of_gradients, None)}
        self.zeros = jit_once(Bound(zeros, slope), out_shardings=of_gradients)
        self.accumulate = jit_once(Bound(accumulate, slope), **sums)
        self.pull_back = jit_once(Bound(pull_back, slope), **sums)
        self.add = jit_once(_add, donate_argnums=0, out_shardings=of_gradients)
        self.tie = jit_once(tied, out_shardings=shardings.params)
        self.cotangents = jit_once(Bound(cotangents_of, slope))
        self.apply = jit_once(apply, donate_argnums=0, out_shardings=(shardings, None))
        self._whole: bool | None = None
        self.shared = np.zeros(0, np.int64)  # tokens of each prefix that a row has from another

    def weights(self, minibatch: TrainBatch, **known: Any) -> tuple[Any, Metrics]:
        """Return the weights of the objective, on the host; see there what may be known."""
        return jax.device_get(self.objective.weights(minibatch, **known))

    def update(
        self,
        state: State,
        minibatch: TrainBatch,
        weights: Any,
        key: Array,
        params: Any = None,
    ) -> tuple[State, list[Metrics], Metrics]:
        """Make one optimizer update on a minibatch of host arrays: `gradients`, then `step`.

        Args:
            state: is donated.
            weights: `self.weights` of the minibatch.
            key: for losses that draw, and for dropout.
            params: of the policy, where they are more than `state.params`: adapters on their base.
                They may wait in host memory.

        Returns:
            The new state, the metrics of each microbatch (see `merge_metrics`), those of `step`.
        """
        params = state.params if params is None else params
        grads, metrics = self.gradients(on_device(params), minibatch, weights, key)
        state, applied = self.step(state, grads)
        return state, metrics, applied

    def step(self, state: State, grads: Any) -> tuple[State, Metrics]:
        """Return the state after the optimizer's step, offloaded as it was, and its metrics.

        Args:
            state: is donated; parts of it may be in host memory.
        """
        new_state, applied = self.apply(on_device(state), grads)
        return self.offload(new_state), applied

    def offload(self, state: State) -> State:
        """Move to host memory the parts of the state that wait there between updates."""
        parts = {name: getattr(state, name) for name in self.offloaded}
        return state.replace(**jax.device_put(parts, dict(self.offloaded)))

    def weighted(
        self, parts: Sequence[tuple[TrainBatch, Array]], **known: Any
    ) -> list[tuple[TrainBatch, Array, Any, Metrics]]:
        """Return minibatches and keys with the weights of each and their metrics, on the host.

        All of them before the first update: nothing is fetched between updates.
        """
        return [(minibatch, key, *self.weights(minibatch, **known)) for minibatch, key in parts]

    def gradients(
        self, params: Any, minibatch: TrainBatch, weights: Any, key: Array
    ) -> tuple[Any, list[Metrics]]:
        """Return the gradient of a minibatch's objective, accumulated over its microbatches.

        A loss that returns a number, or has batch statistics, sees the minibatch as a whole,
        longest rows first and cut to the bucket of the longest: its cotangent is taken on the [B,
        T] log-probs of a gradient-free pass and pulled back microbatch by microbatch.
        """
        lengths, metrics = np.asarray(minibatch.lengths), []
        if self._sees_whole_minibatch(minibatch) and not self._is_single(minibatch):
            # as if it were one microbatch: a scalar loss may count what is masked
            widths = self.microbatching.widths
            one = Microbatching(rows=len(lengths), total=len(lengths), widths=widths)
            _, _, (minibatch, weights) = next(microbatches((minibatch, weights), minibatch, one))
            outputs = self._whole_outputs(params, minibatch, key)
            seen = self.objective.seen(minibatch)
            cotangents, metrics = self.cotangents(*outputs, seen, weights, key)
            cotangents = jax.device_get(cotangents)
            grads, of_experts = self.pulled_back(params, minibatch, cotangents, key)
            return grads, [metrics | of_experts]
        tree = self.objective.seen(minibatch), weights
        parts = microbatches(tree, minibatch, self.microbatching)
        total = self._total(params)
        for _, host_rows, on_host in parts:
            keyed_rows = with_token_keys(params, host_rows, on_host[0].row_ids, key)
            rows, (batch, token_weights) = self.place((keyed_rows, on_host))
            rows = rows.replace(teacher_head=self.forward_pass.teacher_head)
            given = params, rows, batch, token_weights, key
            new, part = self.accumulate(total.begin(), *given)
            total.put(new)
            metrics.append(part)
        return total.finish(), metrics

    def _total(self, params: Any) -> "RunningSum | PairwiseSum":
        """Return what gradients of microbatches are added to."""
        if not self.full:
            return RunningSum(self.zeros(params))
        tie = self.tie if "unembed" not in params else lambda grads: grads
        return PairwiseSum(lambda: self.zeros(params), self.add, tie)

    def pulled_back(
        self, params: Any, batch: TrainBatch, cotangents: Any, key: Array
    ) -> tuple[Any, Metrics]:
        """Return the gradient from cotangents of log-probs and entropy, [B, T] each.

        Returns:
            The gradient, and what is to be known of experts, added up.
        """
        tree, found, total = (batch.row_ids, cotangents), [], self._total(params)
        for _, host_rows, (row_ids, on_host) in microbatches(tree, batch, self.microbatching):
            keyed_rows = with_token_keys(params, host_rows, row_ids, key)
            rows, cotangent = self.place((keyed_rows, on_host))
            rows = rows.replace(teacher_head=self.forward_pass.teacher_head)
            new, of_experts = self.pull_back(total.begin(), params, rows, cotangent)
            total.put(new)
            found.append(of_experts)
        return total.finish(), jax.tree.map(lambda *parts: sum(parts), *found)

    def warm_up(self, params: Any, minibatch: TrainBatch) -> None:
        """Compile `update`, all but `apply`, for all microbatches of trajectories of this length.

        Args:
            minibatch: all its trajectories are equally long.
        """
        (weights, _), key = self.weights(minibatch), jax.random.key(0)
        lengths = np.asarray(minibatch.lengths)
        whole = self._sees_whole_minibatch(minibatch)
        if whole:
            self.gradients(params, minibatch, weights, key)
        if whole and self._is_single(minibatch):
            return
        for size in self.microbatching.batch_sizes(self.microbatching.width(int(lengths[0]))):
            part, weight = next(row_slices((minibatch, weights), size))
            if not whole:
                self.gradients(params, part, weight, key)
                continue
            outputs = self._whole_outputs(params, part, key)
            self.pulled_back(params, part, outputs, key)

    def _whole_outputs(self, params: Any, batch: TrainBatch, key: Array) -> tuple[np.ndarray, ...]:
        """Return the outputs of the pass that is pulled back through: in the same cuts."""
        cut = self.microbatching
        return self.forward_pass(params, batch, microbatching=cut, key=key, **self.outputs_alone)

    @property
    def outputs_alone(self) -> dict[str, Any]:
        """Return the options of a forward pass for the outputs of the objective alone."""
        without = {"loads": False} if "loads" in self.options else {}
        return self.options | without | {"with_entropy": True}

    def cut_metrics(self, minibatches: Sequence[TrainBatch]) -> dict[str, float]:
        """Return what the cut into rows costs and saves in one pass over the minibatches.

        It is kept which prefixes were `shared`. packing_efficiency: tokens that are not padding /
        tokens that the model runs on; prefix_sharing: share of the trajectories' tokens that they
        have from others.
        """
        layouts = [x for part in minibatches for x in plan_batch(part, self.microbatching)]
        tokens = int(sum(np.sum(minibatch.lengths) for minibatch in minibatches))
        none = np.zeros(0, np.int64)
        self.shared = np.concatenate([none, *(x.shared for x in layouts if x.shared is not None)])
        computed, avoided = computed_tokens(layouts), int(self.shared.sum())
        found = {"packing_efficiency": (tokens - avoided) / computed}
        if self.microbatching.sharing is not None:
            found["prefix_sharing"] = avoided / tokens
            found["prefix_sharing_computed"] = float(computed)
            found["prefix_sharing_avoided"] = float(avoided)
        return {f"trainer/{name}": x for name, x in found.items()}

    def _is_single(self, minibatch: TrainBatch) -> bool:
        """Return whether a minibatch is one microbatch, of flat rows."""
        flat = plan_batch(minibatch, self.microbatching)[0].shared is None
        return flat and self.microbatching.is_single(np.asarray(minibatch.lengths))

    def _sees_whole_minibatch(self, minibatch: TrainBatch) -> bool:
        if self._whole is None:  # a property of the function: asked once
            self._whole = self.objective.sees_whole(minibatch)
        return self._whole


@contextmanager
def every_way(users: Sequence["Updater | ForwardPass"], width: int) -> Iterator[Iterator[None]]:
    """Let what cuts batches cut them flat, then into trees if it ever does, for each iteration.

    Rows of zeros then have all shapes that a run can ask for: in trees of them nothing is shared.

    Args:
        width: tokens of the longest trajectory.
    """
    cuts = [user.microbatching for user in users]
    shares = [cut.sharing is not None and width >= cut.sharing.shortest for cut in cuts]

    def ways() -> Iterator[None]:
        for sharing in (None, UNSHARED) if any(shares) else (None,):
            for user, cut, may in zip(users, cuts, shares, strict=True):
                user.microbatching = dataclasses.replace(cut, sharing=sharing if may else None)
            yield

    try:
        yield ways()
    finally:
        for user, cut in zip(users, cuts, strict=True):
            user.microbatching = cut


def minibatches_of_step(
    batch: TrainBatch, *, prompts: int, passes: int, rng_path: tuple[int, int]
) -> list[tuple[TrainBatch, Array]]:
    """Return the minibatches of a step in the order of their updates, each with its key.

    There are `passes` over the minibatches of whole prompt groups. The first takes the groups in
    their order, which is random already; each further one shuffles them into other minibatches.

    Args:
        prompts: groups of a minibatch.
        rng_path: seed and step, from which everything random is drawn.
    """
    seed, step = rng_path
    key = jax.random.fold_in(jax.random.key(seed), step)
    orders = (pass_order(batch, seed, step, number) for number in range(passes))
    parts = [part for order in orders for part in minibatches(batch, prompts, order)]
    return [(part, jax.random.fold_in(key, number)) for number, part in enumerate(parts)]


def rows_without_update(
    batch: TrainBatch,
    pending: Sequence[tuple[Any, Metrics]],
    *,
    prompts: int,
    rng_path: tuple[int, int],
) -> np.ndarray:
    """Return the rows [B] bool from which nothing was learnt: all their updates were skipped.

    They are in the order of `row_ids`, in which the batch was made.

    Args:
        batch, prompts, rng_path: as given to `minibatches_of_step`.
        pending: of each update, (metrics of its microbatches, of the whole).
    """
    skipped = jax.device_get([applied["skipped_updates"] for _, applied in pending])
    index, (seed, step) = group_numbers(batch.index), rng_path
    groups = int(index[-1]) + 1
    cuts = range(0, groups, prompts)
    learnt = np.zeros(groups, bool)
    for number in range(len(pending) // len(cuts)):
        order = pass_order(batch, seed, step, number)
        order = np.arange(groups) if order is None else order
        for cut, missed in zip(cuts, skipped[number * len(cuts) :], strict=False):
            learnt[order[cut : cut + prompts]] |= not missed
    return ~learnt[index[np.argsort(batch.row_ids)]]


def pass_order(batch: TrainBatch, seed: int, step: int, number: int) -> np.ndarray | None:
    """Return the order of prompt groups in a pass, [groups]; None: as they are, in the first."""
    groups = len(np.unique(batch.index))
    return np.random.default_rng((seed, step, number)).permutation(groups) if number else None
