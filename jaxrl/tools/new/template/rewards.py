"""Reward the responses of my_project."""

from typing import Any


def backwards(action: str, extras: dict[str, Any]) -> float:
    """Judge one response.

    Args:
        action: its text.
        extras: the other columns of its row in prompts.jsonl.
    """
    right = sum(a == b for a, b in zip(action, extras["answer"], strict=False))
    return right / 4 + (action == extras["answer"]) / 2
