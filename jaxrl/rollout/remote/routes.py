"""Which server holds the beginning of a conversation."""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np

from jaxrl.rollout.remote.http_client import RemoteServer

REMEMBERED = 20_000


class ConversationRoutes:
    """Remember prompts that were served, and by whom; the oldest are forgotten.

    A later turn of a conversation begins with the whole prompt of an earlier one. A shared system
    prompt alone is no earlier prompt, so new conversations are not drawn to one server.

    Args:
        remembered: prompts, at most.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self.remembered = remembered
        self._served: OrderedDict[tuple[int, bytes], RemoteServer] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def find(self, prompt: Sequence[int]) -> RemoteServer | None:
        """Return the server that served the longest beginning of the prompt, or None."""
        found = (self._served.get(key) for key in self._beginnings(prompt))
        return next((server for server in reversed(list(found)) if server is not None), None)

    def add(self, prompt: Sequence[int], server: RemoteServer) -> None:
        """Remember which server serves a prompt."""
        self._lengths[len(prompt)] += 1
        (*_, key) = self._beginnings(prompt)
        if key in self._served:
            self._lengths[len(prompt)] -= 1
            del self._served[key]  # the newest stand last
        self._served[key] = server
        while len(self._served) > self.remembered:
            (length, _), _ = self._served.popitem(last=False)
            self._lengths[length] -= 1
            self._lengths += Counter()  # drops zeros

    def _beginnings(self, prompt: Sequence[int]) -> list[tuple[int, bytes]]:
        """Return keys of the prompt's beginnings that have the length of something remembered."""
        data, keys = np.asarray(prompt, np.int64), []
        digest, start = hashlib.blake2b(digest_size=16), 0
        for length in sorted(n for n, count in self._lengths.items() if 0 < n <= len(prompt)):
            digest.update(data[start:length].tobytes())
            keys.append((length, digest.copy().digest()))
            start = length
        return keys
