"""The package tokamax: whether it is here, and what it wants before its first call."""

import importlib.metadata
import logging


def missing() -> list[str]:
    """Say that the package is missing; empty: it is installed."""
    try:
        importlib.metadata.version("tokamax")
    except importlib.metadata.PackageNotFoundError:
        return ["the package tokamax"]
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
