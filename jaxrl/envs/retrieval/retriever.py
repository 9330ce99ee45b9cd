"""Searching a corpus: behind a server, or by BM25 in this process."""

import functools
import logging
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxrl.envs.json_request import ask, bearer
from jaxrl.envs.retrieval.passages import Passage, read_passages

_log = logging.getLogger(__name__)
ATTEMPTS = 5
_building = threading.Lock()


class Hit(NamedTuple):
    """Hold what a search found."""

    passage: Passage
    score: float


class Retriever(Protocol):
    """Find passages for a query."""

    def search(self, query: str, topk: int) -> list[Hit]:
        """Return at most `topk` passages, best first."""
        ...


class RemoteRetriever:
    """Ask a server with the protocol of SkyRL's and Search-R1's retrievers.

    `{"query": q, "topk": k, "return_scores": true}` is answered by `{"result": [[{"document":
    {"contents": ..}, "score": ..}, ..]]}`. The query is sent under both names that servers take it
    by: SkyRL's `query`, and the list `queries` of Search-R1 (Jin et al. 2025, arXiv:2503.09516).

    Args:
        url: where it is asked.
        timeout: seconds of each of 5 attempts.
        log_requests: log every query and how many passages came.
        headers: of its requests.
    """

    def __init__(
        self,
        url: str,
        timeout: float = 30.0,
        log_requests: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url, self.timeout, self.log_requests = url, timeout, log_requests
        self._headers = headers

    def search(self, query: str, topk: int) -> list[Hit]:
        """Return at most `topk` passages, best first.

        Raises:
            RequestError: the server gives no answer that can be used.
        """
        question = {"query": query, "queries": [query], "topk": topk, "return_scores": True}
        hits, attempt = ask(
            self.url,
            question,
            _read_hits,
            timeout=self.timeout,
            attempts=ATTEMPTS,
            headers=self._headers,
        )
        if self.log_requests:
            # A warning, because that is what Python shows where logging is not configured.
            _log.warning("%s: %d hits for %r, attempt %d", self.url, len(hits), query, attempt)
        return hits[:topk]


class LocalRetriever:
    """Ranks passages that lie in memory by BM25; any number of threads may search at a time.

    By bm25s (Lu 2024, arXiv:2407.03618), with its English stop words and no stemming: k1 = 1.5,
    b = 0.75, Lucene's variant. Equal scores keep the order of the corpus.

    Raises:
        ImportError: bm25s is not installed.
    """

    def __init__(self, passages: list[Passage]) -> None:
        try:
            import bm25s
        except ImportError as error:
            raise ImportError(
                "environment.skyrl_gym.search.corpus needs a package: pip install 'jaxrl[envs]'"
            ) from error
        self.passages, self._bm25s = passages, bm25s
        self._index = bm25s.BM25()
        tokens = self._tokenize([passage.contents for passage in passages])
        if not any(tokens):
            raise ValueError(f"{len(passages)} passages hold no word that could be searched for")
        self._index.index(tokens, show_progress=False)

    def search(self, query: str, topk: int) -> list[Hit]:
        """Return at most `topk` passages that share a word with the query, best first."""
        (tokens,) = self._tokenize([query])
        if not tokens:
            return []
        scores = self._index.get_scores(tokens)
        topk = min(topk, len(scores))
        lowest = np.partition(scores, -topk)[-topk]
        found = np.flatnonzero((scores >= lowest) & (scores > 0))
        best = found[np.argsort(-scores[found], kind="stable")][:topk]
        return [Hit(self.passages[i], float(scores[i])) for i in best]

    def _tokenize(self, texts: list[str]) -> list[list[str]]:
        found: Any = self._bm25s.tokenize(texts, return_ids=False, show_progress=False)
        return found


def retriever_of(settings: Mapping[str, Any]) -> Retriever:
    """Make the retriever of `environment.skyrl_gym.search`.

    Raises:
        ValueError: the corpus is not there, or not what it should be; there is no key.
        ImportError: it needs a package that is not installed.
    """
    corpus = settings.get("corpus")
    if corpus is not None:
        with _building:  # conversations that start together wait for one index
            return local_retriever(corpus)
    url = settings.get("search_url", "http://127.0.0.1:8000/retrieve")
    variable = settings.get("api_key_env")
    headers = bearer(variable) if variable else {}
    if variable and not headers:
        raise ValueError(
            f"environment.skyrl_gym.search.api_key_env={variable!r}: the environment has no such "
            "variable, or an empty one; set it to the retriever's token"
        )
    return RemoteRetriever(
        url, settings.get("timeout", 30), settings.get("log_requests", False), headers
    )


@functools.cache
def local_retriever(corpus: str) -> LocalRetriever:
    """Return the index of a corpus, made once in a process."""
    return LocalRetriever(read_passages(corpus))


def _read_hits(answer: Any) -> list[Hit]:
    """Read the hits of the first query. Without scores the document stands alone."""
    hits = []
    for item in answer["result"][0] if answer["result"] else []:
        document = item.get("document", item)
        contents = document["contents"]
        if not isinstance(contents, str):
            raise TypeError(f"contents are {contents!r}")
        passage = Passage(str(document.get("id", "")), contents)
        hits.append(Hit(passage, float(item.get("score", 0.0))))
    return hits
