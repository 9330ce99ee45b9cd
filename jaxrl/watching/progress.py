"""The progress bar of a run."""

import sys

from tqdm import tqdm


def progress_bar(name: str, total: int, finished: int, *, shown: bool = True) -> tqdm:
    """A bar over steps, on stderr; in a notebook on stdout, where the messages are.

    A notebook shows every change from one stream to the other as a new block of output, and in each
    block another bar.

    Args:
        finished: steps of earlier starts of the run.
    """
    notebook = type(sys.stdout).__module__.startswith("ipykernel.")
    file = sys.stdout if notebook else sys.stderr
    return tqdm(total=total, initial=finished, desc=name, disable=not shown, file=file)
