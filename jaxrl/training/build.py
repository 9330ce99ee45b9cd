"""The optimizers and the updates that a config asks for."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl import config as cfg
from jaxrl.array_ops import DTYPES
from jaxrl.config.microbatching import (
    forward_microbatching,
    longest_trajectory,
    update_microbatching,
)
from jaxrl.config.objective_requirements import distills, distills_hindsight
from jaxrl.data.prefix_trees import SHARING, Sharing
from jaxrl.models.adapter import AdaptedModel
from jaxrl.models.exact import check_exact, choose_tiles
from jaxrl.models.expert_exchange import ALL_TO_ALL, GATHER, Exchange, exchange_of
from jaxrl.models.experts import EXPERT
from jaxrl.models.kernels.choice import REFERENCE, Choice, Operation, facts_of
from jaxrl.models.kernels.delta_rule import DELTA_RULE
from jaxrl.models.kernels.grouped_product import GROUPED_PRODUCT
from jaxrl.models.kernels.head_log_probs import HEAD_LOG_PROBS
from jaxrl.models.kernels.packed_attention import PACKED_ATTENTION
from jaxrl.models.kernels.tree_attention import TREE_ATTENTION
from jaxrl.models.lora import LoraConfig
from jaxrl.models.placement import model_shardings, place_model
from jaxrl.models.transformer import TransformerConfig
from jaxrl.parallel import (
    Placement,
    batch_sharding,
    by_process,
    make_mesh,
    put,
    replicated,
)
from jaxrl.parallel.jit_once import Bound
from jaxrl.parallel.offload import host_shardings
from jaxrl.parallel.rules import batch_devices
from jaxrl.training.forward import log_probs_and_entropy, state_values
from jaxrl.training.forward_pass import ForwardPass
from jaxrl.training.objective import (
    ROUTER_LOSSES,
    policy_objective,
    value_objective,
)
from jaxrl.training.optim import (
    abstract_state,
    make_apply,
    make_optimizer,
    make_schedule,
    new_critic_state,
    new_state,
)
from jaxrl.training.reference import Reference, reference_model
from jaxrl.training.update import Updater
from jaxrl.training.weights import Weights


def assemble_optimizer(
    trainer: cfg.TrainerConfig, total_steps: int, role: str = "policy"
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Make the optimizer of policy or critic and its learning rate by update.

    Args:
        total_steps: training steps.
        role: "policy" or "critic".
    """
    settings = getattr(trainer, role).optimizer_config
    minibatches = trainer.train_batch_size // getattr(trainer, f"{role}_mini_batch_size")
    schedule = make_schedule(
        settings.scheduler,
        lr=settings.lr,
        num_warmup_steps=settings.num_warmup_steps,
        total_steps=total_steps * minibatches * trainer.update_epochs_per_batch,
    )
    optimizer = make_optimizer(
        schedule,
        adam_betas=(settings.adam_betas[0], settings.adam_betas[1]),
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        state_dtype=settings.state_dtype,
    )
    return optimizer, schedule


def place_beside(
    role: str,
    trainer: cfg.TrainerConfig,
    model: TransformerConfig | AdaptedModel,
    policy: Placement,
    devices: Sequence[Any] | None = None,
) -> Placement:
    """Place a role on the policy's mesh, or on its own, over the same devices or over others.

    Args:
        role: "ref" or "critic".
        model: of the role.
        devices: of a role that has its own; None = the policy's.
    """
    sizes = getattr(trainer, role).mesh
    if sizes is None:
        return place_model(model, policy.mesh, policy.rules, role) if role == "critic" else policy
    mesh = make_mesh(
        devices=list(policy.mesh.devices.flat) if devices is None else devices,
        keep_order=devices is None,
        **dataclasses.asdict(sizes),
    )
    return place_model(model, mesh, policy.rules, role)


def sampler_dtype(config: cfg.TrainConfig) -> Any:
    """Return the dtype in which weights go to the sampler; None = as they are.

    Files for servers have them as they are.
    """
    if not cfg.in_process(config):
        return None
    return DTYPES[cfg.engine_dtype(config.generator.inference_engine)]


