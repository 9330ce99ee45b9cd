"""Guess a number: a conversation of several turns, with "higher" or "lower" in between."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl.envs.answers import last_number
from jaxrl.envs.protocol import Env, StepOutput, read_ground_truth


class GuessNumberEnv(Env):
    """Give reward 1 for the right number, 0 for every other guess.

    The conversation ends with the right number, or after `max_turns` guesses: a column of the row,
    or else `generator.max_turns`. The guess is the last number of a response.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(env_config, extras)
        self.number = int(read_ground_truth(self.extras, "guess_number"))
        self._right = 0.0

    def step(self, action: str) -> StepOutput:
        """Compare a guess with the number."""
        self.turns += 1
        guess = last_number(action)
        self._right = float(guess is not None and float(guess) == self.number)
        done = bool(self._right) or self.turns >= self.max_turns
        observations = [] if done else [{"role": "user", "content": self._hint(guess)}]
        metadata = {"guess": guess, "number": self.number}
        return StepOutput(
            observations=observations, reward=self._right, done=done, metadata=metadata
        )

    def get_metrics(self) -> dict[str, Any]:
        """Return `right`: 1 if the number was found; `guesses`: how many there were."""
        return {"right": self._right, "guesses": self.turns}

    def _hint(self, guess: str | None) -> str:
        if guess is None:
            return "a number?"
        return "lower" if float(guess) > self.number else "higher"


def prompts(size: int, seed: int = 0, highest: int = 9) -> Iterator[dict[str, Any]]:
    """Yield rows that all ask the same; each has a number of its own from 0 to `highest` in mind.

    Args:
        size: number of rows.
        seed: of the numbers.
        highest: largest number.
    """
    rng = random.Random(seed)
    for _ in range(size):
        yield {
            "prompt": [{"role": "user", "content": f"guess 0 to {highest}"}],
            "env_class": "guess_number",
            "data_source": "guess_number",
            "reward_spec": {"method": "rule", "ground_truth": str(rng.randint(0, highest))},
        }
