"""Plan a run: every phase's memory, work and least time, and whether it all fits."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxrl import config as cfg
from jaxrl.array_ops import DTYPES
from jaxrl.config.model_limits import check_ids, check_models
from jaxrl.config.platform_defaults import settle, settle_evaluation
from jaxrl.data.prompts import read_rows
from jaxrl.hub import check_folder
from jaxrl.models import hf
from jaxrl.models.kernels import HEAD_LOG_PROBS, OPERATIONS, PAGED_ATTENTION
from jaxrl.models.kernels.choice import Facts, Operation
from jaxrl.models.transformer import TransformerConfig
from jaxrl.parallel.chips import GIB
from jaxrl.records.checkpoint import recorded_settings
from jaxrl.rollout.native.kv_cache import page_dtype
from jaxrl.tools.plan.costs import Limits, Memory, device_traffic, limits, seconds
from jaxrl.tools.plan.phases import SAMPLING, Cache, Phase, cache_of, phases
from jaxrl.tools.plan.run import Run
from jaxrl.tools.plan.topology import Machine
from jaxrl.train import sized
from jaxrl.training.resident_memory import Resident, device_bytes, of_training

GPUS_OF_A_HOST = 8
HELD = "weights as sent"  # of `WeightTransfer`, on the first host and on each server's


@dataclass(frozen=True)
class Line:
    """Hold a phase of a plan with its figures.

    Attributes:
        beside: bytes that stay on its devices and are not among its arguments.
        traffic: bytes that a device moves, and `times` its least seconds, of all executions of a
            step; the latter by what bounds them.
    """

    phase: Phase
    memory: Memory
    beside: float
    traffic: float
    times: dict[str, float]

    @property
    def peak(self) -> float:
        """Return the bytes of one device while the phase runs."""
        return self.beside + self.memory.peak

    @property
    def bound(self) -> str:
        """Return what takes longest: "compute", "memory", "network" or "host"."""
        return max(self.times, key=lambda name: self.times[name])

    @property
    def seconds(self) -> float:
        """Return the least seconds of the phase in a step, in which host and device take turns.

        Where the host is a block behind they work at the same time.
        """
        device = max(least for name, least in self.times.items() if name != "host")
        host = self.times.get("host", 0.0)
        return max(device, host) if self.phase.ahead else device + host


@dataclass(frozen=True)
class Plan:
    """Hold what a run needs.

    Attributes:
        config: resolved.
        limits: what a device can do.
        residents: what stays on the devices between the programs.
        host: bytes of what stays in the memory of the first host, by its name.
        refusal: why its engine cannot be made, if it cannot.
        cache: what the pages of a device hold; None without an engine.
        notes: what the plan leaves out, and what was chosen for fields that were "auto".
        mean_response: tokens of a response; None = all have as many as the config allows.
    """

    config: cfg.TrainConfig
    machine: Machine
    limits: Limits
    lines: list[Line]
    residents: list[Resident]
    host: dict[str, float]
    cache: Cache | None
    refusal: str | None
    notes: list[str]
    mean_response: float | None = None

    @property
    def peak(self) -> Line:
        """Return the phase that needs most."""
        return max(self.lines, key=lambda line: line.peak)

    @property
    def too_large(self) -> list[Line]:
        """Return the phases that do not fit."""
        limit = self.machine.memory
        return [line for line in self.lines if line.peak > limit or line.memory.refusal]

    @property
    def fits(self) -> bool:
        """Return whether the run fits."""
        return not self.refusal and not self.too_large

    @property
    def left_for_cache(self) -> float | None:
        """Return bytes that a larger cache could take, beside all that is there while sampling."""
        sampling = [line.peak for line in self.lines if line.phase.kind in SAMPLING]
        return self.machine.memory - max(sampling) if sampling else None


def make_plan(
    config: cfg.TrainConfig,
    machine: Machine,
    memory_of: Callable[[Phase, cfg.TrainConfig], Memory],
    tell: Callable[[str], None] = lambda text: None,
    mean_response: float | None = None,
) -> Plan:
    """Assemble a run from shapes, and ask for the memory of each of its programs.

    Args:
        config: as the user wrote it.
        memory_of: the compiler, or an estimate.
        tell: gets a line before each phase.
        mean_response: tokens of a response; None = all have as many as the config allows.

    Raises:
        ValueError, FileNotFoundError: as at the start of the run; no response is that long.
    """
    config = cfg.resolve(config)
    recorded = recorded_settings(config.trainer)
    config, chosen = settle(config, machine.platform, recorded=recorded)
    cfg.validate(config, num_devices=len(machine.devices), num_processes=machine.hosts)
    role = config.trainer.policy
    assert role.model.path is not None  # validated
    path = role.model.path
    check_folder("trainer.policy.model.path", path)
    check_models(config.trainer)
    model = hf.load_config(path, cfg.model_overrides(config.trainer, role))
    check_ids("trainer.policy.model.path", path, model.vocab_size, ends=hf.eos_sources(path))
    config = settle_evaluation(config, _evaluated(config), recorded).config
    config, lines = sized(config, lambda: model, machine.devices, machine.memory, machine.platform)
    chosen = [*chosen, *lines]
    longest = config.generator.sampling_params.max_generate_length
    if mean_response is not None and not 0 < mean_response <= longest:
        raise ValueError(
            f"--mean-response={mean_response:g} must be more than 0 and at most "
            f"generator.sampling_params.max_generate_length={longest}"
        )
    given = config
    if machine.stand_in:  # CPU devices have none of a GPU's kernels but those in plain XLA
        head = _kernel_of_gpu(HEAD_LOG_PROBS, config, None)
        config = cfg.apply_overrides(config, {"trainer.kernels": {HEAD_LOG_PROBS.name: head}})
    run, refusal = Run(config, machine, model), None
    _check_kernels(run, given)
    try:
        engine = run.engine()
    except ValueError as error:
        engine, refusal = None, str(error)
    refusal = refusal or run.refused_copy()
    found = phases(run, engine, mean_response)
    stay, device, lines = residents(run, found), limits(machine), []
    of_host = host_residents(run, stay)
    refusal = refusal or refused_host(machine, of_host)
    for phase in found:
        tell(phase.name)
        memory = memory_of(phase, config)
        times = seconds(phase, memory, device)
        lines.append(
            Line(
                phase,
                memory,
                beside=beside(phase, stay),
                traffic=phase.runs * device_traffic(phase, memory),
                times={name: phase.runs * least for name, least in times.items()},
            )
        )
    cache = engine and cache_of(run, engine.programs, mean_response or longest)
    notes = [*_notes(config, machine), *_responses(found, longest, mean_response), *chosen]
    notes += [str(x) for x in run.forward_pass.kernels if x.operation == "expert_exchange"]
    return Plan(config, machine, device, lines, stay, of_host, cache, refusal, notes, mean_response)


def residents(run: Run, found: list[Phase]) -> list[Resident]:
    """Return what stays between programs on the devices of policy, reference, critic and engine.

    The engine's weights and cache are dropped when the rollouts of a step are there, unless
    sampling goes on while the trainer trains. Where weights come group by group, they are there
    beside the last.
    """
    kinds = None if cfg.overlaps(run.config) else SAMPLING
    spans = cfg.engine_hosts(run.config.generator.inference_engine) > 1
    of_weights = SAMPLING | {"load"} if kinds and spans else kinds
    stay = list(of_training(run.policy, run.reference, run.updater, run.state, run.critic))
    for decode in (phase for phase in found if phase.kind == "decode"):
        weights, cache = (device_bytes(x) for x in decode.call.args[:2])
        stay.append(Resident("engine weights", weights, decode.part.devices, of_weights))
        stay.append(Resident("KV cache", cache, decode.part.devices, kinds))
    return stay


def host_residents(run: Run, stay: list[Resident]) -> dict[str, float]:
    """Return the bytes of what stays in the memory of the first host, by its name."""
    hosts, held = run.machine.hosts, run.held_bytes()
    found = {x.name: x.waits * len(x.devices) / hosts for x in stay if x.waits}
    return found | ({HELD: float(held)} if held else {})


def _evaluated(config: cfg.TrainConfig) -> int:
    """Return how many prompts there are to be evaluated; where the data are not here, a batch."""
    if not cfg.evaluates(config):
        return 0
    try:
        return sum(1 for source in config.data.val_data for _ in read_rows(source))
    except (ValueError, OSError, ImportError):
        return config.trainer.eval_batch_size


def refused_host(machine: Machine, of_host: dict[str, float]) -> str | None:
    """Return why what stays there does not fit into the memory of a host, or None."""
    needed, memory = sum(of_host.values()), machine.host_memory
    if memory is None or needed <= memory:
        return None
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in of_host.items())
    return (
        f"a host has {memory / GIB:.2f} GiB of memory, and {parts} GiB stay there; leave more on "
        "the devices (offload_after_step, cpu_offload), send weights whole (weight_delta=False), "
        "or take more hosts"
    )


def beside(phase: Phase, stay: list[Resident]) -> float:
    """Return the bytes that stay on a phase's devices and are not among its arguments."""
    return sum(
        resident.size
        for resident in stay
        if resident.devices & phase.part.devices
        and resident.name not in phase.holds
        and (resident.kinds is None or phase.kind in resident.kinds)
    )


