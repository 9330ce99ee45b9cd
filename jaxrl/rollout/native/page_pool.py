"""Track who refers to each page of the cache and what the page holds, as the host knows it."""

import hashlib
from collections import OrderedDict

import numpy as np

ROOT = b""  # the key of nothing


def page_key(before: bytes, tokens: np.ndarray) -> bytes:
    """Return the key of the tokens of a page, or of a part of it.

    Args:
        before: the key of the page before it; `ROOT` for the first.
    """
    return hashlib.blake2b(before + tokens.tobytes(), digest_size=16).digest()


class PagePool:
    """Count the references to each page of a part.

    A page may have a name, the key of its tokens and of all before them: then others find it, also
    when nobody refers to it any more, until its place is needed; the one that was let go first goes
    first. A name may be of its first positions alone, the tail of a prompt: then who finds it
    copies it, since what follows them is its owner's to write.
    """

    def __init__(self) -> None:
        self.references: list[int] = []
        self._free: list[int] = []  # without reference and name
        self._idle: OrderedDict[int, None] = OrderedDict()  # without reference, with a name
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._tails: set[int] = set()

    def grow(self, pages: int) -> None:
        """Make room for `pages` pages in all; those that are there stay."""
        new = range(len(self.references), pages)
        self.references += [0] * len(new)
        self._free = [*reversed(new), *self._free]

    @property
    def available(self) -> int:
        """Return how many pages `take` can give."""
        return len(self._free) + len(self._idle)

    def take(self) -> int | None:
        """Return a page that nobody refers to, with a reference; None if there is none."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page = self._idle.popitem(last=False)[0]
            self.unname(page)
        else:
            return None
        self.references[page] = 1
        return page

    def refer(self, page: int) -> None:
        """Add a reference to a page that was found."""
        self.references[page] += 1
        self._idle.pop(page, None)

    def release(self, page: int) -> None:
        """Take a reference away."""
        self.references[page] -= 1
        if self.references[page]:
            return
        if page in self._key_of:
            self._idle[page] = None
        else:
            self._free.append(page)

    def find(self, key: bytes) -> int | None:
        """Return the page of that name."""
        return self._page_of.get(key)

    def name(self, page: int, key: bytes, *, tail: bool = False) -> None:
        """Give a page a name, unless another has it."""
        if key in self._page_of:
            return
        self.unname(page)
        self._page_of[key], self._key_of[page] = page, key
        if tail:
            self._tails.add(page)

    def unname(self, page: int) -> None:
        """Take a page's name away."""
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]
        self._tails.discard(page)

    def is_whole(self, page: int) -> bool:
        """Return whether a page has a name of all its positions, which nobody may write over."""
        return page in self._key_of and page not in self._tails

    def forget(self) -> None:
        """Take all names away."""
        self._free += reversed(self._idle)
        self._idle.clear()
        self._page_of.clear()
        self._key_of.clear()
        self._tails.clear()
