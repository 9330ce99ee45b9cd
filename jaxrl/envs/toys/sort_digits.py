"""Sorting digits: "3142" wants "1234". Learnable in seconds by a character-level model."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from jaxrl.envs.protocol import Env, StepOutput, read_ground_truth
from jaxrl.envs.toys.split import in_split

_MAX_ENUMERATED_LENGTH = 5


class SortDigitsEnv(Env):
    """Rewards every right digit, and stopping where the answer ends.

    With n digits in the answer, a character at position i < n earns 1 / (n + 1) if it is the right
    one, the end-of-sequence token directly after position n - 1 earns 1 / (n + 1), everything else
    earns 0. The sum over a response lies in [0, 1] and is 1 exactly if all is right.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(env_config, extras)
        self.answer = read_ground_truth(self.extras, "sort_digits")
        self._exact = 0.0

    def step(
        self, action: str, tokens: list[str] | None = None, stopped: bool = True
    ) -> StepOutput:
        """Rewards a response token by token.

        Args:
            action: the text of the response.
            tokens: the text of each of its tokens, with the end-of-sequence token if it stopped;
                without them the reward is one number.
            stopped: whether the response ended with an end-of-sequence token.
        """
        self.turns += 1
        if tokens is None:
            spoken = list(action)
        else:
            spoken = tokens[:-1] if stopped else tokens
        rewards = self._rewards(spoken, stopped)
        # The sum of n + 1 rounded shares may miss 1 by a rounding error.
        share = 1 / (len(self.answer) + 1)
        self._exact = float(sum(rewards) > 1 - share / 2)
        return StepOutput(
            observations=[],
            reward=sum(rewards) if tokens is None else rewards,
            done=True,
            metadata={"exact": self._exact, "ground_truth": self.answer},
        )

    def _rewards(self, spoken: list[str], stopped: bool) -> list[float]:
        share = 1 / (len(self.answer) + 1)
        rewards, position = [], 0
        for token in spoken:
            # A token may hold several characters when the tokenizer is not a character tokenizer.
            wanted = self.answer[position : position + len(token)]
            rewards.append(share * sum(a == b for a, b in zip(token, wanted, strict=False)))
            position += len(token)
        return rewards + [share * (position == len(self.answer))] * stopped

    def get_metrics(self) -> dict[str, Any]:
        """Return `exact`: 1 if the response is the answer and stops there, 0 otherwise."""
        return {"exact": self._exact}


def prompts(
    size: int, seed: int = 0, length: int = 4, split: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield rows with distinct digit strings in random order.

    Args:
        size: number of rows.
        seed: which strings are drawn, and their order.
        length: digits per string.
        split: "train" or "eval" draw from strings that never meet; None draws from all.

    Raises:
        ValueError: there are fewer than `size` strings of that length in the split.
    """
    if size < 1 or length < 1:
        raise ValueError(f"size and length must be at least 1, got size={size}, length={length}")
    if length > _MAX_ENUMERATED_LENGTH and size > 10**length // 20:
        # Random strings are drawn until enough new ones are found, which takes ever longer.
        raise ValueError(
            f"size={size} is too large for strings of {length} digits; at most {10**length // 20}"
        )
    texts = (text for text in _digit_strings(length, seed) if in_split(text, split))
    found = list(islice(texts, size))
    if len(found) < size:
        raise ValueError(
            f"there are only {len(found)} strings of {length} digits in split {split!r}, "
            f"size={size} were asked for; make length larger or size smaller"
        )
    for text in found:
        yield {
            "prompt": [{"role": "user", "content": text}],
            "env_class": "sort_digits",
            "data_source": "sort_digits",
            "reward_spec": {"method": "rule", "ground_truth": "".join(sorted(text))},
        }


def _digit_strings(length: int, seed: int) -> Iterator[str]:
    """Yield distinct strings: all of them when they are few, otherwise without end."""
    rng = np.random.default_rng(seed)
    if length <= _MAX_ENUMERATED_LENGTH:
        for number in rng.permutation(10**length):
            yield f"{number:0{length}d}"
        return
    seen = set()
    while True:
        text = "".join(map(str, rng.integers(0, 10, size=length)))
        if text not in seen:
            seen.add(text)
            yield text
