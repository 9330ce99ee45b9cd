"""How a minibatch is cut, packed, ordered and spread over devices changes no gradient."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jaxrl import config as cfg
from jaxrl.data.microbatches import Microbatching
from jaxrl.data.packing import length_bucket, round_up
from jaxrl.models.adapter import AdaptedModel, check_packing
from jaxrl.models.lora import attach
from jaxrl.models.placement import place_model
from jaxrl.models.transformer import abstract_params, logical_axes
from jaxrl.parallel import make_mesh, param_shardings
from jaxrl.parallel.offload import on_device
from jaxrl.rollout.native.slot_memory import device_memory
from jaxrl.tools.doctor.bounds import EXACT, gradient_bounds
from jaxrl.tools.doctor.finding import Finding, Unavailable, failed, not_here, passed
from jaxrl.tools.doctor.measure import (
    Difference,
    compare,
    gradient,
    gradient_in_order,
    longest_first,
    loss_slopes,
    whole,
)
from jaxrl.tools.doctor.subject import Subject
from jaxrl.training.build import assemble_update, make_forward_pass
from jaxrl.training.critic import without_policy
from jaxrl.training.update import Updater
from jaxrl.types import TrainBatch

SAME_LOSS = 1e-4  # relative; slopes of a loss on the same log-probs, in float32
NO_GRADIENT = "the gradient is 0 or not finite: there is nothing to compare"
COPIES = 4  # of the parameters in float32: they, two gradients, what the passes keep
REDUCE = (
    "return the loss of each token [B, T] and leave means to trainer.algorithm.loss_reduction, or "
    "register it with batch_statistics=True, so that it sees the whole minibatch"
)


def microbatches(subject: Subject) -> Finding:
    """Check that one microbatch, two, and as many as there can be give the same gradient."""
    given = _policy(subject)
    updater, _, minibatch = given
    one = whole(updater, len(minibatch.index))
    cuts = smaller_cuts(one)
    if not cuts:
        return not_here("a minibatch has one row on each device: there is nothing to cut")
    found = {_rows(cut): _against_whole(given, cut) for cut in cuts}
    about = "one microbatch against " + ", ".join(found)
    finding = _finding(subject, found, about, lambda: _blame_cut(given, cuts))
    if finding.passed and gradient_bounds(subject.run.config) != EXACT:
        return _loss_alone(given, cuts, finding)  # rounding may hide much: the loss is in float32
    return finding


def smaller_cuts(one: Microbatching) -> list[Microbatching]:
    """Return the cuts into two microbatches, and into one row on each device at a time."""
    groups = one.groups
    sizes = {round_up(-(-one.rows // 2), groups), groups} - {one.rows}
    return [dataclasses.replace(one, rows=size) for size in sorted(sizes, reverse=True)]


def packing(subject: Subject) -> Finding:
    """Check that several trajectories in a row of the model's input change no gradient."""
    model, packs = subject.trainer.model, subject.run.config.trainer.use_sample_packing is True
    if isinstance(model, AdaptedModel) and not packs:
        return not_here("the policy is a flax module, and trainer.use_sample_packing=False")
    if isinstance(model, AdaptedModel):
        check_packing(model, subject.trainer.params)
    given = _policy(subject)
    updater, _, minibatch = given
    one = whole(updater, len(minibatch.index))
    length = 2 * length_bucket(int(np.asarray(minibatch.lengths).max()))
    packed = dataclasses.replace(one, packed=True, packed_length=length)
    found = {f"rows of {length} tokens": _against_whole(given, packed)}
    cause = "the forward pass of a packed row differs: tokens see those of another trajectory"
    fix = "set trainer.use_sample_packing=False and report it with --env, or mend your model's mask"
    about = f"padded against packed, {next(iter(found))}"
    return _finding(subject, found, about, lambda: (cause, fix))


