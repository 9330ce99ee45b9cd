"""Serve a corpus to the environment search, over HTTP, by BM25.

    python -m jaxrl.envs.retrieval.retriever_server --corpus data/wiki.jsonl --port 8000

    --corpus  folder, .parquet or .jsonl file
    --host    default 127.0.0.1
    --port    default 8000; 0 takes a free one
    --topk    hits, where a query does not say; default 3

For a corpus that is too large to lie in the memory of every process with environments. The protocol
is that of SkyRL's and Search-R1's retrievers: POST /retrieve with {"query": text} or {"queries":
[text, ..]}, and perhaps "topk" and "return_scores".
"""

from jaxrl import cli

if __name__ == "__main__":
    cli.answer_early(__doc__)

import contextlib
import json
import os
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from jaxrl.envs.retrieval.passages import read_passages
from jaxrl.envs.retrieval.retriever import Hit, LocalRetriever, Retriever

_MAX_BYTES = 256 * 1024  # of a question
_MAX_TOPK = 1000
_MAX_HITS = 4096  # of all queries of a question
_MAX_CHARACTERS = 4 * 1024**2  # of the passages in an answer
_MAX_ANSWERS = 8  # that are in memory at a time
_TIMEOUT = 60.0  # seconds without a byte of a question, after which its connection is closed


def make_server(retriever: Retriever, host: str, port: int, topk: int = 3) -> ThreadingHTTPServer:
    """Make a server that answers from its `serve_forever` on.

    Args:
        retriever: what is asked.
        host, port: where it listens; port 0 takes a free one.
        topk: hits of a query that does not say how many.
    """

    places = threading.Semaphore(_MAX_ANSWERS)

    class Handler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT

        def do_POST(self) -> None:
            try:
                size = int(self.headers.get("Content-Length", 0))
                if not 0 <= size <= _MAX_BYTES:
                    raise ValueError(f"{size} bytes, not 0 to {_MAX_BYTES}")
                question = json.loads(self.rfile.read(size))
                with places:
                    self._say(200, {"result": _answer(retriever, question, topk)})
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                self._say(400, {"error": f"not a question of this protocol: {error}"})

        def do_GET(self) -> None:
            self._say(200, {"status": "ok"})

        def _say(self, status: int, answer: Any) -> None:
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class RetrieverServer(ThreadingHTTPServer):
        request_queue_size = 256  # conversations search at the same moment
        daemon_threads = True

    return RetrieverServer((host, port), Handler)


def _answer(retriever: Retriever, question: Any, topk: int) -> list[list[Any]]:
    queries = question["queries"] if "queries" in question else [question.get("query")]
    topk = question.get("topk") or topk
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise ValueError(f"query must be a text, got {queries!r:.200}")
    if type(topk) is not int or not 0 < topk <= _MAX_TOPK:
        raise ValueError(f"topk must be 1 to {_MAX_TOPK}, got {topk!r:.200}")
    if len(queries) * topk > _MAX_HITS:
        raise ValueError(
            f"{len(queries)} queries with topk={topk} are {len(queries) * topk} passages; ask for "
            f"at most {_MAX_HITS} at a time"
        )
    scores, left = bool(question.get("return_scores")), _MAX_CHARACTERS
    answer = []
    for query in queries:
        hits = retriever.search(query, topk)
        left -= sum(len(hit.passage.contents) for hit in hits)
        if left < 0:
            raise ValueError(
                f"its passages have more than {_MAX_CHARACTERS} characters; ask for fewer"
            )
        answer.append([_item(hit, scores) for hit in hits])
    return answer


def _item(hit: Hit, scores: bool) -> dict[str, Any]:
    document = {"id": hit.passage.id, "contents": hit.passage.contents}
    return {"document": document, "score": hit.score} if scores else document


@cli.command(__doc__, bare=cli.REFUSED, mendable=cli.MENDABLE_WITH_EXTRAS)
def main(argv: Sequence[str]) -> int:
    """Serve until interrupted."""
    arguments = cli.Arguments()
    arguments.add_argument("--corpus", required=True)
    arguments.add_argument("--host", default="127.0.0.1")
    arguments.add_argument("--port", type=int, default=8000)
    arguments.add_argument("--topk", type=int, default=3)
    options = arguments.parse_args(argv)
    # bm25s makes use of JAX where it is installed; accelerators are the trainer's.
    os.environ["JAX_PLATFORMS"] = "cpu"
    retriever = LocalRetriever(read_passages(options.corpus))
    server = make_server(retriever, options.host, options.port, options.topk)
    where = "http://{}:{}/retrieve".format(*server.server_address[:2])
    print(f"{len(retriever.passages)} passages at {where}", flush=True)
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
