r"""Rewards for length, format and repetition, beside that of any environment.

Plain functions for `environment.reward_functions`, which takes their parameters in the call:

    environment.reward_functions=["jaxrl.envs.shaping:tags(names=['think', 'answer'])"]
    environment.reward_weights={"environment": 1.0, "tags": 0.1}

Each judges one turn; its lengths are those of the turn, in tokens.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def linear_length(
    tokens: Sequence[str], *, max_length: int, free: int = 0, penalty: float = 1.0
) -> float:
    """Return what a turn loses for its length L: nothing up to `free`, all at `max_length` tokens.

        -penalty clip((L - free) / (max_length - free), 0, 1)

    The shape of DAPO's soft overlong punishment (Yu et al. 2025, https://arxiv.org/abs/2503.14476,
    eq. 13), which `trainer.algorithm.overlong_buffer` gives for whole responses.

    Raises:
        ValueError: not 0 <= free < max_length.
    """
    if not 0 <= free < max_length:
        raise ValueError(f"linear_length: free={free} must be in [0, max_length={max_length})")
    return -penalty * min(max((len(tokens) - free) / (max_length - free), 0.0), 1.0)


def cosine_length(
    tokens: Sequence[str],
    stopped: bool,
    done: bool,
    reward: Any,
    *,
    max_length: int,
    correct: tuple[float, float] = (1.0, 0.5),
    wrong: tuple[float, float] = (-1.0, -0.5),
    exceeded: float = -1.0,
) -> float:
    """Return the cosine reward of the last turn.

    It falls with length L where the turn is right, and rises where it is wrong:

        r_L + (r_0 - r_L) (1 + cos(pi L / max_length)) / 2

    with (r_0, r_L) = `correct` where the environment's reward of the turn is above 0, `wrong`
    where it is not, and `exceeded` for a response that is cut off at `max_length`. It contains the
    correctness: give the environment's own term the weight 0. Yeo et al. 2025,
    https://arxiv.org/abs/2502.03373 (sec. 4.2), whose own values are on another scale. A
    conversation that ends because the next turn would not fit has no last turn, and gets 0.

    Args:
        correct, wrong: rewards at length 0 and at `max_length`.

    Raises:
        ValueError: max_length < 1.
    """
    if max_length < 1:
        raise ValueError(f"cosine_length: max_length={max_length} must be at least 1")
    if not done:
        return 0.0
    if len(tokens) >= max_length and not stopped:
        return exceeded
    first, last = correct if _total(reward) > 0 else wrong
    share = min(len(tokens) / max_length, 1.0)
    return last + (first - last) * (1 + math.cos(math.pi * share)) / 2


def tags(action: str, done: bool, *, names: Sequence[str] = ("think", "answer")) -> float:
    """Return 1 if the last turn is `<a>..</a>` for each name, in order, and nothing beside them.

    The format reward of DeepSeek-AI 2025, https://arxiv.org/abs/2501.12948 (sec. 2.2.2). Blanks
    around the parts do not count; a tag that occurs a second time is wrong.

    Raises:
        ValueError: no names.
    """
    if not names or isinstance(names, str):
        raise ValueError(f"tags: names={names!r} must be a list of names")
    parts = (rf"<{re.escape(name)}>.*?</{re.escape(name)}>" for name in names)
    whole = r"\s*".join(["", *parts, ""])
    once = all(action.count(f"{tag}{name}>") == 1 for name in names for tag in ("<", "</"))
    return float(done and once and re.fullmatch(whole, action, re.DOTALL) is not None)


def matches(action: str, *, pattern: str) -> float:
    r"""Return 1 if the whole turn matches a regular expression, in which `.` is also a line break.

    Example: `matches(pattern='.*#### -?[0-9]+')`. A pattern that takes long on some text (as
    `(a+)+b`) holds up the whole run: no time limit ends it.

    Raises:
        ValueError: it is not a regular expression.
    """
    try:
        return float(re.fullmatch(pattern, action, re.DOTALL) is not None)
    except re.error as error:
        raise ValueError(f"matches: pattern={pattern!r} is not a regular expression") from error


def repetition(tokens: Sequence[str], *, ngram: int = 20, penalty: float = 1.0) -> float:
    """Return what a turn loses for repeating itself: the share of n-grams that occurred before.

        -penalty (1 - distinct n-grams / n-grams)

    Bounded by `penalty`, whatever the length. A turn of fewer than `ngram` tokens loses nothing.

    Raises:
        ValueError: ngram < 1.
    """
    grams = _grams("repetition", tokens, ngram)
    return -penalty * (1 - len(set(grams)) / len(grams)) if grams else 0.0


def token_repetition(
    tokens: Sequence[str], *, ngram: int = 40, penalty: float = 0.05
) -> list[float]:
    """Return -penalty on every token of an n-gram that occurred before in the turn, 0 on others.

    Yeo et al. 2025, https://arxiv.org/abs/2502.03373 (sec. 4.4). Its sum grows with the length: for
    estimators that keep rewards at their tokens (gae); with one advantage for a whole response take
    `repetition`.

    Raises:
        ValueError: ngram < 1.
    """
    rewards, seen = [0.0] * len(tokens), set()
    for start, gram in enumerate(_grams("token_repetition", tokens, ngram)):
        if gram in seen:
            rewards[start : start + ngram] = [-penalty] * ngram
        seen.add(gram)
    return rewards


def _grams(name: str, tokens: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """Return every `size` neighbouring tokens."""
    if size < 1:
        raise ValueError(f"{name}: ngram={size} must be at least 1")
    return [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]


def _total(reward: Any) -> float:
    """Sum the reward of a turn: a number, one per token, or these by name."""
    values = reward.values() if isinstance(reward, Mapping) else [reward]
    return float(sum(np.sum(value) for value in values))