class RunDevices(NamedTuple):
    """Hold the devices of policy and reference in all processes, and of this one's engine."""

    policy: list[Any]
    ref: list[Any]
    engine: list[Any]


def devices_of(config: cfg.TrainConfig, devices: Sequence[Any] | None = None) -> RunDevices:
    """Return which devices each part of a run has.

    Args:
        devices: of the run; None = those of all its processes.
    """
    processes = by_process(jax.devices() if devices is None else devices)
    ranges = cfg.device_ranges(config, len(processes[0]))
    hosts = cfg.engine_hosts(config.generator.inference_engine)
    first = jax.process_index() // hosts * hosts
    of_engine = processes[first : first + hosts]
    return RunDevices(
        *(
            [owned[i] for owned in owners for i in numbers]
            for owners, numbers in (
                (processes, ranges.policy),
                (processes, ranges.ref),
                (of_engine, ranges.engine),
            )
        )
    )


def assemble_policy(
    config: cfg.TrainConfig, model: TransformerConfig | AdaptedModel, mesh: jax.sharding.Mesh
) -> tuple[Weights, ForwardPass]:
    """Make the weights of the policy and its forward pass."""
    trainer = config.trainer
    placement = place_model(model, mesh, cfg.sharding_rules(trainer.sharding_rules))
    policy = Weights(trainer, "policy", model, placement)
    return policy, make_forward_pass(config, model, placement)


def assemble_reference(
    config: cfg.TrainConfig,
    policy: Weights,
    forward_pass: ForwardPass,
    devices: Sequence[Any] | None = None,
) -> tuple[Reference, ForwardPass]:
    """Make the reference and its forward pass.

    The pass is the policy's where architecture, placement and precision are the same.

    Args:
        forward_pass: the policy's.
        devices: of the run; None = those of the process.
    """
    trainer = config.trainer
    model = reference_model(trainer, policy.model)
    apart = not trainer.placement.colocate_policy_ref
    devices = devices_of(config, devices).ref if apart else None
    placement = place_beside("ref", trainer, model, policy.placement, devices)
    dtypes = {cfg.compute_dtype(trainer, role) for role in ("policy", "ref")}
    if placement is not policy.placement or model != policy.model or len(dtypes) > 1:
        forward_pass = make_forward_pass(config, model, placement, "ref")
    return Reference(policy, model, placement), forward_pass


def attention_kernel(
    trainer: cfg.TrainerConfig, model: TransformerConfig, device: Any, role: str = "policy"
) -> Choice:
    """Choose the kernel of a role's attention in training and scoring.

    Raises:
        ValueError: `trainer.kernels` names one that cannot run the model.
    """
    dtype, packed = cfg.compute_dtype(trainer, role), trainer.use_sample_packing is True
    named = trainer.kernels.get(PACKED_ATTENTION.name)
    if named is None and trainer.flash_attn is not True:
        return Choice(PACKED_ATTENTION.name, REFERENCE, asked_by="trainer.flash_attn=False")
    return PACKED_ATTENTION.choose(facts_of(device, DTYPES[dtype], model, packed), named)


def tree_kernel(
    trainer: cfg.TrainerConfig, model: TransformerConfig, device: Any, role: str
) -> Choice:
    """Choose the kernel of a role's attention in rows of trees, see `attention_kernel`."""
    if trainer.flash_attn is not True and not trainer.kernels.get(TREE_ATTENTION.name):
        return Choice(TREE_ATTENTION.name, REFERENCE, asked_by="trainer.flash_attn=False")
    return kernel_of_some(TREE_ATTENTION, trainer, model, device, role)


def kernel_of_some(
    operation: Operation,
    trainer: cfg.TrainerConfig,
    model: TransformerConfig,
    device: Any,
    role: str,
) -> Choice:
    """Choose a role's kernel of what only some models do, see `attention_kernel`."""
    facts = facts_of(device, DTYPES[cfg.compute_dtype(trainer, role)], model)
    return operation.choose(facts, trainer.kernels.get(operation.name))


