"""Countdown: reach a number with given numbers and + - * /, each used once."""

import ast
import random
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from jaxrl.envs.answers import tagged_answer
from jaxrl.envs.protocol import Env, StepOutput

_OPERATIONS = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}
_MAX_CHARACTERS = 500


class CountdownEnv(Env):
    """Give 1 for an equation that uses every number exactly once and gives the target, else 0.

    `reward_spec["ground_truth"]` is `{"target": 98, "numbers": [44, 19, 35]}`. The equation is the
    last `<answer>..</answer>`, or all that is said after `</think>`; "= 98" may follow. Fractions
    are exact.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(env_config, extras)
        truth = (self.extras.get("reward_spec") or {}).get("ground_truth")
        if not isinstance(truth, Mapping) or not {"target", "numbers"} <= truth.keys():
            raise ValueError(
                "environment 'countdown' needs reward_spec['ground_truth'] = {'target': 98, "
                f"'numbers': [44, 19, 35]}}, got {truth!r}"
            )
        self.target = int(truth["target"])
        self.numbers = sorted(int(number) for number in truth["numbers"])
        self._metrics: dict[str, Any] = {}

    def step(self, action: str) -> StepOutput:
        """Reward an equation of all numbers, each once, that gives the target: 1, else 0."""
        self.turns += 1
        found = evaluate(tagged_answer(action).partition("=")[0])
        allowed = found is not None and sorted(found[1]) == self.numbers
        correct = float(allowed and found is not None and found[0] == self.target)
        self._metrics = {"correct": correct, "allowed": float(allowed)}
        value = None if found is None else str(found[0])
        metadata = {"value": value, "allowed": allowed}
        return StepOutput(observations=[], reward=correct, done=True, metadata=metadata)

    def get_metrics(self) -> dict[str, Any]:
        """Return `correct`; `allowed`: it is an equation that uses every number exactly once."""
        return self._metrics


def evaluate(equation: str) -> tuple[Fraction, list[int]] | None:
    """Return the value of an equation of whole numbers and its numbers; None if it is none."""
    text = equation.replace("\u00d7", "*").replace("\u00f7", "/").replace("\u2212", "-").strip()
    if len(text) > _MAX_CHARACTERS:
        return None
    numbers: list[int] = []
    try:
        return _value(ast.parse(text, mode="eval").body, numbers), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.AST, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, numbers)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _value(node.left, numbers), _value(node.right, numbers)
        return _OPERATIONS[type(node.op)](left, right)
    raise ValueError(f"{type(node).__name__} has no place in an equation")


def prompts(
    size: int, seed: int = 0, count: int = 3, highest: int = 99
) -> Iterator[dict[str, Any]]:
    """Yield rows that can be solved, with a target from 1 to `highest`.

    Args:
        size: number of rows.
        seed: of the numbers.
        count: numbers per row, at least 2.
        highest: largest number and largest target.

    Raises:
        ValueError: fewer than two numbers, or none to choose from.
    """
    if size < 1 or count < 2 or highest < 2:
        raise ValueError(f"size={size} must be >= 1, count={count} and highest={highest} >= 2")
    rng, row = random.Random(seed), 0
    while row < size:
        numbers = [rng.randint(1, highest) for _ in range(count)]
        target = _reach(rng, numbers)
        if target.denominator != 1 or not 1 <= target <= highest:
            continue
        row += 1
        question = (
            f"Make {target} from the numbers {', '.join(map(str, numbers))} with + - * / and "
            "brackets. Use each number once. Write the equation in <answer>..</answer>."
        )
        truth = {"target": int(target), "numbers": numbers}
        yield {
            "prompt": [{"role": "user", "content": question}],
            "env_class": "countdown",
            "data_source": "countdown",
            "reward_spec": {"method": "rule", "ground_truth": truth},
        }


def _reach(rng: random.Random, numbers: list[int]) -> Fraction:
    """Return what some equation of the numbers gives; 0 where it divides by 0."""
    values = [Fraction(number) for number in numbers]
    while len(values) > 1:
        rng.shuffle(values)
        operation = rng.choice(list(_OPERATIONS.values()))
        right, left = values.pop(), values.pop()
        if operation is _OPERATIONS[ast.Div] and right == 0:
            return Fraction(0)
        values.append(operation(left, right))
    return values[0]
