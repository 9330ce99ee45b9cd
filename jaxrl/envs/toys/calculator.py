"""A calculator as a tool: expressions in brackets, one operation at a time.

user       58-(37*24)
assistant  <calc>37*24</calc>       user  <result>888</result>
assistant  <calc>58-888</calc>      user  <result>-830</result>
assistant  <answer>-830</answer>
"""

import itertools
import operator
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl.envs.answers import same_answer
from jaxrl.envs.protocol import Env, StepOutput, read_ground_truth
from jaxrl.envs.tags import first_tagged
from jaxrl.envs.tools import ToolGroup, tool
from jaxrl.envs.toys.split import draw_distinct
from jaxrl.types import Message

_MAX_OPERATIONS = 4
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_OPERATION = r"(-?\d{1,12})([-+*])(-?\d{1,12})"
_IN_BRACKETS = re.compile(rf"\({_OPERATION}\)")


class CalculatorToolGroup(ToolGroup):
    """Offer the tool `calc`: one operation on two whole numbers."""

    def __init__(self) -> None:
        super().__init__("calculator")

    @tool
    def calc(self, operation: str) -> str:
        """Return the result of "12*34", or "error" for all but two numbers and + - or *."""
        match = re.fullmatch(_OPERATION, operation.replace(" ", ""))
        if match is None:
            return "error"
        return str(_OPERATORS[match[2]](int(match[1]), int(match[3])))


class CalculatorEnv(Env):
    """Give reward 1 in the turn that ends with the right `<answer>..</answer>`, 0 otherwise.

    `<calc>..</calc>` is one operation on two whole numbers; the next message is its
    `<result>..</result>`. A response that neither calls the calculator as it wants it nor answers
    is malformed: its result is "error". What a response says after `</calc>` is cut: it would be
    made up. The conversation ends with an answer, or after `max_turns` turns (a column of the row,
    or `generator.max_turns`).
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(env_config, extras)
        self.ground_truth = read_ground_truth(self.extras, "calculator")
        self.init_tool_groups([CalculatorToolGroup()])
        self._metrics = {"correct": 0.0, "answered": 0.0, "calls": 0, "malformed": 0}

    def step(self, action: str) -> StepOutput:
        """Calculate, or compare the answer."""
        self.turns += 1
        called = first_tagged(action, "calc", "answer")
        if called is not None and called.tag == "answer":
            correct = float(same_answer(called.content, self.ground_truth))
            self._metrics |= {"correct": correct, "answered": 1.0}
            return StepOutput(observations=[], reward=correct, done=True, metadata={})
        result = "error"
        if called is not None:
            self._metrics["calls"] += 1
            result = self._execute_tool(self.tool_to_toolgroup["calc"], "calc", [called.content])
        self._metrics["malformed"] += result == "error"
        done = self.turns >= self.max_turns
        output = StepOutput(observations=[], reward=0.0, done=done, metadata={"result": result})
        if not done:
            output["observations"] = [_said(result)]
            output["postprocessed_action"] = action[: called.end] if called else action
        return output

    def get_metrics(self) -> dict[str, Any]:
        """Return `correct`, `answered`; `calls` of the calculator, and `malformed` turns."""
        return self._metrics


def prompts(
    size: int,
    seed: int = 0,
    operations: int = 2,
    split: str | None = None,
    in_head: float = 0.0,
) -> Iterator[dict[str, Any]]:
    """Yield rows with distinct expressions, for `jaxrl.train` and, by `completion`, `jaxrl.sft`.

    The completion is a whole conversation that ends with the right answer: calls from the
    innermost brackets outward, and the results.

    Args:
        size: number of rows.
        seed: which expressions are drawn, and their order.
        operations: in an expression, on numbers from 2 to 99; each but the last in brackets.
        split: "train" or "eval" draw from expressions that never meet; None draws from all.
        in_head: chance that a completion, in place of its next call, gives the answer as somebody
            does who needs no calculator.

    Raises:
        ValueError: there are too few expressions, operations is not 1 to 4, or in_head not 0 to 1.
    """
    if not 1 <= operations <= _MAX_OPERATIONS or not 0 <= in_head <= 1:
        raise ValueError(
            f"operations={operations} must be from 1 to {_MAX_OPERATIONS}, in_head={in_head} from "
            "0 to 1"
        )
    rng = random.Random(seed)
    what = f"expressions of {operations} operations"
    for text in draw_distinct(lambda: _expression(rng, operations), size, split, what):
        calls, answer = _calculate(text)
        num_calls = next((n for n in range(len(calls)) if rng.random() < in_head), len(calls))
        yield {
            "prompt": [{"role": "user", "content": text}],
            "completion": [
                *itertools.chain(*calls[:num_calls]),
                _says(f"<answer>{answer}</answer>"),
            ],
            "env_class": "calculator",
            "data_source": "calculator",
            "reward_spec": {"method": "rule", "ground_truth": answer},
        }


def _expression(rng: random.Random, operations: int) -> str:
    if operations == 0:
        return str(rng.randint(2, 99))
    left = rng.randrange(operations)
    sides = [_expression(rng, count) for count in (left, operations - 1 - left)]
    a, b = (side if side.isdigit() else f"({side})" for side in sides)
    return f"{a}{rng.choice('+-*')}{b}"


def _calculate(text: str) -> tuple[list[tuple[Message, Message]], str]:
    """Return the calls that an expression needs, with their results, and the value."""
    calls: list[tuple[Message, Message]] = []
    calculator = CalculatorToolGroup()
    while found := _IN_BRACKETS.search(text) or re.fullmatch(_OPERATION, text):
        operation = found[0].strip("()")
        result = calculator.calc(operation)
        calls.append((_says(f"<calc>{operation}</calc>"), _said(result)))
        text = text.replace(found[0], result, 1)
    return calls, text


def _says(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _said(result: str) -> Message:
    return {"role": "user", "content": f"<result>{result}</result>"}
