"""Share what every command line has: help, arguments, one line for an error, exit statuses.

A command is a module whose `main` stands under `@command(__doc__)`. This module imports nothing of
jaxrl, and no jax: the launcher, which may not have it, reads the statuses here too.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

DONE, FAILED, REFUSED = 0, 1, 2  # FAILED: a check did, or an alarm has stopped the run
CRASHED = 70  # the run may be started again
INTERRUPTED = 130  # 128 + SIGINT, as of shells
MENDABLE = ValueError, OSError  # what a user can mend: wrong input, files and folders
# That of a command which needs packages of an extra, too.
MENDABLE_WITH_EXTRAS = *MENDABLE, ImportError


class Main(Protocol):
    """Run a command on its arguments, those of this process by default; return the exit status."""

    def __call__(self, argv: Sequence[str] | None = None) -> int: ...


class Arguments(argparse.ArgumentParser):
    """Parse arguments that are not of a recipe; a wrong one is a ValueError.

    `parse_known_args` also returns the words that it leaves, for `config.read_command_line`.
    """

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong."""
        raise ValueError(f"{message}; --help shows the whole command")


def command(
    usage: str | None,
    *,
    bare: int = DONE,
    help_first: bool = False,
    mendable: tuple[type[Exception], ...] = MENDABLE,
) -> Callable[[Callable[[Sequence[str]], int]], Main]:
    """Give a `main` its --help, and print the errors that a user can mend as one line.

    Args:
        usage: what --help prints, the docstring of the module.
        bare: exit status of the command without arguments, which prints that too.
        help_first: --help counts as the first word alone; later ones are not the command's own.
        mendable: those errors; others keep their traceback.
    """

    def with_help(body: Callable[[Sequence[str]], int]) -> Main:
        @functools.wraps(body)
        def main(argv: Sequence[str] | None = None) -> int:
            words = sys.argv[1:] if argv is None else argv
            if not words or {"-h", "--help"} & set(words[:1] if help_first else words):
                print(usage, file=sys.stdout if words or bare == DONE else sys.stderr)
                return DONE if words else bare
            try:
                return body(words)
            except mendable as error:
                return refuse(error)

        return main

    return with_help


def refuse(error: Exception) -> int:
    """Say on stderr what the user must mend; return the exit status of that."""
    print(f"error: {error}", file=sys.stderr)
    return REFUSED


def tell(text: str) -> None:
    """Say on stderr what is being done, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
