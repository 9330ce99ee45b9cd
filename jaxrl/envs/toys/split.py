"""Training and evaluation prompts that never meet, whatever their sizes and seeds."""

import zlib
from collections.abc import Callable

SPLITS = ("train", "eval")
_EVAL_SHARE = 10  # one in ten
_MAX_DRAWS_PER_TEXT = 100


def in_split(text: str, split: str | None) -> bool:
    """Return whether a prompt belongs to a split: a tenth of all texts, by checksum, is "eval".

    Another seed alone gives no such promise: small families of tasks repeat themselves (there are
    200 sums and differences of two digits).

    Args:
        text: the prompt.
        split: "train", "eval", or None for everything.
    """
    if split is None:
        return True
    if split not in SPLITS:
        raise ValueError(f"split must be 'train', 'eval' or None, got {split!r}")
    is_eval = zlib.crc32(text.encode()) % _EVAL_SHARE == 0
    return is_eval == (split == "eval")


def draw_distinct(draw: Callable[[], str], size: int, split: str | None, what: str) -> list[str]:
    """Draws distinct texts of a split, in the order in which they are first drawn.

    Args:
        draw: a random text.
        size: how many.
        split: see `in_split`.
        what: the texts are, named in the error.

    Raises:
        ValueError: size is not positive, or 100 draws per text do not find so many.
    """
    if size < 1:
        raise ValueError(f"size={size} must be at least 1")
    found: dict[str, None] = {}
    for _ in range(size * _MAX_DRAWS_PER_TEXT):
        text = draw()
        if in_split(text, split):
            found[text] = None
        if len(found) == size:
            return list(found)
    raise ValueError(
        f"found only {len(found)} {what} in split {split!r}, size={size} were asked for; make size "
        "smaller or the texts more varied"
    )