def head_kernel(
    config: cfg.TrainConfig, model: TransformerConfig, device: Any, role: str = "policy"
) -> Choice:
    """Choose the kernel of a role's vocabulary head, see `attention_kernel`."""
    trainer, sampling = config.trainer, config.generator.sampling_params
    facts = facts_of(device, DTYPES[cfg.compute_dtype(trainer, role)], model)
    masked = sampling.keep_sampling_mask or distills(trainer.algorithm)
    facts = facts._replace(masked=masked)
    return HEAD_LOG_PROBS.choose(facts, trainer.kernels.get(HEAD_LOG_PROBS.name))


def role_kernels(
    config: cfg.TrainConfig, model: TransformerConfig | AdaptedModel, device: Any, role: str
) -> list[Choice]:
    """Choose the kernels of a role's training and scoring, of what its model does.

    Raises:
        ValueError: `trainer.kernels` names one that cannot run the model.
    """
    trainer = config.trainer
    if isinstance(model, AdaptedModel):
        if trainer.kernels:
            raise ValueError(
                f"trainer.kernels={trainer.kernels!r}: {model.name} brings its own attention and "
                "head; leave it empty"
            )
        return []
    kernels = [attention_kernel(trainer, model, device, role)]
    for operation, has, parts in (
        (GROUPED_PRODUCT, model.experts is not None, "experts"),
        (DELTA_RULE, model.delta_net is not None, "gated DeltaNet layers"),
    ):
        if has:
            kernels.append(kernel_of_some(operation, trainer, model, device, role))
        elif role == "policy" and (named := trainer.kernels.get(operation.name)):
            field = f"trainer.kernels[{operation.name!r}]={named!r}"
            raise ValueError(f"{field} has no effect: the model has no {parts}; leave it out")
    if model.value_head is None:  # else a sum, and no log-probs
        kernels.append(head_kernel(config, model, device, role))
    return kernels


def make_forward_pass(
    config: cfg.TrainConfig,
    model: TransformerConfig | AdaptedModel,
    placement: Placement,
    role: str = "policy",
) -> ForwardPass:
    """Make the pass for a model's log-probs and entropy, or a critic's values, jitted for its mesh.

    Args:
        role: "policy", "ref" or "critic", whose precision it is.
    """
    trainer, mesh, rules = config.trainer, placement.mesh, placement.rules
    dtype = DTYPES[cfg.compute_dtype(trainer, role)]
    kernels = role_kernels(config, model, mesh.devices.flat[0], role)
    sharing, why = prefix_sharing(config, model, placement, role)
    if not why:
        assert isinstance(model, TransformerConfig)
        kernels.append(tree_kernel(trainer, model, mesh.devices.flat[0], role))
    elif role == "policy" and (named := trainer.kernels.get(TREE_ATTENTION.name)):
        field = f"trainer.kernels[{TREE_ATTENTION.name!r}]={named!r}"
        raise ValueError(f"{field} has no effect: no prefixes are shared ({why}); leave it out")
    names = {choice.operation: choice.name for choice in kernels}
    kernels.append(Choice("prefix_sharing", "off" if why else trainer.prefix_sharing, asked_by=why))
    values = isinstance(model, TransformerConfig) and model.value_head is not None
    place = functools.partial(put, shardings=batch_sharding(mesh, rules))
    parts = placement.size(rules.seq)
    microbatching = forward_microbatching(config, batch_devices(mesh, rules), parts)
    microbatching = dataclasses.replace(microbatching, sharing=sharing)
    attends = context_strategy(trainer, model, placement)
    if parts > 1:
        kernels.append(Choice("context_attention", attends))
    kernels += expert_exchange(config, model, placement, role)
    tiles, platform = None, mesh.devices.flat[0].platform
    if role == "policy":
        parts = cfg.exact_parts(config)
        sizes = {"tokens": trainer.exact_tile, "rows": cfg.exact_rows(config)}
        tiles = choose_tiles(trainer.exact, platform, parts=parts, **sizes)
    if tiles is not None:
        if not isinstance(model, TransformerConfig):
            raise ValueError(f"trainer.exact={trainer.exact!r}: {model.name} is a flax module")
        check_exact(model, tiles.parts, platform)
    forward = Bound(
        state_values if values else log_probs_and_entropy,
        model,
        dtype=dtype,
        remat=trainer.remat_policy if trainer.gradient_checkpointing else "none",
        kernel=names.get(PACKED_ATTENTION.name, REFERENCE),
        experts_kernel=names.get(GROUPED_PRODUCT.name, REFERENCE),
        rule_kernel=names.get(DELTA_RULE.name, REFERENCE),
        exchange=trainer.expert_exchange,
        context=attends,
        tree_kernel=names.get(TREE_ATTENTION.name, REFERENCE),
        placement=placement if mesh.size > 1 else None,
    )
    if values:
        return ForwardPass(forward, place, microbatching, options={}, kernels=kernels)
    assert trainer.algorithm.temperature is not None  # resolved
    temperature = trainer.algorithm.temperature
    forward = Bound(forward, tiles=tiles)
    for_head = names.get(HEAD_LOG_PROBS.name, REFERENCE)
    forward = Bound(forward, temperature=temperature, head_kernel=for_head)
    options: dict[str, Any] = {"with_entropy": False, "teacher_beta": None}
    options |= {"top_k": 0, "of_ids": False, "states": False}
    forward = Bound(forward, teacher=teacher_model(trainer, model, placement))
    if role == "policy" and isinstance(model, TransformerConfig) and model.experts is not None:
        options |= {"routers": (), "loads": False}
    return ForwardPass(forward, place, microbatching, options, kernels=kernels)