def _check_kernels(run: Run, config: cfg.TrainConfig) -> None:
    """Refuse the kernels that GPUs refuse, where CPU devices stand in for them."""
    if run.machine.stand_in:
        for operation in config.trainer.kernels:
            _kernel_of_gpu(OPERATIONS[operation], config, run.model)


def _kernel_of_gpu(
    operation: Operation, config: cfg.TrainConfig, model: TransformerConfig | None
) -> str:
    """Return the name of the kernel that an operation has on a GPU; see `Operation.choose`."""
    sampled = operation is PAGED_ATTENTION
    dtype = (
        cfg.engine_dtype(config.generator.inference_engine)
        if sampled
        else cfg.compute_dtype(config.trainer, "policy")
    )
    facts = Facts("gpu", DTYPES[dtype], model, config.trainer.use_sample_packing is True)
    facts = facts._replace(masked=config.generator.sampling_params.keep_sampling_mask)
    if sampled:
        kept = config.generator.inference_engine.kv_cache_dtype
        facts = facts._replace(pages=page_dtype(kept, facts.dtype))
    return operation.choose(facts, config.trainer.kernels.get(operation.name)).name


def _responses(found: list[Phase], longest: int, mean: float | None) -> list[str]:
    """Return how long responses are taken to be, and what that leaves of the rows of a block."""
    dead = "".join(
        f": {1 - phase.live:.0%} of the decoded rows are dead"
        for phase in found
        if phase.kind == "decode" and (mean is not None or phase.live < 1)
    )
    if mean is None:
        return [
            f"all responses have {longest:,} tokens; --mean-response=N plans shorter ones{dead}"
        ]
    return [f"responses have {mean:,g} tokens on average, the longest {longest:,}{dead}"]


def _notes(config: cfg.TrainConfig, machine: Machine) -> list[str]:
    """Return where sampling is done, and what is not counted."""
    settings, hosts, notes = config.generator.inference_engine, machine.hosts, []
    if not cfg.in_process(config):
        kept = f", nor are the {HELD} that its hosts keep too" if settings.weight_delta else ""
        notes.append(
            f"the engine of backend={settings.backend!r} is elsewhere and not counted{kept}"
        )
    elif settings.backend != "native":
        where = "in this process" if hosts == 1 else "in each process"
        notes.append(f"the engine of backend={settings.backend!r} is {where} and not counted")
    elif hosts > 1:
        together = cfg.engine_hosts(settings)
        engines = hosts // together
        who = "each samples" if together == 1 else f"{together} together sample"
        whose = "its" if together == 1 else "their"
        notes.append(
            f"{hosts} processes of {len(machine.devices) // hosts} devices: {who} 1/{engines} of "
            f"the prompts, with weights of {whose} own"
        )
    if machine.stand_in and len(machine.devices) > GPUS_OF_A_HOST:
        notes.append("GPUs of several hosts are planned as those of one")
    return notes
