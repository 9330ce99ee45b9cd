"""Training and evaluation prompts that never meet, whatever their sizes and seeds."""

import zlib

SPLITS = ("train", "eval")
_EVAL_SHARE = 10  # one in ten


def in_split(text: str, split: str | None) -> bool:
    """Whether a prompt belongs to a split: a tenth of all texts, by their checksum, is "eval".

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
