"""Say what a check found, and how far apart two results may be; see docs/doctor.md."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jaxrl import config as cfg

Figure = float | int | str
POLICY_PATH = "trainer.policy.model.path"


@dataclass(frozen=True)
class Finding:
    """Hold the outcome of one check.

    Attributes:
        passed: None = there is nothing to check in this run; `about` says why.
        figure: what was measured; bound: the largest figure that passes. A check without numbers
            has words, or nothing.
        about: what was compared.
        cause, fix: of a failure, a line each.
        table: more figures, shown below all checks: a header, and rows of as many cells.
        name, seconds: filled in by `examination.run_check`.
    """

    passed: bool | None
    figure: Figure = ""
    bound: Figure = ""
    about: str = ""
    cause: str = ""
    fix: str = ""
    table: Sequence[Sequence[Figure]] = ()
    name: str = ""
    seconds: float = 0.0

    @property
    def result(self) -> str:
        """Return the outcome in a word."""
        return "-" if self.passed is None else "pass" if self.passed else "FAIL"


Check = Callable[[Any], Finding]  # takes an ExaminedRun


def passed(figure: Figure = "", bound: Figure = "", about: str = "") -> Finding:
    """Return the finding that all is as it should be."""
    return Finding(True, figure, bound, about)


def failed(figure: Figure, bound: Figure, about: str, *, cause: str, fix: str) -> Finding:
    """Return the finding that something is not as it should be."""
    return Finding(False, figure, bound, about, cause, fix)


def not_here(why: str) -> Finding:
    """Return the finding that this run has nothing of the kind."""
    return Finding(None, about=why)


class Unavailable(Exception):
    """Say that what a check needs could not be made.

    Args:
        see: the check that says why, of the exception that caused this one.
    """

    def __init__(self, message: str, see: str = "") -> None:
        super().__init__(message)
        self.see = see


class BadInput(ValueError):
    """Say that the run cannot be built from what the user gave: there is nothing to examine."""


def bad_input(config: cfg.TrainConfig, error: Exception) -> BadInput:
    """Return an error that says what was wrong.

    It names the field where the message has the policy's folder alone.
    """
    field, path, text = POLICY_PATH, config.trainer.policy.model.path, str(error)
    return BadInput(
        f"{field}={path!r}: {text}" if path and path in text and field not in text else text
    )


# ---------------------------------------------------------------- bounds


class Bounds(NamedTuple):
    """Hold how far apart two results may be, by the coarsest rounding on the way.

    Attributes:
        gradient: norm of a difference of gradients, of the norm of the gradient.
        mean, max: absolute differences of log-probs of tokens.
    """

    gradient: float
    mean: float
    max: float


# Measured on correct code: see "Bounds" in docs/doctor.md.
EXACT = Bounds(gradient=2e-5, mean=5e-5, max=5e-4)
COARSE = Bounds(gradient=0.1, mean=0.08, max=0.8)
# Keys and values of 4 significant bits, which are off by up to 1/16: the trainer has no such cache
# to compare with.
FP8_PAGES = Bounds(gradient=0.1, mean=0.2, max=2.0)


def gradient_bounds(config: cfg.TrainConfig, role: str = "policy") -> Bounds:
    """Return the bounds of gradients. float32 is multiplied exactly here, see `exact_products`."""
    return EXACT if cfg.compute_dtype(config.trainer, role) == "float32" else COARSE


def sampler_bounds(config: cfg.TrainConfig) -> Bounds:
    """Return the bounds of sampler against trainer, as they compute in the run.

    Accelerators round products of float32. Weights in 8 bits have the same bounds: the trainer
    computes with the like of them.
    """
    if config.generator.inference_engine.kv_cache_dtype == "fp8":
        return FP8_PAGES
    engine = cfg.engine_dtype(config.generator.inference_engine)
    dtypes = {cfg.compute_dtype(config.trainer, "policy"), engine}
    return EXACT if dtypes == {"float32"} and jax.default_backend() == "cpu" else COARSE


def exact_products() -> Any:
    """Keep accelerators from rounding products of float32 to fewer bits while the block runs."""
    if jax.default_backend() == "cpu":
        return contextlib.nullcontext()
    return jax.default_matmul_precision("highest")
