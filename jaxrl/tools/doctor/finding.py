"""What a check found."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
        name, seconds: filled in by `doctor.examine`.
    """

    passed: bool | None
    figure: Figure = ""
    bound: Figure = ""
    about: str = ""
    cause: str = ""
    fix: str = ""
    name: str = ""
    seconds: float = 0.0

    @property
    def result(self) -> str:
        """Return the outcome in a word."""
        return "-" if self.passed is None else "pass" if self.passed else "FAIL"


Check = Callable[[Any], Finding]  # of a Subject


class BadInput(ValueError):
    """Say that the run cannot be built from what the user gave: there is nothing to examine."""


def bad_input(config: Any, error: Exception) -> BadInput:
    """Return an error that says what was wrong.

    It names the field where the message has the policy's folder alone.
    """
    field, path, text = POLICY_PATH, config.trainer.policy.model.path, str(error)
    return BadInput(
        f"{field}={path!r}: {text}" if path and path in text and field not in text else text
    )


class Unavailable(Exception):
    """Say that what a check needs could not be made.

    Args:
        see: the check that says why, of the exception that caused this one.
    """

    def __init__(self, message: str, see: str = "") -> None:
        super().__init__(message)
        self.see = see


def passed(figure: Figure = "", bound: Figure = "", about: str = "") -> Finding:
    """Return the finding that all is as it should be."""
    return Finding(True, figure, bound, about)


def failed(figure: Figure, bound: Figure, about: str, *, cause: str, fix: str) -> Finding:
    """Return the finding that something is not as it should be."""
    return Finding(False, figure, bound, about, cause, fix)


def not_here(why: str) -> Finding:
    """Return the finding that this run has nothing of the kind."""
    return Finding(None, about=why)
