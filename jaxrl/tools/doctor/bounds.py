"""How far two computations of the same may be apart by rounding; docs/doctor.md has the figures."""

import contextlib
from typing import Any, NamedTuple

import jax

from jaxrl import config as cfg


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


def gradient_bounds(config: cfg.TrainConfig, role: str = "policy") -> Bounds:
    """Return the bounds of gradients. float32 is multiplied exactly here, see `exact_products`."""
    return EXACT if cfg.compute_dtype(config.trainer, role) == "float32" else COARSE


def sampler_bounds(config: cfg.TrainConfig) -> Bounds:
    """Return the bounds of sampler against trainer, as they compute in the run.

    Accelerators round products of float32.
    """
    engine = cfg.engine_dtype(config.generator.inference_engine)
    dtypes = {cfg.compute_dtype(config.trainer, "policy"), engine}
    return EXACT if dtypes == {"float32"} and jax.default_backend() == "cpu" else COARSE


def exact_products() -> Any:
    """Keep accelerators from rounding products of float32 to fewer bits while the block runs."""
    if jax.default_backend() == "cpu":
        return contextlib.nullcontext()
    return jax.default_matmul_precision("highest")