def order(subject: Subject) -> Finding:
    """Check that the rows of the minibatch in another order give the same gradient."""
    algorithm = subject.run.config.trainer.algorithm
    if algorithm.loss_reduction == "token_mean_legacy":
        return not_here("loss_reduction='token_mean_legacy' takes its means over rows in order")
    updater, params, minibatch = _policy(subject)
    ordered = longest_first(minibatch)  # the updater does so, and would undo the shuffle
    rows = np.random.default_rng(0).permutation(len(minibatch.index))
    shuffled = jax.tree.map(lambda x: np.asarray(x)[rows], ordered)
    width = length_bucket(int(np.asarray(minibatch.lengths).max()))
    parts = (gradient_in_order(updater, params, part, width) for part in (ordered, shuffled))
    found = {"shuffled": compare(*parts)}
    name = algorithm.policy_loss_type
    cause = f"policy loss '{name}' depends on the place of a row in its minibatch"
    fix = "name rows by row_ids and groups by group_ids, not by their place"
    return _finding(subject, found, "rows in order against rows shuffled", lambda: (cause, fix))


def critic(subject: Subject) -> Finding:
    """Check that the critic's gradient is the same in smaller microbatches."""
    critic = subject.trainer.critic
    if critic is None:
        return not_here("the run has no critic")
    part = without_policy(subject.minibatch)
    params = critic.params(subject.trainer.state.critic)
    one = whole(critic.updater, len(part.index))
    given = critic.updater, params, part
    cuts = smaller_cuts(one)
    if not cuts:
        return not_here("a minibatch has one row on each device: there is nothing to cut")
    found = {_rows(cut): _against_whole(given, cut) for cut in cuts}
    cause = "the critic's gradient depends on its microbatches"
    about = "the critic, one microbatch against " + ", ".join(found)
    return _finding(subject, found, about, lambda: (cause, "report it with --env"), "critic")


# ---------------------------------------------------------------- meshes


def meshes(subject: Subject) -> Finding:
    """Check that one device, and other meshes of the same devices, give the same gradient.

    The other meshes spread rows and weights in other ways.
    """
    mesh = subject.trainer.mesh
    if mesh.size == 1:
        return not_here("there is one device")
    found, left_out = {}, []
    for sizes in other_meshes(subject):
        name = "x".join(f"{axis} {size}" for axis, size in sizes.items())
        count = math.prod(sizes.values())
        if not _fits(subject, count if "fsdp" in sizes else sizes.get("tensor", 1)):
            left_out.append(name)
            continue
        given = spread(subject, make_mesh(devices=list(mesh.devices.flat)[:count], **sizes))
        updater, params, minibatch = given
        one = whole(updater, len(minibatch.index))
        found[name] = compare(
            _expected(_policy(subject)), gradient(updater, params, minibatch, one)
        )
    if not found:
        return not_here(f"the model with its gradient does not fit: {', '.join(left_out)}")
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    about = f"{sizes} against {', '.join(found)}"
    about += f"; too large for {', '.join(left_out)}" if left_out else ""
    cause = (
        "devices do not add up what they hold: a sharding rule, a collective, or a broken device"
    )
    fix = "leave trainer.sharding_rules at its default; train on a mesh that agrees with one device"
    return _finding(subject, found, about, lambda: (cause, fix))


