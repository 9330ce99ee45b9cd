"""Assemble a run from its config alone: shapes and shardings; no weights, no data."""

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl import config as cfg
from jaxrl.array_ops import DTYPES
from jaxrl.config.microbatching import longest_trajectory
from jaxrl.config.objective_requirements import (
    distills,
    has_critic,
    needs_old_log_probs,
    needs_reference,
)
from jaxrl.data.microbatches import Microbatching, microbatches
from jaxrl.data.packing import empty_batch
from jaxrl.data.prefix_trees import UNSHARED
from jaxrl.models import hf
from jaxrl.models.linear import merge
from jaxrl.models.lora import attach, with_token_keys
from jaxrl.models.placement import placed_params
from jaxrl.models.transformer import (
    Params,
    TransformerConfig,
    head_axes,
)
from jaxrl.parallel import Placement, batch_sharding, by_process
from jaxrl.parallel.chips import GIB
from jaxrl.parallel.compilation import Call
from jaxrl.rollout.build import engine_of_run
from jaxrl.rollout.conversations.conversation import sampling_of
from jaxrl.rollout.native.balancer import Balancer
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Request
from jaxrl.rollout.weights.groups import NOT_CAST, named, whole_pieces
from jaxrl.tools.plan.topology import Machine
from jaxrl.train import meshes
from jaxrl.training.build import (
    assemble_policy,
    assemble_reference,
    assemble_update,
    sampler_dtype,
    teacher_model,
)
from jaxrl.training.critic import Critic, without_policy
from jaxrl.training.forward_pass import ForwardPass
from jaxrl.training.resident_memory import device_bytes, of_training
from jaxrl.training.routes import routes_of_any_token
from jaxrl.training.update import Updater
from jaxrl.training.weights import Weights
from jaxrl.types import TrainBatch


