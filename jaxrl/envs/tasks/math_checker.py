"""Whether two mathematical answers are equal, asked of processes that can be killed.

math-verify hands text to sympy, which may think for ever over a tower of powers, or fill the
memory; in a thread nothing can stop it. As a module: `is_equal` keeps processes that run this file
as a program, one per call at a time, and starts another when one is lost.
"""

import functools
import importlib.util
import json
import logging
import os
import queue
import re
import signal
import subprocess
import sys

_MEMORY_BYTES = 2 << 30
_BASE = re.compile(r"(?:[\d}]\s*_[\s{(]*|base[\s~}]*)(\d+)")  # 2516_8, 2516 \text{ (base 8)}
_BASE_TEN = re.compile(r"_\s*(?:10(?!\d)|\{\s*10\s*\})")
_TEXT = re.compile(r"\\(?:text|mathrm)\s*\{[^{}]*\}(?:\s*\^\s*(?:\{\s*\d\s*\}|\d))?")  # cm^{2}
_NAME = re.compile(r"\\?[A-Za-z]\w*(?:_\{\w+\})?(?:\s*\([^()]*\))?")  # x_1, x_{1}, f(2)
_NUMBER = re.compile(
    r"[-+]?(?:[\d,]*\.?\d+(?:\s*/\s*\d+)?|\\[dt]?frac\s*\{?\d+\}?\s*\{?\d+\}?)"  # 1,080 1/2 \frac12
)
_POWER_OF_TEN = re.compile(
    r"(?:\\times|\\cdot|\*|\u00d7)?\s*(?<!\d)10\s*\^\s*(?:\{\s*[-+]?\d+\s*\}|\d)"
)
_LEFT_TO_DO = re.compile(
    r"[\d)}]\s*(?:[-+*!_\u00d7\u00f7]|\^(?!\s*\{?\s*\\circ)|\\times|\\cdot|\\div)"
    r"|\\(?:binom|sum|prod)"
)
_IDLE: queue.SimpleQueue["_Process"] = queue.SimpleQueue()


def is_equal(answer: str, ground_truth: str, seconds: float) -> tuple[bool, str]:
    """Return whether a response's answer equals the ground truth, and what was read or went wrong.

    Args:
        answer: what stands in the last `\\boxed{..}` counts, or else the last formula or number.
        ground_truth: LaTeX or a number.
        seconds: until the answer is given up as wrong.

    Raises:
        ImportError: math-verify is not installed.
    """
    require()
    answer = answer[max(answer.rfind("\\boxed{"), 0) :]  # of several it would make a set
    try:
        process = _IDLE.get_nowait()
    except queue.Empty:
        process = _Process()
    found = process.ask(answer, ground_truth, seconds)
    if found is None:
        return False, f"no result within {seconds:g} s and {_MEMORY_BYTES >> 30} GB"
    _IDLE.put(process)
    equal, read = found
    based = _bases(ground_truth) <= _bases(answer)  # math-verify drops it
    return equal and based and is_worked_out(read, ground_truth), read


def is_worked_out(read: str, ground_truth: str) -> bool:
    r"""Return whether an equal answer is a number, too, where the ground truth is one.

    math-verify pays 5! and 1 + 1 + 1. Here what is left to add, multiply or raise to a power is no
    number: 2^{10} is not paid for 1024. Fractions, roots, units and 1.08 \times 10^3 are, and an
    equation with a number on one side.
    """
    if not _NUMBER.fullmatch(_BASE_TEN.sub("", ground_truth).strip(" $")):
        return True
    plain = _TEXT.sub(" ", _BASE_TEN.sub("", _POWER_OF_TEN.sub(" 0", read)))
    sides = [side.strip(" $") for side in re.split(r"=|\\approx", plain)]
    numbers = [side for side in sides if re.search(r"\d", side) and not _NAME.fullmatch(side)]
    return any(not _LEFT_TO_DO.search(number) for number in numbers)


def _bases(text: str) -> set[str]:
    """Return the bases that a text names; ten is the one of a number that names none."""
    return set(_BASE.findall(text)) - {"10"}


@functools.cache
def require() -> None:
    """Raise an ImportError where math-verify is not installed, or processes have no alarm."""
    if not hasattr(signal, "setitimer"):
        raise ImportError(
            "the environment 'math' needs Linux or macOS, for its time limit; "
            f"this is {sys.platform}"
        )
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("the environment 'math' needs a package: pip install 'jaxrl[envs]'")


class _Process:
    """Run a program that compares, one question after the other; it ends with its stdin."""

    def __init__(self) -> None:
        from jaxrl.child_environment import child_environment  # the program finds it later

        self.process = subprocess.Popen(
            [sys.executable, "-I", "-B", __file__, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
            start_new_session=True,  # control-C is the trainer's
        )

    def ask(self, answer: str, ground_truth: str, seconds: float) -> tuple[bool, str] | None:
        """Return the verdict and what was read; None if the process died over the question.

        It dies of its alarm, or for memory.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        question = {"answer": answer, "ground_truth": ground_truth, "seconds": seconds}
        try:
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            self.process.kill()
            self.process.communicate()
            return None
        equal, read = json.loads(line)
        return equal, read


def main() -> None:
    """Answers every line of stdin with a line on stdout."""
    import resource

    sys.path[:] = sys.argv[1:]
    from math_verify import parse, verify

    logging.disable(logging.WARNING)  # they advise a time limit; ours is the alarm
    if sys.platform == "linux":  # macOS takes no such limit
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may be printed there
    for line in sys.stdin.buffer:
        question = json.loads(line)
        # Nobody catches it, so it ends the process, wherever it is and whoever is still waiting.
        signal.setitimer(signal.ITIMER_REAL, question["seconds"])
        gold = parse(f"\\boxed{{{question['ground_truth']}}}", parsing_timeout=None)  # type: ignore[arg-type]
        answer = parse(question["answer"], parsing_timeout=None)  # type: ignore[arg-type]
        equal = bool(gold and answer) and verify(gold, answer, timeout_seconds=None)
        verdict = [bool(equal), str(answer[-1]) if answer else ""]
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps(verdict) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
