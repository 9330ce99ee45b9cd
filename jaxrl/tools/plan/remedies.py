"""Find the smallest changes of a config that make its run fit, each tried before it is named."""

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxrl import config as cfg
from jaxrl.models.remat import REMAT_POLICIES
from jaxrl.tools.plan.costs import Memory, estimated
from jaxrl.tools.plan.phases import SAMPLING, Phase
from jaxrl.tools.plan.plan import Plan, make_plan

Changes = dict[str, Any]  # config fields by dotted name
MemoryOf = Callable[[Phase, cfg.TrainConfig], Memory]

_ENGINE = "generator.inference_engine"
MOST_NAMED, MOST_TRIED = 3, 8  # a try compiles what the change touches


@dataclass(frozen=True)
class Remedy:
    """Hold changes that were applied, and the plan of the changed config, which fits."""

    changes: Changes
    plan: Plan
    cost: str


@dataclass(frozen=True)
class Knob:
    """Hold the settings of one thing, each smaller than the one before, in memory."""

    cost: str
    settings: list[Changes]
    kinds: frozenset[str]  # of the phases that get smaller


def find_remedies(
    config: cfg.TrainConfig, plan: Plan, memory_of: MemoryOf, tell: Callable[[str], None]
) -> list[Remedy]:
    """Return single changes that make a run fit, cheapest first.

    If there is none, return several together.

    What is worth a try is predicted: estimates, corrected by what the compiler said of the config
    as it is.

    Args:
        config: as the user wrote it; plan: of it, does not fit.
        memory_of: the compiler, or an estimate; see `make_plan`.
        tell: gets a line for each try.
    """
    search = _Search(config, plan, memory_of, tell)
    kinds = {line.phase.kind for line in plan.too_large} | ({"decode"} if plan.refusal else set())
    useful = [knob for knob in knobs(plan) if knob.kinds & kinds]
    singles = (remedy for knob in useful if (remedy := search.first(knob)))
    found = list(itertools.islice(singles, MOST_NAMED))
    if not found and (together := search.together(useful)):
        return [together]
    return found


class _Search:
    """Try changes of one config."""

    def __init__(
        self, config: cfg.TrainConfig, plan: Plan, memory_of: MemoryOf, tell: Callable[[str], None]
    ) -> None:
        self.config, self.plan, self.memory_of, self.tell = config, plan, memory_of, tell
        self.tries = 0
        self.ratio = {}  # of the temporaries that the compiler needs to the estimated ones
        for line in plan.lines:
            guess = estimated(line.phase, plan.config).temporaries
            self.ratio[line.phase.name] = line.memory.temporaries / guess if guess else 1.0

    def first(self, knob: Knob) -> Remedy | None:
        """Return the first setting with which the run fits, or None."""
        for number, changes in enumerate(knob.settings):
            if self.excess(changes) == 0 and (remedy := self.verified([(knob, number)])):
                return remedy
        return None

    def together(self, useful: Sequence[Knob]) -> Remedy | None:
        """Return changes of several knobs, as few and as small as fit, or None."""
        chosen: list[tuple[Knob, int]] = []  # and the number of its setting
        best = self.excess({})
        for knob in useful:
            excesses = [self.excess(_joined(chosen) | c) for c in knob.settings]
            least = min(excesses, default=best)
            if least < best:
                chosen.append((knob, excesses.index(least)))
                best = least
            if best == 0 and (remedy := self.verified(self._pruned(chosen))):
                return remedy
        return None

    def _pruned(self, chosen: list[tuple[Knob, int]]) -> list[tuple[Knob, int]]:
        """Drop what is not needed; keep the rest in its first setting that suffices."""
        for place in reversed(range(len(chosen))):
            rest = chosen[:place] + chosen[place + 1 :]
            if self.excess(_joined(rest)) == 0:
                return self._pruned(rest)
        for place, (knob, number) in enumerate(chosen):
            for smaller in range(number):
                weaker = [*chosen[:place], (knob, smaller), *chosen[place + 1 :]]
                if self.excess(_joined(weaker)) == 0:
                    chosen = weaker
                    break
        return chosen

    def excess(self, changes: Changes) -> float:
        """Return the predicted bytes that are missing, over all phases; inf for what cannot be."""
        plan = self._plan(changes, self._predicted)
        if plan is None or plan.refusal:
            return float("inf")
        limit = plan.machine.memory
        return sum(max(line.peak - limit, 0) for line in plan.lines)

    def verified(self, chosen: Sequence[tuple[Knob, int]]) -> Remedy | None:
        """Return the changes as a remedy if the run fits with them, or None."""
        if self.tries == MOST_TRIED:
            return None
        self.tries, changes = self.tries + 1, _joined(chosen)
        self.tell(f"trying {as_flags(changes)}")
        plan = self._plan(changes, self.memory_of)
        costs = "; ".join(dict.fromkeys(knob.cost for knob, _ in chosen))
        return Remedy(changes, plan, costs) if plan and plan.fits else None

    def _plan(self, changes: Changes, memory_of: MemoryOf) -> Plan | None:
        changed = cfg.apply_overrides(self.config, changes)
        try:
            with warnings.catch_warnings(action="ignore"):  # the user was warned of the config
                mean = self.plan.mean_response
                return make_plan(changed, self.plan.machine, memory_of, mean_response=mean)
        except ValueError:  # sizes that do not divide, a kernel that the model does not have
            return None

    def _predicted(self, phase: Phase, config: cfg.TrainConfig) -> Memory:
        guess = estimated(phase, config)
        temporaries = guess.temporaries * self.ratio.get(phase.name, 1.0)
        return replace(guess, temporaries=temporaries)