class Run:
    """Hold the parts of a run that have arrays on devices, from shapes.

    Args:
        config: resolved and validated.
        machine: its devices.
        model: architecture of the policy; None = that of its folder.

    Attributes:
        engine_devices: of the sampler of the first process; its programs are compiled for
            `engine_mesh`, which is `Machine.first_hosts` where there are several.

    Raises:
        FileNotFoundError, ValueError: see `hf.load_config`, `assemble_policy`, `assemble_update`
            and `pages_that_fit`.
    """

    def __init__(
        self, config: cfg.TrainConfig, machine: Machine, model: TransformerConfig | None = None
    ) -> None:
        self.config, self.machine = config, machine
        trainer, generator = config.trainer, config.generator
        role = trainer.policy
        if model is None:
            assert role.model.path is not None  # validated
            model = hf.load_config(role.model.path, cfg.model_overrides(trainer, role))
        self.model = model
        self.mesh, self.engine_mesh = meshes(config, machine.devices)
        self.engine_devices = frozenset(self.engine_mesh.devices.flat)
        hosts = cfg.engine_hosts(config.generator.inference_engine)
        self.engines = machine.hosts // hosts
        if machine.first_hosts is not None:
            alone = machine.first_hosts(hosts)
            self.engine_mesh = _by_themselves(self.engine_mesh, machine.devices, alone)
        self.policy, self.forward_pass = assemble_policy(config, self.model, self.mesh)
        self.reference, self.ref_forward_pass = assemble_reference(
            config, self.policy, self.forward_pass, machine.devices
        )
        placement = self.policy.placement
        _, self.state, self.updater = assemble_update(
            config, self.forward_pass, placement, 1, self.policy.trained
        )
        self.critic = Critic(config, placement, 0, 1) if has_critic(trainer) else None
        self.width = longest_trajectory(config)
        params = generator.sampling_params
        self.has_old = needs_old_log_probs(trainer) or params.logprobs is None
        self.scores_rows = self.has_old or trainer.exact_checked_rows > 0
        self.has_reference = needs_reference(trainer.algorithm)
        self.teacher = teacher_model(trainer, self.model, self.policy.placement)
        self.params = _whole(self.policy, self.state.params)
        self.critic_params = self.critic and _whole(
            self.critic.weights, self.critic.abstract_state.params
        )

    def engine(self) -> NativeEngine | None:
        """Return one of the engines in this process; None: they are elsewhere, or not jaxrl's own.

        Raises:
            ValueError: its memory does not hold one row.
        """
        if not cfg.in_process(self.config):
            return None
        if self.config.generator.inference_engine.backend != "native":
            return None
        stay = of_training(self.policy, self.reference, self.updater, self.state, self.critic)
        beside = sum(resident.size for resident in stay if resident.devices & self.engine_devices)
        made = engine_of_run(
            self.config,
            self.model,
            self.engine_mesh,
            decode_text=lambda tokens: "",
            device_memory=self.machine.memory,
            resident_bytes=beside,
            processes=self.machine.hosts,
            platform=self.machine.platform,
        )
        engine = made.engines[0] if isinstance(made, Balancer) else made
        assert isinstance(engine, NativeEngine)
        return engine

    def engine_params(self) -> Params:
        """Return what an engine is given: the parameters, or its own copy of them.

        Of several hosts each has a copy on its own devices, adapters merged, in the sampler's
        dtype, split along the largest dim (but that of layers) that they divide. An engine of
        several hosts gets the like of them group by group.
        """
        if self.machine.hosts == 1:
            return self.params
        mesh, shapes = self.engine_mesh, jax.eval_shape(merge, self.params)
        dtype = DTYPES[cfg.engine_dtype(self.config.generator.inference_engine)]

        def part(path: Any, x: Any) -> jax.ShapeDtypeStruct:
            dims = range(path[0].key == "layers", x.ndim)
            fits = [dim for dim in dims if x.shape[dim] % mesh.size == 0]
            chosen = max(fits, key=lambda dim: x.shape[dim], default=None)
            spec = PartitionSpec(*(mesh.axis_names if d == chosen else None for d in range(x.ndim)))
            kept = x.dtype if path[0].key in NOT_CAST else dtype
            return jax.ShapeDtypeStruct(x.shape, kept, sharding=NamedSharding(mesh, spec))

        return jax.tree_util.tree_map_with_path(part, shapes)

    def refused_copy(self) -> str | None:
        """Return why a host cannot make the copy of the weights that goes to servers, or None.

        Every process of a job makes one, whole, in the dtype in which it goes to them; adapters are
        merged later, in that of the parameters.
        """
        machine = self.machine
        if machine.hosts == 1 or cfg.in_process(self.config) or cfg.by_transfer(self.config):
            return None
        dtype, chips = sampler_dtype(self.config), len(machine.devices) // machine.hosts
        copy = self._copy_bytes(None if self.policy.lora else dtype) / chips
        params = device_bytes(self.params)
        if copy + params <= machine.memory:
            return None
        return (
            f"every process makes a whole copy of the weights for the servers: {copy / GIB:.2f} "
            f"GiB on each of its {chips} devices, beside {params / GIB:.2f} GiB of parameters, do "
            f"not fit into {machine.memory / GIB:.2f} GiB; take hosts with more devices or memory"
        )

    def held_bytes(self) -> int:
        """Return the bytes of the weights that hosts keep, to send or receive what changes in them.

        These are the host of the first process, and that of each server: see `WeightTransfer`.
        """
        settings = self.config.generator.inference_engine
        if cfg.in_process(self.config) or not settings.weight_delta:
            return 0
        return self._copy_bytes(DTYPES[cfg.engine_dtype(settings)])

    def _copy_bytes(self, dtype: Any) -> int:
        """Return the bytes of all weights, adapters merged; None = each array in its own dtype."""
        pieces = whole_pieces(named(jax.eval_shape(merge, self.params)), dtype)
        return sum(piece.nbytes for piece in pieces)

    def gathered_bytes(self) -> float:
        """Return the bytes that a device sends for the copies of several hosts.

        All copies are gathered on all devices; of engines of several hosts, only what each keeps.
        What servers pull is not counted.
        """
        if self.machine.hosts == 1 or cfg.by_transfer(self.config):
            return 0.0
        leaves, devices = jax.tree.leaves(self.engine_params()), len(self.machine.devices)
        copy = sum(x.size * x.dtype.itemsize for x in leaves)
        if cfg.engine_hosts(self.config.generator.inference_engine) > 1:
            # a part of what is a device's own, and then those that the other engines have of it
            return copy / devices + copy / self.engine_mesh.size * (self.engines - 1) / self.engines
        return copy * (devices - 1) / devices

    def requests(self) -> list[Request]:
        """Return the longest requests of training and evaluation."""
        generator, trainer = self.config.generator, self.config.trainer
        evaluates = trainer.eval_interval > 0 and self.config.data.val_data
        phases = [generator.sampling_params]
        phases += [generator.eval_sampling_params] if evaluates else []
        stops = hf.eos_token_ids(trainer.policy.model.path or "")
        prompt = (0,) * (generator.max_input_length or trainer.max_prompt_length)
        keys = ((0, 0),) * generator.n_samples_per_prompt
        conversations = (Future(),) * len(keys) if cfg.keeps_pages(generator) else ()
        return [
            Request(prompt, keys, sampling_of(p, stops), conversations=conversations)
            for p in phases
            if p is not None
        ]

    # ---------------------------------------------------------------- arguments of the programs

    def batch(self, cut: Microbatching, *, done: bool, longest: int | None = None) -> TrainBatch:
        """Return host rows of the longest trajectories that fill one microbatch.

        Args:
            done: with what the update needs; else as the forward passes get them.
            longest: tokens of them; None = as the config allows.
        """
        sampling, trainer = self.config.generator.sampling_params, self.config.trainer
        mask_ids = sampling.top_k if sampling.keep_sampling_mask else 0
        width = cut.width(longest or self.width)
        length = min(width, trainer.packed_length or width)
        rows = cut.batch_sizes(length)[-1]
        log_probs = sampling.logprobs is not None
        routes = routes_of_any_token(self.model, trainer.policy.router_replay)
        beside = {"kept": mask_ids, "log_probs": log_probs, "routes": routes}
        batch = empty_batch(rows, width, length, **beside)
        if not done:
            return batch
        zeros = batch.loss_mask
        taught = self.taught(zeros.shape) if distills(trainer.algorithm) else {}
        return batch.replace(
            **taught,
            old_log_probs=zeros if self.has_old else None,
            ref_log_probs=zeros if self.has_reference else None,
            values=zeros if self.critic else None,
            advantages=zeros,
            returns=zeros,
        )

    def forward_call(
        self,
        forward_pass: ForwardPass,
        params: Params,
        placement: Placement,
        *,
        cut: Microbatching | None = None,
        longest: int | None = None,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> Call:
        """Return the call of `forward_pass.forward` for one microbatch.

        Args:
            cut: of the batch; None = that of the pass.
            longest: tokens of a trajectory; None = as the config allows.
            more: options, of a teacher's pass.
        """
        cut = flat(cut or forward_pass.microbatching)
        batch = self.batch(cut, done=False, longest=longest)
        if forward_pass is not self.forward_pass or params is not self.params:
            batch = batch.replace(routes=None)
        _, rows, _ = next(microbatches(batch.row_ids, batch, cut))
        options = {**forward_pass.options, **more}
        return Call(forward_pass.forward, (params, placed(rows, placement)), options)

    def taught(self, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Return what a teacher says of tokens [B, T], by field of `TrainBatch`."""
        top_k = self.config.trainer.algorithm.distillation.top_k
        found: dict[str, np.ndarray] = {"taught": np.zeros(shape, np.float32)}
        if (teacher := self.teacher) is not None:
            dtype = DTYPES[cfg.compute_dtype(self.config.trainer, "ref")]
            return found | {"teacher_states": np.zeros((*shape, teacher.hidden_size), dtype)}
        assert top_k is not None  # else there is a teacher
        events = min(top_k, self.model.vocab_size)
        found["teacher_ids"] = np.zeros((*shape, events), np.int32)
        return found | {"teacher_log_probs": np.zeros((*shape, events + 1), np.float32)}

    def teacher_head(self, at: Placement) -> Params | None:
        """Return the head of a teacher that says its states, as `placed_params` does."""
        if self.teacher is None:
            return None
        params = placed_params(self.teacher, at)
        return {name: params[name] for name in head_axes(self.teacher)}

    def gradient_call(
        self, updater: Updater, params: Params, trained: Params, at: Placement
    ) -> Call:
        """Return the call of `updater.accumulate` for one microbatch.

        It is the call of `pull_back` if the loss sees the whole minibatch.

        Args:
            params: all of the model; trained: those with a gradient.
            at: placement of the parameters.
        """
        cut = updater.microbatching
        if cut.sharing is not None and updater.options.get("routers"):
            # what is known of routers is of trajectories, of which trees have more
            cut = dataclasses.replace(cut, sharing=UNSHARED)
        else:
            cut = flat(cut)
        batch = self.batch(cut, done=True)
        if updater is not self.updater:
            batch = without_policy(batch)
        weights = jax.eval_shape(lambda batch: updater.objective.weights(batch)[0], batch)
        weights = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), weights)
        tree, key = (updater.objective.seen(batch), weights), jax.random.key(0)
        _, rows, part = next(microbatches(tree, batch, cut))
        rows = placed(with_token_keys(params, rows, part[0].row_ids, key), at)
        if updater is self.updater:
            rows = rows.replace(teacher_head=self.teacher_head(at))
        single = cut.is_single(np.full(cut.total, self.width))
        if not single and updater.objective.sees_whole(batch):
            outputs = (part[0].loss_mask,) * (2 + distills(self.config.trainer.algorithm))
            return Call(updater.pull_back, (trained, params, rows, placed(outputs, at)), {})
        return Call(updater.accumulate, (trained, params, rows, *placed(part, at), key), {})


def flat(cut: Microbatching) -> Microbatching:
    """Return a cut into flat rows; those of trees take no more memory."""
    return dataclasses.replace(cut, sharing=None)


def _by_themselves(mesh: Mesh, devices: Sequence[Any], alone: Sequence[Any]) -> Mesh:
    """Return a mesh of the first processes on devices that are like theirs, see `first_hosts`."""
    owned = [device for host in by_process(devices) for device in host]
    same = dict(zip(owned, alone, strict=False))
    like = np.array([same[device] for device in mesh.devices.flat]).reshape(mesh.devices.shape)
    return Mesh(like, mesh.axis_names, axis_types=mesh.axis_types)


def placed(tree: Any, placement: Placement) -> Any:
    """Return shapes of host rows, spread over the batch axes as on the devices."""
    rows = batch_sharding(placement.mesh, placement.rules)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), tree)


def _whole(weights: Weights, trained: Params) -> Params:
    """Return all parameters of the policy or the critic, see `Weights.whole`; nothing is read."""
    if weights.lora is None:
        return trained
    return attach(weights.lora, placed_params(weights.model, weights.placement), trained)