def teacher_model(
    trainer: cfg.TrainerConfig, model: TransformerConfig | AdaptedModel, placement: Placement
) -> TransformerConfig | None:
    """Return the model whose states say what the policy learns; None: there is no such teacher.

    Args:
        model: of the policy; placement: of its parameters.

    Raises:
        ValueError: the policy or its teacher is a flax module, or the vocabulary is split over
            devices and the two have not one size.
    """
    if not distills(trainer.algorithm) or trainer.algorithm.distillation.top_k is not None:
        return None
    hindsight = distills_hindsight(trainer.algorithm)
    teacher = model if hindsight else reference_model(trainer, model)
    field = "trainer.algorithm.distillation.top_k=None"
    if isinstance(model, AdaptedModel) or isinstance(teacher, AdaptedModel):
        raise ValueError(f"{field}: the states of a flax module are its own; set a number of ids")
    sizes = teacher.vocab_size, model.vocab_size
    if len(set(sizes)) > 1 and placement.size(placement.rules.vocab) > 1:
        raise ValueError(
            f"{field}: the teacher has {sizes[0]} ids, the policy {sizes[1]}, which are split over "
            "devices; set a number of ids, or trainer.policy.mesh.tensor=1"
        )
    return teacher


def prefix_sharing(
    config: cfg.TrainConfig,
    model: TransformerConfig | AdaptedModel,
    placement: Placement,
    role: str,
) -> tuple[Sharing | None, str]:
    """Return when a role's trajectories share what they begin with; else None and why not.

    Raises:
        ValueError: `trainer.prefix_sharing` asks for what cannot be.
    """
    trainer, generator = config.trainer, config.generator
    asked = trainer.prefix_sharing
    if asked == "off":
        return None, "trainer.prefix_sharing"
    lora = None if role == "ref" else getattr(trainer, role).model.lora
    refusals = {
        "a flax module has an attention of its own": isinstance(model, AdaptedModel),
        "layers that keep a state would have to keep one for each branch": isinstance(
            model, TransformerConfig
        )
        and (model.delta_net is not None or model.convolution is not None),
        "mesh.context spreads a row over devices": placement.size(placement.rules.seq) > 1,
        "trainer.exact computes each trajectory by itself": trainer.exact != "off",
        "with lora.dropout each trajectory drops elements of its own": lora is not None
        and bool(lora.rank and lora.dropout),
        "each process knows the experts of its own trajectories alone": jax.process_count() > 1
        and trainer.policy.router_replay != "off",
    }
    for why, holds in refusals.items():
        if holds and asked == "on":
            raise ValueError(f"trainer.prefix_sharing='on': {why}; set it to 'off'")
        if holds:
            return None, why
    device = placement.mesh.devices.flat[0]
    if asked == "auto" and device.platform != "cpu" and isinstance(model, TransformerConfig):
        choice = tree_kernel(trainer, model, device, role)
        if choice.name == REFERENCE and not trainer.kernels.get(TREE_ATTENTION.name):
            return None, f"without a kernel it would be slow: {choice}"
    alone = generator.n_samples_per_prompt == 1 and not generator.step_wise_trajectories
    if asked == "auto" and alone:
        return None, "a prompt has one sample, in one row"
    return SHARING[asked], ""


