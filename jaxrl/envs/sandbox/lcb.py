"""Programming problems with tests, as of LiveCodeBench: the program runs in a sandbox.

LiveCodeBench: Jain et al. 2024, https://arxiv.org/abs/2403.07974.
"""

import contextlib
import json
import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from jaxrl.envs.protocol import Env, StepOutput, read_ground_truth
from jaxrl.envs.sandbox import sandbox

_TEST_SECONDS = 6.0  # LiveCodeBench's limit
_CODE_BLOCK = re.compile(r"```(?:\w+)?\n(.*?)```", re.DOTALL)
# Names that answers use without importing them, since the editor of the contest knows them.
_NAMES = """
import bisect, collections, copy, datetime, functools, heapq, io, itertools, math, operator, os
import random, re, string, sys
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, defaultdict, deque
from copy import deepcopy
from functools import cache, cmp_to_key, lru_cache, partial, reduce
from heapq import heapify, heappop, heappush, heapreplace, merge, nlargest, nsmallest
from itertools import accumulate, chain, combinations, count, cycle, groupby, islice, pairwise
from itertools import permutations, product, repeat, zip_longest
from math import atan2, ceil, comb, factorial, floor, gcd, inf, isqrt, log, log2, log10, pi, prod
from math import sqrt
from operator import iand, itemgetter, or_, sub, xor
from os.path import commonprefix
from random import randrange, shuffle
from re import search as re_search
from string import ascii_lowercase, ascii_uppercase
from time import time
from typing import Any, Callable, Deque, Dict, Generator, Iterable, Iterator, List, Optional, Set
from typing import Tuple, Union
"""
# Slow to import, so only where they are used.
_SLOW_NAMES = {r"\bnp\.": "import numpy as np", r"\bpd\.": "import pandas as pd"}
_RUN = "exec(compile({code!r}, 'answer.py', 'exec'))"
_PROGRAM = f"""
try:
    {_RUN}
except SystemExit:
    pass
"""
_CALL = f"""
import json as _json, os as _os, sys as _sys
__name__ = "answer"
_arguments = [_json.loads(line) for line in _sys.stdin.read().split("\\n")]
{_RUN}
_found = getattr(Solution(), {{name!r}}) if "class Solution" in {{code!r}} else {{name}}
_text = _json.dumps(_found(*_arguments), default=lambda value: value.tolist())
_sys.stdout.flush()
_os.write(1, ("\\n" + _text).encode())
_os._exit(0)
"""


class LCBEnv(Env):
    """Give reward 1 if the last code block of the response passes every test, 0 otherwise.

    `reward_spec["ground_truth"]` is a JSON list of tests `{"input": "3\\n4", "output": "7",
    "testtype": "stdin"}`; or with `"testtype": "functional"` and `"metadata": {"func_name": "f"}`,
    where `input` has one argument as JSON per line, and `output` is JSON. The program never sees an
    expected output: only its own are compared, outside of the sandbox. Each test is a run of its
    own, with LiveCodeBench's 6 s or less (`env_config["sandbox"]`); the first that fails is the
    last.

    Raises:
        SandboxError: this machine cannot hold the code.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(env_config, extras)
        self.tests = _read_tests(read_ground_truth(self.extras, "lcb"))
        sandbox.require()
        settings = dict(self.env_config.get("sandbox", {}))
        settings["seconds"] = min(_TEST_SECONDS, settings.get("seconds", _TEST_SECONDS))
        self.limits = sandbox.Limits(**settings)
        self._metrics: dict[str, Any] = {}

    def step(self, action: str) -> StepOutput:
        """Run the tests, one after the other."""
        self.turns += 1
        blocks = _CODE_BLOCK.findall(action)
        code = blocks[-1].strip() if blocks else None
        num_passed, reason = (0, "no code") if code is None else self._count_passed(code)
        correct = float(num_passed == len(self.tests))
        self._metrics = {"correct": correct, "passed": num_passed / len(self.tests)}
        metadata = {"parsed_code": code, "reason": reason, "num_passed": num_passed}
        return StepOutput(observations=[], reward=correct, done=True, metadata=metadata)

    def get_metrics(self) -> dict[str, Any]:
        """Return `correct`, and `passed`: the share of tests before the first that failed."""
        return self._metrics

    def _count_passed(self, code: str) -> tuple[int, str]:
        """Count the tests before the first that fails, and say why that failed."""
        functional = self.tests[0].get("testtype") == "functional"
        name = self.tests[0]["metadata"]["func_name"] if functional else None
        program = _program(code, name)
        agree = _same_value if functional else _same_lines
        inputs = [test["input"] for test in self.tests]
        results = sandbox.run_each(program, inputs, self.limits)
        with contextlib.closing(results):
            for i, (test, result) in enumerate(zip(self.tests, results, strict=True)):
                if not result.ok:
                    return i, result.reason
                if not agree(result.stdout, test["output"]):
                    return i, "wrong answer"
        return len(self.tests), "ok"


def _read_tests(text: str) -> list[dict[str, Any]]:
    try:
        tests = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"environment 'lcb': reward_spec['ground_truth'] is not JSON: {error}"
        ) from error
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"environment 'lcb' needs a list of at least one test, got {text[:200]!r}")
    for test in tests:
        if not all(isinstance(test.get(key), str) for key in ("input", "output")):
            raise ValueError(f"environment 'lcb': a test needs texts input and output, got {test}")
    if tests[0].get("testtype") == "functional":
        metadata = tests[0].get("metadata")
        name = metadata.get("func_name") if isinstance(metadata, dict) else None
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(
                "environment 'lcb': functional tests need metadata['func_name'], the name of a "
                f"function, got {name!r}"
            )
    return tests


def _program(code: str, name: str | None) -> str:
    slow = [line for pattern, line in _SLOW_NAMES.items() if re.search(pattern, code)]
    frame = _PROGRAM.format(code=code) if name is None else _CALL.format(code=code, name=name)
    return "\n".join([_NAMES, *slow, frame])


def _same_value(printed: str, expected: str) -> bool:
    """Return whether the last line, the result of a function as JSON, is the expected value."""
    try:
        return json.loads(printed.rpartition("\n")[2]) == json.loads(expected)
    except (ValueError, RecursionError):
        return False


def _same_lines(printed: str, expected: str) -> bool:
    """Return whether lines agree without the blanks around: as text, or as decimal numbers."""
    lines, wanted = ([row.strip() for row in s.strip().split("\n")] for s in (printed, expected))
    if len(lines) != len(wanted):
        return False
    return all(
        line == right or _same_numbers(line, right)
        for line, right in zip(lines, wanted, strict=True)
    )


def _same_numbers(line: str, wanted: str) -> bool:
    try:
        return [Decimal(word) for word in line.split()] == [Decimal(w) for w in wanted.split()]
    except InvalidOperation:  # also raised by comparing a signalling NaN
        return False
