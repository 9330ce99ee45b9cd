"""The package tokamax: whether it is here, and what it wants before its first call."""

import importlib.metadata
import logging

from packaging.version import Version

# Before this version it calls what JAX no longer has from this one on: seen on an H100.
PORTED, JAX_MOVED = "0.0.17", "0.11.2"


def missing() -> list[str]:
    """Say that the package is missing, or too old for this JAX; empty: it can be used."""
    try:
        found, jax = (importlib.metadata.version(name) for name in ("tokamax", "jax"))
    except importlib.metadata.PackageNotFoundError:
        return ["the package tokamax"]
    if Version(found) < Version(PORTED) and Version(jax) >= Version(JAX_MOVED):
        return [f"tokamax {PORTED} or later with jax {jax}, not {found}"]
    return []


def prepare() -> None:
    """Let it be called from a program that is not its own.

    Up to 0.0.12 it reads the command line by absl, which ends the program at a word that it does
    not know. And it warns of each shape that nobody has tuned, in 2,000 characters.
    """
    from absl import flags, logging as absl_logging

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    logger = absl_logging.get_absl_logger()
    if _of_no_tuning not in logger.filters:
        logger.addFilter(_of_no_tuning)


def _of_no_tuning(record: logging.LogRecord) -> bool:
    return "Autotuning cache miss" not in str(record.msg)
