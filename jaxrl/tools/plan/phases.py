"""List the phases of a training step: what each runs, for which shapes, and how often."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl import config as cfg
from jaxrl.array_ops import DTYPES
from jaxrl.config.microbatching import hindsight_microbatching, longest_in_hindsight
from jaxrl.config.objective_requirements import distills, distills_hindsight
from jaxrl.data.microbatches import MAX_PER_ROW, Microbatching
from jaxrl.models.architecture import attention_flops, layer_params, state_flops
from jaxrl.models.kernels.choice import REFERENCE
from jaxrl.models.kernels.delta_rule import DELTA_RULE
from jaxrl.models.kernels.head_log_probs import block_tokens
from jaxrl.models.kernels.paged_attention import BLOCK_POSITIONS
from jaxrl.models.placement import placed_params
from jaxrl.models.transformer import TransformerConfig
from jaxrl.parallel import Placement
from jaxrl.parallel.compilation import Call
from jaxrl.parallel.rules import batch_devices
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.native.programs import Programs, rule_kernel_of
from jaxrl.rollout.weights.groups import STACKED
from jaxrl.tools.plan.hlo import ONCE, Inner
from jaxrl.tools.plan.run import Run
from jaxrl.tools.plan.work import (
    Work,
    decode_step_bytes,
    forward_work,
    gradient_work,
    head_flops,
)
from jaxrl.training.build import head_kernel, kernel_of_some
from jaxrl.training.forward import CHUNK_TOKENS, CPU_CHUNK_TOKENS, chunk_columns, shared_axes
from jaxrl.training.forward_pass import ForwardPass
from jaxrl.training.resident_memory import device_bytes
from jaxrl.training.teacher import asks_for
from jaxrl.training.update import Updater

SAMPLING = frozenset({"prefill", "decode"})  # kinds of phases
# Seconds of a block for each slot, on one core of an x86 server: 5.7 ms of 1,024 slots
# (`python -m benchmarks.engine_host`, LOG.md, "A block ahead").
HOST_SECONDS = 5.6e-6


class Part(NamedTuple):
    """Describe a model on its devices.

    Attributes:
        names: residents that are its parameters; the first is what is trained.
        at: devices of the machine, where those of the mesh stand for them.
    """

    model: TransformerConfig
    placement: Placement
    dtype: jnp.dtype  # of its computation
    names: tuple[str, ...]
    at: frozenset[Any] | None = None
    head_kernel: str = REFERENCE  # of `HEAD_LOG_PROBS`
    rule_kernel: str = REFERENCE  # of `DELTA_RULE`

    @property
    def devices(self) -> frozenset[Any]:
        """Return the devices that hold the model."""
        return self.at or frozenset(self.placement.mesh.devices.flat)


@dataclass(frozen=True)
class Phase:
    """Describe a program of the step, for the longest rows that the config allows.

    Attributes:
        kind: "load", "prefill", "decode", "forward", "gradient" or "apply".
        shape: rows x tokens of its input on one device.
        holds: residents that are among its arguments.
        runs: executions in a step.
        work: of one execution.
        donated: number of the argument whose memory the results take.
        trips: of its loops whose number depends on the data.
        inner: of such loops within them.
        reads: bytes of weights, keys and values that a device reads while it samples.
        cache: of these those of keys and values.
        live: share of the rows of its blocks that still sample; the others ended before.
        host: seconds of the host for one execution.
        ahead: the next one runs in that time; else the device waits.
        sends: bytes that a device sends before it, beside the program's own collectives.
    """

    name: str
    kind: str
    part: Part
    call: Call
    shape: tuple[int, int]
    holds: tuple[str, ...]
    runs: int
    work: Work
    donated: int | None = None
    trips: int = 1
    inner: Inner = ONCE
    reads: float = 0.0
    cache: float = 0.0
    live: float = 1.0
    host: float = 0.0
    ahead: bool = False
    sends: float = 0.0


class Cache(NamedTuple):
    """Describe the key/value cache of a part of the batch, which is on each of its devices.

    Attributes:
        pages: number.
        page: positions of one.
        slots: most rows that are decoded together.
        longest: rows of the most tokens that find room at once, whatever they draw; the samples of
            a prompt share its whole pages.
        mean: rows of the mean response that do, when all have come to their end.
    """

    pages: int
    page: int
    slots: int
    longest: int
    mean: int


def phases(
    run: Run, engine: NativeEngine | None, mean_response: float | None = None
) -> list[Phase]:
    """Return all phases of a step, in their order.

    Args:
        mean_response: tokens of a response; None = all have as many as the config allows.
    """
    most = run.config.generator.sampling_params.max_generate_length
    shorter = 0.0 if mean_response is None else most - mean_response
    policy, trainer = run.policy, run.config.trainer
    names = ("parameters", "base") if policy.lora else ("parameters",)
    part = _trained(run, "policy", run.model, policy.placement, names)
    found = [*_sampling(run, engine, part, shorter)] if engine else []
    if run.scores_rows:
        found.append(_forward(run, "log-probs", run.forward_pass, run.params, part, shorter))
    algorithm = trainer.algorithm
    hindsight = distills_hindsight(algorithm)
    said = asks_for(algorithm.distillation) if distills(algorithm) else {}
    if run.has_reference:
        names = ("base" if run.reference.is_base_of_policy else "reference",)
        model, placement = run.reference.weights.model, run.reference.weights.placement
        assert isinstance(model, TransformerConfig)  # from a folder
        ref = _trained(run, "ref", model, placement, names)
        params = placed_params(model, placement)
        given = run.ref_forward_pass, params, ref, shorter
        found.append(_forward(run, "reference", *given, more={} if hindsight else said))
    if hindsight:
        given = run.forward_pass, run.params, part, shorter
        groups = batch_devices(policy.placement.mesh, policy.placement.rules)
        cut = hindsight_microbatching(run.config, groups, run.forward_pass.microbatching.context)
        how: dict[str, Any] = {"cut": cut, "longest": longest_in_hindsight(run.config)}
        found.append(_forward(run, "hindsight", *given, more=said, **how))
    if critic := run.critic:
        weights = critic.weights
        names = ("critic", "critic base") if weights.lora else ("critic",)
        assert isinstance(weights.model, TransformerConfig)  # from a folder
        values = _trained(run, "critic", weights.model, weights.placement, names)
        params, size = run.critic_params, trainer.critic_mini_batch_size
        found.append(_forward(run, "values", critic.forward_pass, params, values, shorter))
        state = critic.abstract_state
        found += _update(run, "critic ", critic.updater, state, params, values, size, shorter)
    size = trainer.policy_mini_batch_size
    return found + _update(run, "", run.updater, run.state, run.params, part, size, shorter)


def _trained(
    run: Run, role: str, model: TransformerConfig, placement: Placement, names: tuple[str, ...]
) -> Part:
    """Return a model that scores tokens, with the kernels of its head and of linear attention."""
    device, part = placement.mesh.devices.flat[0], Part(model, placement, _dtype(run, role), names)
    rule = kernel_of_some(DELTA_RULE, run.config.trainer, model, device, role).name
    if model.value_head is not None:
        return part._replace(rule_kernel=rule)
    head = head_kernel(run.config, model, device, role).name
    return part._replace(head_kernel=head, rule_kernel=rule)


def _dtype(run: Run, role: str) -> jnp.dtype:
    return jnp.dtype(DTYPES[cfg.compute_dtype(run.config.trainer, role)])


def _forward(
    run: Run,
    name: str,
    forward_pass: ForwardPass,
    params: Any,
    part: Part,
    shorter: float,
    *,
    cut: Microbatching | None = None,
    longest: int | None = None,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Phase:
    cut = cut or forward_pass.microbatching
    how: dict[str, Any] = {"cut": cut, "longest": longest, "more": more}
    call = run.forward_call(forward_pass, params, part.placement, **how)
    rows, length = call.args[1].tokens.shape
    wanted = _wanted(run, length)
    return Phase(
        name,
        "forward",
        part,
        call,
        _on_device(part, rows, length),
        part.names,
        runs=_microbatches(run, cut, shorter, longest),
        work=forward_work(part.model, rows, length, wanted),
        trips=_chunks(part, rows, length, wanted),
    )


def _update(
    run: Run,
    prefix: str,
    updater: Updater,
    state: Any,
    params: Any,
    part: Part,
    prompts: int,
    shorter: float,
) -> list[Phase]:
    """Return the phases of an update: the gradient of a microbatch, and the optimizer's update.

    Args:
        prefix: of the names of the phases.
        params: all of the model; the state has what is trained.
        prompts: of a minibatch.
        shorter: see `_microbatches`.
    """
    trainer, cut = run.config.trainer, updater.microbatching
    call = run.gradient_call(updater, params, state.params, part.placement)
    rows, length = call.args[2].tokens.shape
    wanted, shape = _wanted(run, length), _on_device(part, rows, length)
    remat = trainer.remat_policy if trainer.gradient_checkpointing else "none"
    updates = trainer.train_batch_size // prompts * trainer.update_epochs_per_batch
    gradient = Phase(
        f"{prefix}gradient",
        "gradient",
        part,
        call,
        shape,
        part.names,
        runs=updates * _microbatches(run, cut, shorter),
        work=gradient_work(part.model, rows, length, wanted, remat, frozen=len(part.names) > 1),
        donated=0,
        trips=_chunks(part, rows, length, wanted),
    )
    apply = Phase(
        f"{prefix}apply",
        "apply",
        part,
        Call(updater.apply, (state, state.params), {}),
        shape,
        holds=(part.names[0], f"{prefix}optimizer"),
        runs=updates,
        work=Work(0.0),
        donated=0,
    )
    return [gradient, apply]


def _microbatches(run: Run, cut: Microbatching, shorter: float, longest: int | None = None) -> int:
    """Return the microbatches of a batch; packed, there are fewer of short trajectories.

    Args:
        shorter: tokens by which a response is shorter than the longest, on average.
        longest: tokens of the longest trajectory; None = as the config allows.
    """
    longest = longest or run.width
    width = cut.width(longest)
    trajectories = float(cut.batch_sizes(width)[-1])
    if cut.packed and shorter:
        mean = max(longest - shorter * run.config.generator.max_turns, 1.0)
        trajectories = cut.row_counts(width)[-1] * min(cut.length(width) / mean, MAX_PER_ROW)
    return math.ceil(cut.total / trajectories)


def _sampling(run: Run, engine: NativeEngine, policy: Part, shorter: float) -> Iterator[Phase]:
    """Yield the phases of sampling.

    Weights go to the engine; then blocks prefill chunks of prompts and decode tokens. That is one
    program, with one memory: "prefill" is what a chunk adds to a block, "decode" a block without
    chunks.

    Args:
        shorter: tokens by which a response is shorter than the longest, on average.
    """
    generator, programs = run.config.generator, engine.programs
    params = run.engine_params()
    calls = engine.calls(params, run.requests())
    loads = len(programs.functions.loads(params, programs.group_bytes))
    at = None if run.machine.first_hosts is None else run.engine_devices
    part = Part(run.model, programs.placement, programs.dtype, ("engine weights", "KV cache"), at)
    named = run.config.trainer.kernels.get(DELTA_RULE.name)
    rule = rule_kernel_of(run.model, programs.placement.mesh, programs.dtype, named)
    part = part._replace(rule_kernel=rule)
    here = policy.names if run.machine.hosts == 1 and part.devices & policy.devices else ()
    yield Phase(
        "load weights",
        "load",
        part,
        calls["load"],
        shape=(0, 0),
        holds=here,
        runs=loads,
        work=Work(0.0),
        sends=run.gathered_bytes() / loads,
    )
    prompts = -(-run.config.trainer.train_batch_size // run.engines)
    prompts /= generator.inference_engine.num_engines
    yield _prefill(run, programs, part, calls["decode"], prompts)
    samples = prompts * generator.n_samples_per_prompt
    yield _decode(run, programs, part, calls["decode"], samples, shorter)


def _prefill(run: Run, programs: Programs, part: Part, call: Call, prompts: float) -> Phase:
    """Return the phase of prefilling a step's prompts, chunk by chunk.

    The number of chunks is the least: each full, all parts of the batch with as many. The samples
    of a prompt share one that fills a page, else it is prefilled on each part; each sample of a
    later turn prefills what its conversation was told. Attention is that of the mean position. The
    FLOPs from shapes have the last layer whole, of which a compiler drops all but keys and values;
    the page that a sample copies at most is next to nothing, and left out.

    Args:
        prompts: of an engine.
    """
    generator, shape, model = run.config.generator, programs.shape, part.model
    prompt, drawn, first = _lengths(run)
    samples, later = generator.n_samples_per_prompt, generator.max_turns - 1
    often = 1 if first > shape.page else min(samples, programs.parts)
    rows = [(prompts * often, 0, max(first - 1, 1))]  # (number, their positions)
    if later:
        told = max(prompt - first - later * drawn, 0) // later
        end = first + (later + 1) * (told + drawn) // 2
        rows.append((prompts * samples * later, end - told, end))
    tiles = sum(number * -(-(stop - start) // shape.tile) for number, start, stop in rows)
    seen = sum(number * (stop**2 - start**2) / 2 for number, start, stop in rows)
    context = seen / sum(number * (stop - start) for number, start, stop in rows)
    chunk = programs.parts * shape.tiles
    tokens = chunk * shape.tile
    attention = attention_flops(model) * context * tokens
    weights = layer_params(model, tokens) * _weight_bytes(call) / _tensor(part)
    read = _position_bytes(programs, call) * shape.tiles * (context + shape.tile / 2)
    return Phase(
        "prefill",
        "prefill",
        part,
        call,
        (shape.tiles, shape.tile),
        part.names,
        runs=math.ceil(tiles / chunk),
        work=Work(
            (2.0 * layer_params(model) + state_flops(model)) * tokens + attention,
            attention=attention,
        ),
        donated=1,
        inner=Inner(pages=math.ceil(context / BLOCK_POSITIONS), alone=True),
        reads=weights + read,
        cache=read,
    )


def _decode(
    run: Run, programs: Programs, part: Part, call: Call, samples: float, shorter: float
) -> Phase:
    """Return the phase of decoding a step's samples, block by block.

    Args:
        samples: of an engine.
        shorter: tokens by which a response is shorter than the longest, on average.
    """
    model, turns, slots = part.model, run.config.generator.max_turns, programs.slots
    prompt, drawn, _ = _lengths(run)
    mean = drawn - shorter
    cache = cache_of(run, programs, mean)
    share = cache.mean / cache.slots  # of the rows find pages at once
    steps, context = min(programs.steps, drawn), prompt + int(mean) // 2
    late = programs.steps * (1.5 if programs.ahead else 0.5)
    blocks = _blocks(samples / (slots * share), drawn, mean, programs.steps, late)
    live = samples * mean / (slots * max(blocks * steps, 1)) if shorter else share
    attention = slots * steps * attention_flops(model) * context
    each = 2 * layer_params(model) + state_flops(model) + head_flops(model, 1)
    products = slots * steps * each
    rows = slots // programs.parts
    weights = decode_step_bytes(model, rows, 0, part.dtype.itemsize)
    weights -= layer_params(model, rows) * (part.dtype.itemsize - _weight_bytes(call))
    read = _position_bytes(programs, call) * rows * live * context
    read += 2 * _state_bytes(programs, call) * rows * live
    return Phase(
        "decode",
        "decode",
        part,
        call,
        (rows, 1),
        part.names,
        runs=turns * blocks,
        work=Work(float(products + attention), attention=float(attention)),
        donated=1,
        trips=steps,
        inner=Inner(given=0, pages=-(-context // BLOCK_POSITIONS)),
        reads=steps * (weights / _tensor(part) + read),
        cache=steps * read,
        live=live,
        host=HOST_SECONDS * slots,
        ahead=programs.ahead,
    )


def _weight_bytes(call: Call) -> float:
    """Return the bytes of a number of the engine's layers, on average: fewer in 8 bits."""
    leaves = jax.tree.leaves(call.args[0][STACKED])
    return sum(x.size * x.dtype.itemsize for x in leaves) / sum(x.size for x in leaves)


