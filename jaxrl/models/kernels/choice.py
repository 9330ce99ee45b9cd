"""Which implementation of an operation a run has: the fastest that can, or the one it names.

An operation has one implementation in plain XLA, which is the reference of all others and can do
everything. The others are asked what they miss; the answers are printed with the choice.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxrl.models.architecture import TransformerConfig

REFERENCE = "xla"
AMPERE, HOPPER = 8.0, 9.0  # compute capability
SAME_PLATFORM = {"cuda": "gpu"}  # what JAX calls a platform where it lowers for it
AMD = "rocm"  # the same; its devices say "gpu" as NVIDIA's do, and none of the kernels are for it


class Facts(NamedTuple):
    """Hold what implementations are asked about.

    Attributes:
        platform: of the devices, as JAX calls it; but "rocm" for AMD's GPUs.
        dtype: of the operands.
        model: whose shapes they have; None = of no transformer.
        packed: rows may hold several segments.
        capability: of an NVIDIA GPU; None = not known, and taken for Hopper's.
        kind: of the devices, as JAX calls it; "" = not known, and taken for one of today.
        masked: tokens are scored among the ids that they were drawn from, or among those that a
            teacher names, not among all.
        pages: dtype of a cache of keys and values; None = that of the operands.
    """

    platform: str
    dtype: Any
    model: TransformerConfig | None = None
    packed: bool = True
    capability: float | None = None
    kind: str = ""
    masked: bool = False
    pages: Any = None


def facts_of(
    device: Any, dtype: Any, model: TransformerConfig | None = None, packed: bool = True
) -> Facts:
    """Return the facts of a device."""
    platform, found = device.platform, getattr(device, "compute_capability", None)
    try:
        capability = None if found is None else float(found)
    except ValueError:  # "gfx90a"
        platform, capability = AMD, None
    return Facts(platform, jnp.dtype(dtype), model, packed, capability, device.device_kind)


@dataclass(frozen=True)
class Implementation:
    """Describe one way to do an operation.

    Attributes:
        run: does it; all implementations of an operation take the same arguments.
        needs: lists what is missing, in words; empty: it can. None = it can always.
        conditions: what `needs` asks for, for the documentation.
    """

    run: Callable[..., Any]
    needs: Callable[[Facts], list[str]] | None = None
    conditions: str = ""

    def missing(self, facts: Facts) -> list[str]:
        """List what it wants and does not find."""
        return self.needs(facts) if self.needs else []


class Choice(NamedTuple):
    """Hold which implementation an operation has.

    Attributes:
        passed_over: what each faster one misses, by name.
        asked_by: the setting that names it; "" = it is the fastest that can.
    """

    operation: str
    name: str
    passed_over: Mapping[str, list[str]] = MappingProxyType({})
    asked_by: str = ""

    def __str__(self) -> str:
        """Say it in one line."""
        reasons = [f"{name} needs {' and '.join(why)}" for name, why in self.passed_over.items()]
        why = self.asked_by or "; ".join(reasons)
        return f"{self.operation} {self.name}" + (f" ({why})" if why else "")


@dataclass(frozen=True)
class Operation:
    """Describe what kernels are there for.

    Attributes:
        name: as `trainer.kernels` names it.
        does: what, in a few words.
        implementations: by name, "xla" among them.
        order: names by platform, the fastest first, each ending with one that can always; a
            platform that is missing has the reference alone.
    """

    name: str
    does: str
    implementations: Mapping[str, Implementation]
    order: Mapping[str, tuple[str, ...]]

    def choose(self, facts: Facts, named: str | None = None) -> Choice:
        """Choose the first implementation of the platform that can, or the one that is named.

        Raises:
            ValueError: the named one does not exist, is not for the platform, or misses something.
        """
        names = self.order.get(SAME_PLATFORM.get(facts.platform, facts.platform), (REFERENCE,))
        if named is not None:
            if named not in names:
                raise ValueError(
                    f"trainer.kernels[{self.name!r}]={named!r}: on a {facts.platform} there "
                    f"{'is' if len(names) == 1 else 'are'} {', '.join(names)}"
                )
            if missing := self.implementations[named].missing(facts):
                raise ValueError(
                    f"trainer.kernels[{self.name!r}]={named!r} needs {' and '.join(missing)}; "
                    "leave it out for the fastest that can"
                )
            return Choice(self.name, named, asked_by="trainer.kernels")
        passed_over: dict[str, list[str]] = {}
        for name in names:
            missing = self.implementations[name].missing(facts)
            if not missing:
                return Choice(self.name, name, passed_over)
            passed_over[name] = missing
        raise ValueError(f"{self.name}: none of {', '.join(names)} can run on {facts}")


def unmet(conditions: list[tuple[bool, str]]) -> list[str]:
    """List the words of conditions that do not hold."""
    return [words for holds, words in conditions if not holds]


def no_sinks(model: TransformerConfig) -> tuple[bool, str]:
    """Return whether a model has no sinks in its attention, and the condition's words."""
    return not model.attention_sinks, "a model without attention sinks"


def at_least(facts: Facts, capability: float) -> bool:
    """Return whether a GPU has a compute capability; one that is not known has it."""
    return facts.capability is None or facts.capability >= capability
