"""How `grpo_step.py` and the process of one system talk. Only the standard library is imported.

Every system runs in a process of its own, under its own Python. The parent writes the name of a
workload ("full" or "skewed") on a line, the process does one GRPO step and answers with the
seconds of its phases as JSON. Between two steps it sleeps, so systems can be timed in turns.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MARK = "@@ "  # answers start with it; whatever else a library prints is ignored


@dataclass(frozen=True)
class Workload:
    """One GRPO step, the same for every system."""

    folder: str  # config.json, tokenizer, prompts.jsonl
    prompts: int  # per step
    samples: int  # per prompt
    prompt_length: int  # tokens
    max_tokens: int  # of a response
    lengths: dict[str, list[int]]  # workload -> response tokens of each sample
    kl_coef: float
    learning_rate: float
    bf16: bool
    micro_batch_rows: int

    @classmethod
    def from_argv(cls) -> "Workload":
        """The workload that the parent gave as the only argument."""
        return cls(**json.loads(sys.argv[1]))

    def read_prompts(self) -> list[str]:
        """The texts of prompts.jsonl: `prompt_length` characters, one token each."""
        with open(os.path.join(self.folder, "prompts.jsonl"), encoding="utf-8") as lines:
            return [json.loads(line)["text"] for line in lines]


@dataclass(frozen=True)
class TrainWork:
    """Updates on given trajectories, the same for every system of `train_step.py`."""

    model: dict[str, Any]  # config.json
    lengths: dict[str, list[int]]  # case -> tokens of each trajectory
    max_tokens: int  # rows x tokens of a microbatch
    bf16: bool
    recompute: bool  # activations of the layers in the backward pass
    learning_rate: float
    answer: int | None = None  # tokens at the end of each row that are sampled; None = all but one


def reward(response: str) -> float:
    """Share of characters with an even code point: costs nothing, differs between samples."""
    return sum(ord(c) % 2 == 0 for c in response) / max(len(response), 1)


def wait_for_step() -> str:
    """Block until the parent asks for a step; returns the workload. The process ends with it."""
    line = sys.stdin.readline()
    if not line:
        os._exit(0)  # a framework's own loop is above us on the stack
    return line.strip()


def answer(message: dict[str, Any]) -> None:
    """Send one object to the parent."""
    print(MARK + json.dumps(message), flush=True)


class Clock:
    """Seconds by phase of the step in progress."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A step begins."""
        self.seconds: dict[str, float] = {}
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def total(self) -> dict[str, float]:
        """Seconds since `start`; "cpu" is the sum over the cores, and moves less with the load."""
        return {
            "total": time.perf_counter() - self._wall,
            "cpu": time.process_time() - self._cpu,
        }

    def timed(
        self, func: Callable[..., Any], phase: Callable[..., str], ready: Callable[..., Any]
    ) -> Callable[..., Any]:
        """`func`, its seconds added to `phase(*args, **kwargs)`; `ready` waits for its result."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = func(*args, **kwargs)
            ready(result)
            name = phase(*args, **kwargs)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            return result

        return call