def _position_bytes(programs: Programs, call: Call) -> float:
    """Return the bytes of a position's keys and values on a device, as they lie there."""
    pages = call.args[1]._replace(states=())
    return device_bytes(pages) / (programs.pages * programs.shape.page)


def _state_bytes(programs: Programs, call: Call) -> float:
    """Return the bytes of a row's states on a device."""
    return device_bytes(call.args[1].states) / max(programs.states, 1)


def _lengths(run: Run) -> tuple[int, int, int]:
    """Return the most tokens of a prompt, of a response, and of a first turn's prompt."""
    request = run.requests()[0]
    prompt = len(request.prompt_tokens)
    return prompt, request.sampling.max_tokens, min(run.config.trainer.max_prompt_length, prompt)


def cache_of(run: Run, programs: Programs, mean: float) -> Cache:
    """Return the pages of a part of the batch, and how many rows find room in them at once.

    Args:
        mean: tokens of a response.
    """
    prompt, drawn, first = _lengths(run)
    page, samples = programs.shape.page, run.config.generator.n_samples_per_prompt
    shared = (first - 1) // page

    def fitting(response: float) -> int:
        """Count whole groups, and of one more what has room; a row's last token is not kept."""
        own = max(math.ceil((prompt + response - 1) / page) - shared, 1)
        groups, rest = divmod(programs.pages, shared + samples * own)
        return groups * samples + max(rest - shared, 0) // own

    slots = programs.slots // programs.parts
    return Cache(programs.pages, page, slots, min(fitting(drawn), slots), min(fitting(mean), slots))


