"""Adding two numbers: "27+45" wants "72". Small enough for a character-level model."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from jaxrl.envs.protocol import Env, StepOutput, read_ground_truth
from jaxrl.envs.toys.split import in_split

_MAX_DIGITS = 3


class AdditionEnv(Env):
    """Give reward 1 if the response is the sum and nothing else, 0 otherwise."""

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(env_config, extras)
        self.answer = read_ground_truth(self.extras, "addition")

    def step(self, action: str) -> StepOutput:
        """Compare the response with the sum."""
        self.turns += 1
        reward = float(action == self.answer)
        metadata = {"ground_truth": self.answer}
        return StepOutput(observations=[], reward=reward, done=True, metadata=metadata)


def prompts(
    size: int, seed: int = 0, digits: int = 2, split: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield rows with distinct sums in random order.

    They are for `jaxrl.train` and, by `completion`, `jaxrl.sft`.

    Args:
        size: number of rows.
        seed: which sums are drawn, and their order.
        digits: of each number, the first of which is not 0.
        split: "train" or "eval" draw from sums that never meet; None draws from all.

    Raises:
        ValueError: there are fewer than `size` sums in the split, or digits is not 1, 2 or 3.
    """
    if not 1 <= digits <= _MAX_DIGITS or size < 1:
        raise ValueError(f"digits={digits} must be 1, 2 or 3, and size={size} at least 1")
    low, high = 10 ** (digits - 1), 10**digits
    numbers = np.random.default_rng(seed).permutation((high - low) ** 2)
    pairs = (divmod(int(number), high - low) for number in numbers)
    texts = (f"{low + a}+{low + b}" for a, b in pairs)
    found = list(islice((text for text in texts if in_split(text, split)), size))
    if len(found) < size:
        raise ValueError(
            f"there are only {len(found)} sums of {digits} digits in split {split!r}, size={size} "
            "were asked for; make size smaller"
        )
    for text in found:
        answer = str(sum(map(int, text.split("+"))))
        yield {
            "prompt": [{"role": "user", "content": text}],
            "completion": [{"role": "assistant", "content": answer}],
            "env_class": "addition",
            "data_source": "addition",
            "reward_spec": {"method": "rule", "ground_truth": answer},
        }
