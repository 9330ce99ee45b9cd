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
import signal
import subprocess
import sys

_MEMORY_BYTES = 2 << 30
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
    return found


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
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-B", __file__, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
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
