"""Multiplying two numbers: the environment of SkyRL's tutorial, in several attempts."""

import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl.envs.protocol import Env, StepOutput, read_ground_truth
from jaxrl.envs.toys.split import draw_distinct

_MAX_TURNS = 5
_BOXED = re.compile(r"\\boxed\{([^}]+)\}")


class MultiplyEnv(Env):
    r"""Gives reward 1 for the right number in `\boxed{..}`, 0.5 for a wrong one in the last try.

    A wrong attempt before the last earns nothing. The conversation ends with the right number, or
    after `max_turns` attempts: a column of the row, or else `generator.max_turns`.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(env_config, extras)
        self.ground_truth = read_ground_truth(self.extras, "multiply").strip()
        self.max_turns = int(self.extras.get("max_turns", _MAX_TURNS))
        self._correct = 0.0

    def step(self, action: str) -> StepOutput:
        """Compare the first number in a box."""
        self.turns += 1
        match = _BOXED.search(action)
        answer = match[1] if match else None
        self._correct = float(answer is not None and answer.strip() == self.ground_truth)
        done = bool(self._correct) or self.turns >= self.max_turns
        reward = self._correct or 0.5 * (done and answer is not None)
        observations = [] if done else [{"role": "user", "content": _hint(answer)}]
        metadata = {"parsed_answer": answer}
        return StepOutput(observations=observations, reward=reward, done=done, metadata=metadata)

    def get_metrics(self) -> dict[str, Any]:
        """Return `correct`: 1 if the number was found; `attempts`: how many there were."""
        return {"correct": self._correct, "attempts": self.turns}


def _hint(answer: str | None) -> str:
    if answer is None:
        return r"Write your answer as \boxed{number}."
    return f"{answer} is wrong. Try again."


def prompts(
    size: int, seed: int = 0, digits: int = 2, split: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield rows with distinct products in random order.

    Args:
        size: number of rows.
        seed: which products are drawn, and their order.
        digits: of each factor, the first of which is not 0.
        split: "train" or "eval" draw from products that never meet; None draws from all.

    Raises:
        ValueError: there are too few products of so few digits.
    """
    if digits < 1:
        raise ValueError(f"digits={digits} must be at least 1")
    rng, low, high = random.Random(seed), 10 ** (digits - 1), 10**digits
    texts = draw_distinct(
        lambda: f"{rng.randrange(low, high)} * {rng.randrange(low, high)}",
        size,
        split,
        f"products of {digits} digits",
    )
    for text in texts:
        a, b = map(int, text.split(" * "))
        yield {
            "prompt": [
                {"role": "system", "content": r"Multiply. Write the product as \boxed{number}."},
                {"role": "user", "content": text},
            ],
            "env_class": "multiply",
            "data_source": "multiply",
            "reward_spec": {"method": "rule", "ground_truth": str(a * b)},
        }
