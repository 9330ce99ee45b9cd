"""Check that no gradient depends on how a minibatch is cut, packed, ordered and spread."""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl import config as cfg
from jaxrl.data.microbatches import (
    Microbatching,
    avoided_tokens,
    microbatches as cut_into_microbatches,
    plan_batch,
)
from jaxrl.data.packing import beside_tokens, length_bucket, one_per_row, round_up
from jaxrl.data.prefix_trees import SHARING
from jaxrl.models.adapter import AdaptedModel, check_packing
from jaxrl.models.lora import attach, with_token_keys
from jaxrl.models.placement import place_model
from jaxrl.models.transformer import abstract_params, logical_axes
from jaxrl.parallel import make_mesh, param_shardings
from jaxrl.parallel.context import split_rows
from jaxrl.parallel.devices import device_memory
from jaxrl.parallel.offload import on_device
from jaxrl.registry.trial import REDUCE, SAME_LOSS
from jaxrl.tools.doctor.examined_run import ExaminedRun
from jaxrl.tools.doctor.finding import (
    EXACT,
    Finding,
    Unavailable,
    exact_products,
    failed,
    gradient_bounds,
    not_here,
    passed,
)
from jaxrl.training.build import assemble_update, make_forward_pass
from jaxrl.training.critic import without_policy
from jaxrl.training.update import Updater
from jaxrl.types import TrainBatch

KEY = 7  # seed of what a loss or dropout draws
NO_GRADIENT = "the gradient is 0 or not finite: there is nothing to compare"
COPIES = 4  # of the parameters in float32: they, two gradients, what the passes keep
MEAN = (
    "on the same log-probs the policy loss of a token depends on the other rows of its microbatch: "
    "as a rule a mean per microbatch (it divides by their count or their mean)"
)


# ---------------------------------------------------------------- how a gradient is made


class Differentiated(NamedTuple):
    """Hold a minibatch, and the parameters and the updater that its gradient is made with."""

    updater: Updater
    params: Any
    minibatch: TrainBatch

    @property
    def whole(self) -> Microbatching:
        """Return the cut that makes all rows one microbatch, one trajectory in each row."""
        groups = self.updater.microbatching.groups
        total = round_up(len(self.minibatch.index), groups)
        context = self.updater.microbatching.context
        return Microbatching(rows=total, total=total, groups=groups, context=context)

    def gradient(self, cut: Microbatching | None = None) -> Any:
        """Return the gradient of the objective by the real update, in a cut; None = `whole`."""
        updater = copy.copy(self.updater)  # the compiled functions are shared
        updater.microbatching = cut or self.whole
        with exact_products():
            weights, _ = updater.weights(self.minibatch)
            return updater.gradients(self.params, self.minibatch, weights, jax.random.key(KEY))[0]

    def gradient_in_order(self, width: int) -> Any:
        """Return the gradient as one microbatch of `width` columns, its rows in their order.

        `gradient` orders rows by length first, and cuts columns to a bucket.
        """
        updater, key = self.updater, jax.random.key(KEY)
        wide = widened(self.minibatch, width)
        missing = self.whole.total - len(wide.index)

        def filled(tree: Any) -> Any:
            return jax.tree.map(
                lambda x: np.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1))), tree
            )

        batch = filled(updater.objective.seen(wide))
        weights = filled(updater.weights(wide)[0])
        tokens, lengths, beside = filled((wide.tokens, wide.lengths, beside_tokens(wide)))
        model_rows = one_per_row(tokens, lengths, batch.loss_mask, beside)
        model_rows = split_rows(model_rows, updater.microbatching.context)
        model_rows = with_token_keys(self.params, model_rows, batch.row_ids, key)
        with exact_products():
            zeros = updater.zeros(self.params)
            model_rows, batch, weights = updater.place((model_rows, batch, weights))
            return updater.accumulate(zeros, self.params, model_rows, batch, weights, key)[0]

    def outputs(self) -> Any:
        """Return what the loss is a function of, by token, of all rows in one microbatch."""
        return self.updater.forward_pass(
            self.params, self.minibatch, microbatching=self.whole, **self.updater.outputs_alone
        )

    def loss_slopes(self, outputs: Sequence[np.ndarray], cut: Microbatching) -> list[np.ndarray]:
        """Return derivatives of the loss by log-prob and entropy of each token, [B, T] each.

        They are those of this cut. The model has no part in it: where these differ the loss is at
        fault.
        """
        updater, minibatch, key = self.updater, self.minibatch, jax.random.key(KEY)
        weights, _ = updater.weights(minibatch)
        tree = updater.objective.seen(minibatch), weights, tuple(outputs)
        found = [np.zeros(minibatch.tokens.shape) for _ in outputs]
        for chosen, _, (part, weight, scored) in cut_into_microbatches(tree, minibatch, cut):
            slopes, _ = updater.cotangents(*scored, part, weight, key)
            for array, slope in zip(found, jax.device_get(slopes), strict=True):
                array[chosen, : slope.shape[1]] = slope[: len(chosen)]
        return found