def expert_exchange(
    config: cfg.TrainConfig,
    model: TransformerConfig | AdaptedModel,
    placement: Placement,
    role: str = "policy",
) -> list[Choice]:
    """Return how tokens come to the experts of other devices, in the largest microbatch of a role.

    Nothing where they do not. Smaller microbatches choose by their own tokens.

    Raises:
        ValueError: it is named for a policy whose tokens need not travel.
    """
    trainer, devices = config.trainer, placement.size(EXPERT)
    named = trainer.expert_exchange
    experts = model.experts if isinstance(model, TransformerConfig) else None
    if devices == 1:
        return []
    if experts is None:
        stays = "the model has no experts"
    elif experts.count % devices:
        stays = (
            f"mesh.expert={devices} does not divide the {experts.count} experts, which are whole"
        )
    elif EXPERT not in placement.batch_axes:
        stays = "devices of mesh.expert have the same rows (trainer.sharding_rules['batch'])"
    else:
        stays = ""
    if experts is None or stays:
        if named != "auto" and role == "policy":
            field = f"trainer.expert_exchange={named!r}"
            raise ValueError(f"{field} has no effect: {stays}; set it to 'auto'")
        return []
    assert isinstance(model, TransformerConfig)
    groups, context = batch_devices(placement.mesh, placement.rules), placement.size("context")
    if role == "ref":
        cut = forward_microbatching(config, groups, context)
    else:
        cut = update_microbatching(config, groups, role, context=context)
    width = cut.width(longest_trajectory(config))
    tokens = cut.row_counts(width)[-1] // groups * cut.length(width) // context
    size = jnp.dtype(DTYPES[cfg.compute_dtype(trainer, role)]).itemsize

    def sent(exchange: Exchange) -> str:
        there = exchange.there(model.hidden_size, experts.per_token, size)
        back = exchange.back(model.hidden_size)
        return f"{there / 2**20:,.1f} MiB there and {back / 2**20:,.1f} back"

    ways = {
        name: exchange_of(experts, model.hidden_size, tokens, devices, size, name)
        for name in ("auto", GATHER, ALL_TO_ALL)
    }
    chosen = ways[named]
    other = ways[GATHER if chosen.way == ALL_TO_ALL else ALL_TO_ALL]
    why = (
        f"of {tokens:,} tokens a device sends {sent(chosen)} in a layer, {other.way} {sent(other)}"
    )
    by = "" if named == "auto" else "trainer.expert_exchange; "
    return [Choice("expert_exchange", chosen.way, asked_by=by + why)]


def context_strategy(
    trainer: cfg.TrainerConfig, model: TransformerConfig | AdaptedModel, placement: Placement
) -> str:
    """Return how rows that are spread over devices attend, of `context_attention`.

    Raises:
        ValueError: the model is a flax module, or has heads that cannot be exchanged for tokens.
    """
    named, devices = trainer.context_strategy, placement.size(placement.rules.seq)
    if devices == 1:
        return named
    if isinstance(model, AdaptedModel):
        raise ValueError(
            f"mesh.context={devices}: {model.name} is a flax module, whose attention jaxrl cannot "
            "spread over devices; set it to 1"
        )
    heads, kv = model.num_heads, model.num_kv_heads
    tensor = placement.size(placement.rules.heads)
    if heads % tensor == kv % tensor == 0:
        heads, kv = heads // tensor, kv // tensor
    if named == "ulysses" and (heads % devices or kv % devices):
        raise ValueError(
            f"trainer.context_strategy={named!r}: mesh.context={devices} does not divide the "
            f"{heads} heads and {kv} key/value heads of a device; set 'gather' or 'ring'"
        )
    return named