def _blocks(rows: float, longest: int, mean: float, steps: int, late: float) -> int:
    """Return the blocks of decode steps until all rows have ended.

    Rows of fewer tokens end within a block, on average in its middle, and then leave their slots to
    those that wait; when none does any more the last ones go on, the longest for all its tokens.

    Args:
        rows: for each slot.
        steps: of a block.
        late: steps from the end of a row until its slot has another one, on average.
    """
    full = math.ceil(rows) * math.ceil(longest / steps)
    if mean == longest:
        return full
    return min(full, math.ceil((max(rows - 1, 0) * (mean + late) + longest) / steps))


def _tensor(part: Part) -> int:
    return part.placement.mesh.shape["tensor"]


def _on_device(part: Part, rows: int, length: int) -> tuple[int, int]:
    groups = batch_devices(part.placement.mesh, part.placement.rules)
    return rows // groups, length // _context(part)


def _context(part: Part) -> int:
    """Return over how many devices each row is spread."""
    return part.placement.size(part.placement.rules.seq)


def _wanted(run: Run, length: int) -> int:
    """Return the most tokens of a row that are scored: sampled ones."""
    generator, width = run.config.generator, min(run.width, length)
    each = generator.sampling_params.max_generate_length * generator.max_turns
    return min(each * max(length // width, 1), length)


def _chunks(part: Part, rows: int, length: int, wanted: int) -> int:
    """Return the number of trips of the loop of the vocabulary head."""
    model, placement = part.model, part.placement
    if model.value_head is not None:
        return 1
    on_device, columns = _on_device(part, rows, length)
    columns -= _context(part) == 1  # the last of a whole row has no target
    wanted = -(-wanted // _context(part))
    if part.head_kernel != REFERENCE:
        tokens = on_device * columns
        shared = shared_axes(model, placement, part.head_kernel, part.dtype, tokens)
        parts = placement.size(shared)  # of a block, one from each device
        size = block_tokens(part.head_kernel, parts * tokens, model.hidden_size)
        return -(-parts * on_device * wanted // size)
    tokens = CPU_CHUNK_TOKENS if placement.platform == "cpu" else CHUNK_TOKENS
    split = placement.size(placement.rules.vocab)
    vocabulary = model.vocab_size // (split if model.vocab_size % split == 0 else 1)
    return -(-wanted // chunk_columns(tokens, vocabulary, on_device, columns))