def other_meshes(subject: Subject) -> list[dict[str, Any]]:
    """Return sizes by axis: one device, all for rows, all for weights too, pairs for heads."""
    trainer = subject.trainer
    count, own = trainer.mesh.size, dict(trainer.mesh.shape)
    meshes: list[dict[str, Any]] = [{"data": 1}]
    meshes += [{axis: count} for axis in ("data", "fsdp") if own[axis] != count]
    model: Any = trainer.model
    if not isinstance(model, AdaptedModel) and count % 2 == 0 and own["tensor"] == 1:
        whole_heads = model.num_heads % 2 == 0 and model.intermediate_size % 2 == 0
        meshes += [{"fsdp": count // 2, "tensor": 2}] if whole_heads else []
    return meshes


def spread(subject: Subject, mesh: jax.sharding.Mesh) -> tuple[Updater, Any, TrainBatch]:
    """Return updater, parameters and minibatch of the run on another mesh."""
    trainer, config = subject.trainer, subject.run.config
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
    return updater, on_device(params), subject.minibatch


def _fits(subject: Subject, parts: int) -> bool:
    """Return whether parameters in so many parts have room for a gradient beside what is there."""
    size = sum(x.size * 4 for x in jax.tree.leaves(abstract_params(subject.trainer.model)))
    device = subject.trainer.mesh.devices.flat[0]
    used = (device.memory_stats() or {}).get("bytes_in_use", 0) if device.platform != "cpu" else 0
    return COPIES * size / parts + used < 0.9 * device_memory(device)


# ---------------------------------------------------------------- what they share

Given = tuple[Updater, Any, TrainBatch]


def _policy(subject: Subject) -> Given:
    return subject.trainer.updater, subject.trainer.params, subject.minibatch


def _expected(given: Given) -> Any:
    updater, params, minibatch = given
    return gradient(updater, params, minibatch, whole(updater, len(minibatch.index)))


def _against_whole(given: Given, cut: Microbatching) -> Difference:
    updater, params, minibatch = given
    return compare(_expected(given), gradient(updater, params, minibatch, cut))


def _rows(cut: Microbatching) -> str:
    return f"{-(-cut.total // cut.rows)} of {cut.rows} rows"


MEAN = (
    "on the same log-probs the policy loss of a token depends on the other rows of its microbatch: "
    "as a rule a mean per microbatch (it divides by their count or their mean)"
)


def _slopes_apart(given: Given, cuts: Iterable[Microbatching]) -> float:
    """Return how far the loss alone, on the same log-probs, depends on the cut; relative."""
    updater, params, minibatch = given
    if updater.objective.sees_whole(minibatch):  # it is never given a part
        return 0.0
    one = whole(updater, len(minibatch.index))
    outputs = updater.forward_pass(params, minibatch, microbatching=one, with_entropy=True)
    expected = loss_slopes(updater, outputs, minibatch, one)
    found = (loss_slopes(updater, outputs, minibatch, cut) for cut in cuts)
    return max(compare(expected, slopes).relative for slopes in found)


def _loss_alone(given: Given, cuts: Iterable[Microbatching], finding: Finding) -> Finding:
    apart = _slopes_apart(given, cuts)
    if apart <= SAME_LOSS:
        return dataclasses.replace(finding, about=f"{finding.about}; the loss alone: {apart:.1e}")
    about = f"the loss alone, {finding.about}"
    return failed(apart, SAME_LOSS, about, cause=MEAN, fix=REDUCE)


def _blame_cut(given: Given, cuts: Iterable[Microbatching]) -> tuple[str, str]:
    """Return cause and fix of a difference, which is in the loss or in the model."""
    if _slopes_apart(given, cuts) > SAME_LOSS:
        return MEAN, REDUCE
    return (
        "the loss is the same on the same log-probs; the forward pass of the model depends on the "
        "rows beside a row",
        "if the model is yours, let no row see another one; else report it with --env",
    )


def _finding(
    subject: Subject,
    found: dict[str, Difference],
    about: str,
    blame: Callable[[], tuple[str, str]],
    role: str = "policy",
) -> Finding:
    """Judge the largest difference by the bound of the role's precision.

    Args:
        blame: finds cause and fix.
    """
    bound = gradient_bounds(subject.run.config, role).gradient
    worst = max(found, key=lambda name: _size(found[name]))
    figure, where = found[worst]
    if math.isnan(figure):
        raise Unavailable(NO_GRADIENT)
    if figure <= bound:
        return passed(figure, bound, about)
    cause, fix = blame()
    return failed(figure, bound, about, cause=f"{cause}; worst with {worst}, in {where}", fix=fix)


def _size(difference: Difference) -> float:
    return math.inf if math.isnan(difference.relative) else difference.relative