def assemble_update(
    config: cfg.TrainConfig,
    forward_pass: ForwardPass,
    placement: Placement,
    total_steps: int,
    trained: TransformerConfig | AdaptedModel | LoraConfig,
    role: str = "policy",
    algorithm_state: Any = None,
) -> tuple[optax.GradientTransformation, Any, Updater]:
    """Make the optimizer, the abstract state with its shardings, and the jitted update.

    Args:
        forward_pass: of the role.
        trained: whose parameters the state holds: the model, or its adapters.
        role: "policy", whose state is a `TrainState`, or "critic", whose is a `CriticState`.
        algorithm_state: of the policy's state, with its first values.
    """
    trainer, mesh = config.trainer, placement.mesh
    new: Callable[..., Any] = new_critic_state
    numbers: dict[str, Any] = {}
    if role == "policy":
        new, numbers = new_state, {"algorithm_state": algorithm_state}
    options: dict[str, Any] = {}
    if role == "policy":
        if distills(trainer.algorithm):
            options["teacher_beta"] = trainer.algorithm.distillation.beta
        rows = trainer.micro_train_batch_size_per_gpu
        routers = observed_of_routers(trainer)
        objective = policy_objective(trainer.algorithm, block_rows=rows, routers=routers)
        if routers:
            _check_routers(trainer, trained)
        if "loads" in forward_pass.options:
            options |= {"routers": routers, "loads": True}
    else:
        objective = value_objective(trainer.algorithm.value_clip)
    optimizer, schedule = assemble_optimizer(trainer, total_steps, role)
    shardings = model_shardings(trained, placement)
    state = abstract_state(optimizer, trained, shardings, replicated(mesh), new=new, **numbers)
    state_shardings = jax.tree.map(lambda x: x.sharding, state)
    updater = Updater(
        forward_pass,
        make_apply(optimizer, schedule, role),
        objective=objective,
        shardings=state_shardings,
        offloaded=_offloaded(trainer, role, state_shardings),
        options=options,
        full=role == "policy" and trainer.exact == "full",
        microbatching=dataclasses.replace(
            update_microbatching(
                config,
                batch_devices(mesh, placement.rules),
                role,
                context=placement.size(placement.rules.seq),
            ),
            sharing=forward_pass.microbatching.sharing,
        ),
    )
    return optimizer, state, updater


def observed_of_routers(trainer: cfg.TrainerConfig) -> tuple[str, ...]:
    """Return which of `RouterTerms` the update asks the forward pass for."""
    coefs = [getattr(trainer.algorithm, name) for name in ROUTER_LOSSES.values()]
    losses = tuple(ROUTER_LOSSES) if any(coefs) else ()
    return losses + ("differs",) * (trainer.policy.router_replay != "off")


def _check_routers(
    trainer: cfg.TrainerConfig, trained: TransformerConfig | AdaptedModel | LoraConfig
) -> None:
    model = trained.model if isinstance(trained, LoraConfig) else trained
    if not isinstance(model, AdaptedModel) and model.experts is not None:
        return
    if (replay := trainer.policy.router_replay) != "off":
        field = f"trainer.policy.router_replay={replay!r}"
        raise ValueError(f"{field} has no effect: the model has no experts; set it to 'off'")
    coefs = {name: getattr(trainer.algorithm, name) for name in ROUTER_LOSSES.values()}
    raise ValueError(f"trainer.algorithm: {coefs} weigh routers, the model has none; set them to 0")


def _offloaded(trainer: cfg.TrainerConfig, role: str, shardings: Any) -> dict[str, Any]:
    """Return the shardings of what waits in host memory between updates, by field of the state."""
    settings, fields = getattr(trainer, role), {}
    if settings.optimizer_config.offload_after_step:
        fields["opt_state"] = f"trainer.{role}.optimizer_config.offload_after_step"
    if settings.fsdp_config.cpu_offload:
        fields |= dict.fromkeys(("params", "opt_state"), f"trainer.{role}.fsdp_config.cpu_offload")
    return {name: host_shardings(getattr(shardings, name), field) for name, field in fields.items()}