def of_policy(examined: ExaminedRun) -> Differentiated:
    """Return the gradient that the run takes of its first minibatch."""
    trainer = examined.trainer
    return Differentiated(trainer.updater, trainer.params, examined.minibatch)


def longest_first(minibatch: TrainBatch) -> TrainBatch:
    """Return the rows in the order in which the updater gives them to model and loss."""
    order = np.argsort(-np.asarray(minibatch.lengths), kind="stable")
    return jax.tree.map(lambda x: np.asarray(x)[order], minibatch)


def widened(batch: TrainBatch, width: int) -> TrainBatch:
    """Return the batch with columns cut or padded to `width`."""

    def pad(x: Any) -> Any:
        x = np.asarray(x)[:, :width]
        more = ((0, 0), (0, width - x.shape[1]), *((0, 0),) * (x.ndim - 2))
        return np.pad(x, more)

    return jax.tree.map(lambda x: pad(x) if np.ndim(x) > 1 else x, batch)


class Difference(NamedTuple):
    """Describe how far two trees of arrays are apart.

    Attributes:
        relative: norm of the difference, of the norm of the first.
        worst: path of the array with the largest part of it.
    """

    relative: float
    worst: str


def compare(expected: Any, found: Any) -> Difference:
    """Compare two trees array by array on the host, in float64.

    They may be on different devices. NaN: the first is 0 or not finite;
    infinity: the second is not finite.
    """
    pairs = zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True)
    squares, norm = {}, 0.0
    for (path, left), right in pairs:
        a, b = (np.asarray(jax.device_get(x), np.float64) for x in (left, right))
        squares[jax.tree_util.keystr(path)] = float(np.square(a - b).sum())
        norm += float(np.square(a).sum())
    total = sum(squares.values())
    if not norm or not np.isfinite(norm):
        return Difference(float("nan"), "")
    if not np.isfinite(total):
        return Difference(float("inf"), "not finite")
    return Difference((total / norm) ** 0.5, max(squares, key=lambda name: squares[name]))


# ---------------------------------------------------------------- cuts, packing, order


def microbatches(examined: ExaminedRun) -> Finding:
    """Check that one microbatch, two, and as many as there can be give the same gradient."""
    policy = of_policy(examined)
    cuts = smaller_cuts(policy.whole)
    if not cuts:
        return not_here("a minibatch has one row on each device: there is nothing to cut")
    found = _against_whole(policy, cuts)
    about = "one microbatch against " + ", ".join(found)

    def blame() -> tuple[str, str]:
        if _loss_apart(policy, cuts) > SAME_LOSS:
            return MEAN, REDUCE
        return (
            "the loss is the same on the same log-probs; the forward pass of the model depends on "
            "the rows beside a row",
            "if the model is yours, let no row see another one; else report it with --env",
        )

    finding = _judged(examined, found, about, blame)
    if not finding.passed or gradient_bounds(examined.config) == EXACT:
        return finding
    apart = _loss_apart(policy, cuts)  # rounding may hide much: the loss is in float32
    if apart <= SAME_LOSS:
        return dataclasses.replace(finding, about=f"{about}; the loss alone: {apart:.1e}")
    return failed(apart, SAME_LOSS, f"the loss alone, {about}", cause=MEAN, fix=REDUCE)


