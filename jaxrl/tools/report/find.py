"""Search the trajectories of a run, step by step: what a live page asks its server for."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from jaxrl.tools.report.blob import finite
from jaxrl.tools.report.prompt_rows import env_of
from jaxrl.tools.report.run_files import TRAINED, RunFiles
from jaxrl.tools.report.trajectories import StepRows, read_step, reward_of
from jaxrl.tools.report.vocabulary import Vocabulary

SECONDS = 0.5  # of one answer, about: the page shows how far the search is
AROUND = 30, 60  # characters before and from a match
MOST = 300  # trajectories of one answer


@dataclass(frozen=True)
class Query:
    """Hold what a trajectory must have; "" and None = anything.

    Attributes:
        text: in prompt or response, in upper or lower case; or the uid of the prompt.
        low, high: its reward at least and at most.
        stop, ended, env: why it stopped, where it ended, its environment.
    """

    text: str = ""
    low: float | None = None
    high: float | None = None
    stop: str = ""
    ended: str = ""
    env: str = ""

    @classmethod
    def of(cls, words: Mapping[str, str]) -> Self:
        """Read one from the address of a request.

        Raises:
            ValueError: a reward is no number.
        """
        low, high = (float(words[name]) if words.get(name) else None for name in ("min", "max"))
        names = {name: words.get(name, "") for name in ("stop", "ended", "env")}
        return cls(text=words.get("text", "").lower(), low=low, high=high, **names)


def find(run: RunFiles, query: Query, words: Vocabulary, start: int) -> dict[str, Any]:
    """Return the trajectories of a few steps, from step `start` on, that a query asks for.

    Returns:
        "hits", each with step, uid, sample (its number in the group), reward and text; "searched",
        the steps that were; "next", the step to go on from, None at the end.
    """
    steps = [step for step in run.rollouts if step >= start]
    until, hits, searched = time.monotonic() + SECONDS, [], 0
    for step in steps:
        if searched and (time.monotonic() > until or len(hits) >= MOST):
            return {"hits": hits, "searched": searched, "next": step}
        searched += 1
        if (rows := read_step(run, step, with_batch=False)) is not None:
            hits += [hit | {"step": step} for hit in _of_step(run, rows, query, words)]
    return {"hits": hits, "searched": searched, "next": None}


def _of_step(
    run: RunFiles, rows: StepRows, query: Query, words: Vocabulary
) -> list[dict[str, Any]]:
    hits = []
    for uid, members in rows.groups:
        if query.env and env_of(run, uid) != query.env:
            continue
        samples: dict[int, list[int]] = {}
        for row in members:
            samples.setdefault(int(rows.trajectories[row]), []).append(row)
        for number, own in enumerate(samples.values()):
            last = own[-1]
            if not _fits(run, rows, last, query):
                continue
            if (text := _match(rows, uid, own, query, words)) is None:
                continue
            reward = finite(reward_of(rows.output, last))
            hits.append({"uid": uid, "sample": number, "reward": reward, "text": text})
    return hits


def _fits(run: RunFiles, rows: StepRows, row: int, query: Query) -> bool:
    """Return whether all but the text is as asked for."""
    reward, ids = reward_of(rows.output, row), rows.output.get("ledger_ids")
    if query.low is not None and not reward >= query.low:
        return False
    if query.high is not None and not reward <= query.high:
        return False
    if query.stop and rows.output["stop_reasons"][row] != query.stop:
        return False
    ended = "" if ids is None or not run.has_ledger else run.dropped.get(ids[row], TRAINED)
    return not query.ended or ended == query.ended


def _match(
    rows: StepRows, uid: str, own: Sequence[int], query: Query, words: Vocabulary
) -> str | None:
    """Return the response around the match; None: the text is not there."""
    output = rows.output
    response = "\n".join(words.text(np.array(output["response_ids"][row])) for row in own)
    place = response.lower().find(query.text)
    if place < 0 and uid.lower() != query.text:
        prompt = words.text(np.array(output["prompt_token_ids"][own[0]]))
        if query.text not in prompt.lower():
            return None
    start = max(0, place - AROUND[0])
    return response[start : start + sum(AROUND)]