def as_flags(changes: Changes) -> str:
    """Write changes as on the command line."""
    return " ".join(f"--config.{name}={value}" for name, value in changes.items())


def _joined(chosen: Sequence[tuple[Knob, int]]) -> Changes:
    joined: Changes = {}
    for knob, number in chosen:
        joined |= knob.settings[number]
    return joined


# ---------------------------------------------------------------- what can be changed

_PASSES = frozenset({"gradient", "forward"})
_PARTS = (0.75, 0.5, 0.25)  # of a share of memory
_ALL = SAMPLING | {"gradient", "forward", "apply", "load"}


def knobs(plan: Plan) -> list[Knob]:
    """Return what a config can change, cheapest first."""
    return [knob for knob in [*_passes(plan), *_placement(plan), *_engine(plan)] if knob.settings]


def _passes(plan: Plan) -> Iterator[Knob]:
    """Yield knobs of the forward passes and gradients; none of them changes what is computed."""
    trainer, fast = plan.config.trainer, _has_host_memory(plan)
    if fast:
        settings = [] if trainer.flash_attn is True else [{"trainer.flash_attn": True}]
        yield Knob("nothing: attention in blocks", settings, _PASSES)
    for name, kind in (("train", "gradient"), ("forward", "forward")):
        field = f"micro_{name}_batch_size_per_gpu"
        halves = _halves(getattr(trainer, field)) if trainer.max_tokens_per_microbatch == -1 else []
        settings = [{f"trainer.{field}": rows} for rows in halves]
        yield Knob("more and smaller microbatches", settings, frozenset({kind}))
    tokens = trainer.max_tokens_per_microbatch
    halves = [{"trainer.max_tokens_per_microbatch": n} for n in _halves(max(tokens, 1))]
    yield Knob("more and smaller microbatches", halves, _PASSES)
    now = trainer.remat_policy if trainer.gradient_checkpointing else "none"
    order = [name for name in REMAT_POLICIES if fast or name != "offload"]
    lighter = order[order.index(now) + 1 :] if now in order else []
    remat = [{"trainer.gradient_checkpointing": True, "trainer.remat_policy": p} for p in lighter]
    yield Knob("layers are computed again", remat, frozenset({"gradient"}))


def _placement(plan: Plan) -> Iterator[Knob]:
    """Yield knobs of where weights and optimizer state are.

    The last one, bf16, is the one that changes what passes compute.
    """
    trainer, names = plan.config.trainer, {resident.name for resident in plan.residents}
    mesh = plan.lines[-1].phase.part.placement.mesh
    spread = {"trainer.policy.mesh.data": 1, "trainer.policy.mesh.fsdp": -1}
    yield Knob("weights travel more", [spread] if mesh.shape["data"] > 1 else [], _ALL)
    if _has_host_memory(plan):
        if "reference" in names and not trainer.ref.fsdp_config.cpu_offload:
            field = "trainer.ref.fsdp_config.cpu_offload"
            yield Knob("the reference is copied in every step", [{field: True}], _ALL)
        policy, field = trainer.policy, "trainer.policy.optimizer_config.offload_after_step"
        if not (policy.optimizer_config.offload_after_step or policy.fsdp_config.cpu_offload):
            others = _ALL - {"apply"}
            yield Knob("the optimizer state is copied in every update", [{field: True}], others)
        if not policy.fsdp_config.cpu_offload:
            field = "trainer.policy.fsdp_config.cpu_offload"
            yield Knob("the weights are copied in every pass", [{field: True}], SAMPLING)
    tensor, widths = mesh.shape["tensor"], []
    while mesh.size % (2 * tensor) == 0:
        tensor *= 2
        widths.append({"trainer.policy.mesh.tensor": tensor})
    yield Knob("activations travel in every layer", widths, _PASSES)
    bf16 = [] if trainer.bf16 is True else [{"trainer.bf16": True}]
    yield Knob("passes are computed in bfloat16", bf16, _PASSES)


def _engine(plan: Plan) -> Iterator[Knob]:
    """Yield knobs of the engine."""
    settings = plan.config.generator.inference_engine
    for line in plan.lines:
        if line.phase.kind == "decode":
            rows = line.phase.call.args[2].live.size * settings.num_engines
            fewer = [{f"{_ENGINE}.max_num_seqs": n} for n in _halves(rows)]
            yield Knob("fewer rows are decoded together", fewer, SAMPLING)
            shares = [settings.gpu_memory_utilization * part for part in _PARTS]
            fewer = [{f"{_ENGINE}.gpu_memory_utilization": round(x, 3)} for x in shares]
            yield Knob("there are fewer pages, and longer rows wait", fewer, SAMPLING)
    wider, tensor = [], cfg.engine_tensor(settings)
    of_host = len(plan.machine.devices) // plan.machine.hosts
    while of_host % (2 * tensor * settings.num_engines) == 0:
        tensor *= 2
        wider.append({f"{_ENGINE}.tensor_parallel_size": tensor})
    sampling = SAMPLING | {"load"}
    yield Knob("activations travel in every step of decoding", wider, sampling)
    narrow = {f"{_ENGINE}.model_dtype": "bfloat16"}
    narrow = [] if settings.model_dtype == "bfloat16" else [narrow]
    yield Knob("the sampler computes in bfloat16", narrow, sampling)


def _has_host_memory(plan: Plan) -> bool:
    """Return whether the devices have memory of their own beside the host's, and kernels."""
    return plan.machine.stand_in or plan.machine.devices[0].platform != "cpu"


def _halves(n: int) -> list[int]:
    """Return n / 2, n / 4, ... 1."""
    halves = []
    while n > 1:
        n //= 2
        halves.append(n)
    return halves