def smaller_cuts(one: Microbatching) -> list[Microbatching]:
    """Return the cuts into two microbatches, and into one row on each device at a time."""
    groups = one.groups
    sizes = {round_up(-(-one.rows // 2), groups), groups} - {one.rows}
    return [dataclasses.replace(one, rows=size) for size in sorted(sizes, reverse=True)]


def _against_whole(
    differentiated: Differentiated, cuts: Iterable[Microbatching]
) -> dict[str, Difference]:
    """Return how far the gradient in each cut is from that of one microbatch, by its words."""
    expected = differentiated.gradient()
    return {
        f"{-(-cut.total // cut.rows)} of {cut.rows} rows": compare(
            expected, differentiated.gradient(cut)
        )
        for cut in cuts
    }


def _loss_apart(policy: Differentiated, cuts: Iterable[Microbatching]) -> float:
    """Return how far the loss alone, on the same log-probs, depends on the cut; relative."""
    if policy.updater.objective.sees_whole(policy.minibatch):  # it is never given a part
        return 0.0
    outputs = policy.outputs()
    expected = policy.loss_slopes(outputs, policy.whole)
    return max(compare(expected, policy.loss_slopes(outputs, cut)).relative for cut in cuts)


def packing(examined: ExaminedRun) -> Finding:
    """Check that several trajectories in a row of the model's input change no gradient.

    Those of prefix trees, too, where the run has some.
    """
    model, packs = examined.trainer.model, examined.config.trainer.use_sample_packing is True
    if isinstance(model, AdaptedModel) and not packs:
        return not_here("the policy is a flax module, and trainer.use_sample_packing=False")
    if isinstance(model, AdaptedModel):
        check_packing(model, examined.trainer.params)
    policy = of_policy(examined)
    length = 2 * length_bucket(int(np.asarray(policy.minibatch.lengths).max()))
    packed = dataclasses.replace(policy.whole, packed=True, packed_length=length)
    words = f"rows of {length} tokens"
    found = {words: compare(policy.gradient(), policy.gradient(packed))}
    trees = dataclasses.replace(policy.whole, sharing=SHARING["on"])
    shares = policy.updater.microbatching.sharing is not None
    if shares and avoided_tokens(plan_batch(policy.minibatch, trees)):
        found["prefix trees"] = compare(policy.gradient(), policy.gradient(trees))
    cause = "the forward pass of a packed row differs: tokens see those of another trajectory"
    fix = "set trainer.use_sample_packing=False and report it with --env, or mend your model's mask"
    if len(found) > 1 and found["prefix trees"].relative > found[words].relative:
        cause = "the forward pass of a prefix tree differs from that of its trajectories"
        fix = "set trainer.prefix_sharing='off' and report it with --env"
    about = f"padded against packed, {', and '.join(found)}"
    return _judged(examined, found, about, lambda: (cause, fix))


def order(examined: ExaminedRun) -> Finding:
    """Check that the rows of the minibatch in another order give the same gradient."""
    algorithm = examined.config.trainer.algorithm
    if algorithm.loss_reduction == "token_mean_legacy":
        return not_here("loss_reduction='token_mean_legacy' takes its means over rows in order")
    policy = of_policy(examined)
    ordered = longest_first(policy.minibatch)  # the updater does so, and would undo the shuffle
    rows = np.random.default_rng(0).permutation(len(ordered.index))
    shuffled = jax.tree.map(lambda x: np.asarray(x)[rows], ordered)
    width = length_bucket(int(np.asarray(ordered.lengths).max()))
    expected = policy._replace(minibatch=ordered).gradient_in_order(width)
    other = policy._replace(minibatch=shuffled).gradient_in_order(width)
    cause = (
        f"policy loss '{algorithm.policy_loss_type}' depends on the place of a row in its minibatch"
    )
    fix = "name rows by row_ids and groups by group_ids, not by their place"
    about = "rows in order against rows shuffled"
    return _judged(examined, {"shuffled": compare(expected, other)}, about, lambda: (cause, fix))


def critic(examined: ExaminedRun) -> Finding:
    """Check that the critic's gradient is the same in smaller microbatches."""
    critic = examined.trainer.critic
    if critic is None:
        return not_here("the run has no critic")
    params = critic.params(examined.trainer.state.critic)
    values = Differentiated(critic.updater, params, without_policy(examined.minibatch))
    cuts = smaller_cuts(values.whole)
    if not cuts:
        return not_here("a minibatch has one row on each device: there is nothing to cut")
    found = _against_whole(values, cuts)
    cause = "the critic's gradient depends on its microbatches"
    about = "the critic, one microbatch against " + ", ".join(found)
    return _judged(examined, found, about, lambda: (cause, "report it with --env"), "critic")


def _judged(
    examined: ExaminedRun,
    found: dict[str, Difference],
    about: str,
    blame: Callable[[], tuple[str, str]],
    role: str = "policy",
) -> Finding:
    """Judge the largest difference by the bound of the role's precision.

    Args:
        blame: finds cause and fix.
    """
    bound = gradient_bounds(examined.config, role).gradient

    def figure_of(name: str) -> float:
        return math.inf if math.isnan(found[name].relative) else found[name].relative

    worst = max(found, key=figure_of)
    figure, where = found[worst]
    if math.isnan(figure):
        raise Unavailable(NO_GRADIENT)
    if figure <= bound:
        return passed(figure, bound, about)
    cause, fix = blame()
    return failed(figure, bound, about, cause=f"{cause}; worst with {worst}, in {where}", fix=fix)


# ---------------------------------------------------------------- meshes


def meshes(examined: ExaminedRun) -> Finding:
    """Check that one device, and other meshes of the same devices, give the same gradient.

    The other meshes spread rows and weights in other ways.
    """
    mesh = examined.trainer.mesh
    if mesh.size == 1:
        return not_here("there is one device")
    found, left_out = {}, []
    for sizes in other_meshes(examined):
        name = "x".join(f"{axis} {size}" for axis, size in sizes.items())
        count = math.prod(sizes.values())
        if not _fits(examined, count if "fsdp" in sizes else sizes.get("tensor", 1)):
            left_out.append(name)
            continue
        other = spread(examined, make_mesh(devices=list(mesh.devices.flat)[:count], **sizes))
        found[name] = compare(of_policy(examined).gradient(), other.gradient())
    if not found:
        return not_here(f"the model with its gradient does not fit: {', '.join(left_out)}")
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    about = f"{sizes} against {', '.join(found)}"
    about += f"; too large for {', '.join(left_out)}" if left_out else ""
    cause = (
        "devices do not add up what they hold: a sharding rule, a collective, or a broken device"
    )
    fix = "leave trainer.sharding_rules at its default; train on a mesh that agrees with one device"
    return _judged(examined, found, about, lambda: (cause, fix))


def other_meshes(examined: ExaminedRun) -> list[dict[str, Any]]:
    """Return sizes by axis: one device, all for rows, all for weights too, pairs for heads."""
    trainer = examined.trainer
    count, shape = trainer.mesh.size, dict(trainer.mesh.shape)
    meshes: list[dict[str, Any]] = [{"data": 1}]
    meshes += [{axis: count} for axis in ("data", "fsdp") if shape[axis] != count]
    model: Any = trainer.model
    if not isinstance(model, AdaptedModel) and count % 2 == 0 and shape["tensor"] == 1:
        widths = [model.num_heads, model.intermediate_size]
        if (experts := model.experts) is not None:
            widths += [experts.width, experts.shared_width or 0]
        whole_heads = not any(width % 2 for width in widths)
        meshes += [{"fsdp": count // 2, "tensor": 2}] if whole_heads else []
    return meshes


def spread(examined: ExaminedRun, mesh: jax.sharding.Mesh) -> Differentiated:
    """Return what the run differentiates, on another mesh."""
    trainer, config = examined.trainer, examined.config
    placement = place_model(trainer.model, mesh, cfg.sharding_rules(config.trainer.sharding_rules))
    forward_pass = make_forward_pass(config, trainer.model, placement)
    trained, lora = trainer.policy.trained, trainer.policy.lora
    updater = assemble_update(config, forward_pass, placement, trainer.total_steps, trained)[2]

    def place(tree: Any, model: Any) -> Any:
        axes, shapes = logical_axes(model), abstract_params(model)
        return jax.device_put(tree, param_shardings(mesh, axes, shapes, placement.rules))

    params = place(trainer.state.params, trained)
    if lora is not None:
        params = attach(lora, place(trainer.policy.base, trainer.model), params)
    return Differentiated(updater, on_device(params), examined.minibatch)


def _fits(examined: ExaminedRun, parts: int) -> bool:
    """Return whether parameters in so many parts have room for a gradient beside what is there."""
    size = sum(x.size * 4 for x in jax.tree.leaves(abstract_params(examined.trainer.model)))
    device = examined.trainer.mesh.devices.flat[0]
    used = (device.memory_stats() or {}).get("bytes_in_use", 0) if device.platform != "cpu" else 0
    return COPIES * size / parts + used < 0.9 * device_memory(device)
