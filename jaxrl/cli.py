"""Share what every command line has: help, arguments, one line for an error, exit statuses.

A command is a module whose `main` stands under `@command(__doc__)`. This module imports nothing of
jaxrl, and no jax: the launcher, which may not have it, reads the statuses here too.
"""

import argparse
import contextlib
import difflib
import functools
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

DONE, FAILED, REFUSED = 0, 1, 2  # FAILED: a check did, or an alarm has stopped the run
CRASHED = 70  # the run may be started again
STALLED = 75  # as well: it stood still
INTERRUPTED, TERMINATED = 130, 143  # 128 + SIGINT or SIGTERM, as of shells
MENDABLE = ValueError, OSError  # what a user can mend: wrong input, files and folders
# That of a command which needs packages of an extra, too.
MENDABLE_WITH_EXTRAS = *MENDABLE, ImportError


class Main(Protocol):
    """Run a command on its arguments, those of this process by default; return the exit status."""

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Run the command; return its exit status."""
        ...


class Arguments(argparse.ArgumentParser):
    """Parse arguments that are not of a recipe; a wrong one is a ValueError.

    `parse_known_args` also returns the words that it leaves, for `config.read_command_line`.
    """

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong."""
        unknown = message.partition("unrecognized arguments: ")[2].split(" ")[0].partition("=")[0]
        flags = list(self._option_string_actions)
        near = [flag for flag in flags if flag[2:].startswith(unknown.strip("-") or " ")]
        near = near or difflib.get_close_matches(unknown, flags, n=1)
        hint = f"; did you mean {near[0]}?" if near else ";"
        raise ValueError(f"{message}{hint} --help shows the whole command")


def command(
    usage: str | None,
    *,
    bare: int | None = DONE,
    help_first: bool = False,
    mendable: tuple[type[Exception], ...] = MENDABLE,
) -> Callable[[Callable[[Sequence[str]], int]], Main]:
    """Give a `main` its --help, and print the errors that a user can mend as one line.

    Args:
        usage: what --help prints, the docstring of the module.
        bare: exit status of the command without arguments, which prints that too; None = it needs
            none, and runs.
        help_first: --help counts as the first word alone; later ones are not the command's own.
        mendable: those errors; others keep their traceback.
    """

    def with_help(body: Callable[[Sequence[str]], int]) -> Main:
        @functools.wraps(body)
        def main(argv: Sequence[str] | None = None) -> int:
            words = sys.argv[1:] if argv is None else argv
            if not words and bare is not None:
                print(usage, file=sys.stdout if bare == DONE else sys.stderr)
                return bare
            if _asks_help(words[:1] if help_first else words):
                print(usage)
                return DONE
            try:
                with plain_warnings():
                    return body(words)
            except mendable as error:
                return refuse(error)

        return main

    return with_help


def _asks_help(words: Sequence[str]) -> bool:
    return bool({"-h", "--help"} & set(words))


def answer_early(usage: str | None, read: Callable[[Sequence[str]], Any] | None = None) -> None:
    """End a process that only asks for help or whose config is wrong, before long imports.

    For the top of a module that is a command, under `if __name__ == "__main__"`: JAX and what is
    made of it take seconds.

    Args:
        usage: as of `command`.
        read: reads the config of the words, for `main` to take, and raises what is wrong with
            them. Not called in a process of a job, whose others would wait for it.
    """
    words = sys.argv[1:]
    if not words or _asks_help(words):
        print(usage)
        sys.exit(DONE)
    if read is None or "--distributed" in words or "JAX_COORDINATOR_ADDRESS" in os.environ:
        return
    with plain_warnings():
        try:
            read(words)
            return
        except MENDABLE as error:
            problem = error
    sys.exit(refuse(problem))


def refuse(error: Exception) -> int:
    """Say on stderr what the user must mend; return the exit status of that."""
    print(f"error: {error}", file=sys.stderr)
    return REFUSED


def end_in_one_line(interrupt: KeyboardInterrupt) -> None:
    """Have a script that does not catch this Ctrl-C end with one line in place of a traceback.

    Python itself ends it by SIGINT then, which shells show as status 130.
    """
    interrupt.add_note(RESUMES)
    if sys.excepthook is not _hook:
        _hooks.append(sys.excepthook)
        sys.excepthook = _hook


def ended(what: str, more: str, status: int) -> int:
    """Say on stderr that a signal has ended a run, and what to do; return its exit status."""
    print(f"{what}; {more}", file=sys.stderr)
    return status


AGAIN = "the same script resumes from the last checkpoint, if there is one"
RESUMES = f"interrupted; {AGAIN}"
_hooks: list[Callable[..., Any]] = []  # what was there before ours


def _hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if RESUMES in getattr(error, "__notes__", ()):
        print(RESUMES, file=sys.stderr)
    else:
        _hooks[0](kind, error, trace)


def tell(text: str) -> None:
    """Say on stderr what is being done, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Print warnings of Python and of `logging` as one line while the block runs.

    They go where `sys.stderr` is at that moment: a display may have put itself in between.
    """
    root = logging.getLogger()
    if any(isinstance(handler, _LogHandler) for handler in root.handlers):  # a block in a block
        yield
        return
    before, handler = warnings.formatwarning, _LogHandler(logging.WARNING)
    # handlers that print to a terminal past the display: absl makes one when it is imported
    streams = sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__
    printing = [x for x in root.handlers if getattr(x, "stream", None) in filter(None, streams)]
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    for other in printing:
        other.addFilter(_below_warning)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        for other in printing:
            other.removeFilter(_below_warning)
        warnings.formatwarning = before


def _below_warning(record: logging.LogRecord) -> bool:
    return record.levelno < logging.WARNING


class _LogHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Print a message of a logger."""
        error = f": {record.exc_info[1]!r}" if record.exc_info else ""
        print(f"warning: {record.getMessage()}{error}", file=sys.stderr, flush=True)
