"""Conversations that the server keeps token for token, under the client's X-Session-ID.

A client sends text; the tokens it was answered with are what must be trained on. When a request
goes on from an earlier one of its session, the earlier tokens stay as they are and only what is new
is tokenised. When it does not, because the client changed what was said, a new segment begins.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl.rollout.conversations.conversation import sample_key
from jaxrl.rollout.conversations.turns import Transcript, TurnTemplate
from jaxrl.rollout.protocol import Completion, Sampling
from jaxrl.rollout.server.errors import ApiError
from jaxrl.rollout.server.served_model import ServedModel
from jaxrl.types import Message

LONGEST_ID = 200
MOST_SEGMENTS = 64  # of a session; a client whose requests never go on would fill the memory


@dataclass
class Segment:
    """Hold a part of a session in which every turn goes on from the one before.

    Attributes:
        messages: what the next request must begin with to go on; None: it came as tokens.
        used: number of the session's turn that was recorded here last.
    """

    transcript: Transcript
    messages: list[Message] | None = None
    stop_reason: str = ""
    used: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the segment as columns, one entry per response token."""
        transcript = self.transcript
        return {
            "prompt_token_ids": transcript.prompt,
            "response_token_ids": transcript.tokens,
            "loss_mask": transcript.loss_mask,
            "logprobs": transcript.rollout_log_probs,
            "versions": transcript.versions,
            "context_versions": transcript.context_versions,
            "turns": transcript.turns,
            "finish_reason": self.stop_reason,
        }


@dataclass(frozen=True)
class Turn:
    """Describe the next turn of a session, before it is sampled.

    Attributes:
        prompt: its tokens, those of the conversation so far included.
        segment: what it goes on from; None: a new one begins.
        known: tokens of the segment when the turn began.
        messages: of the request; None: it came as tokens.
    """

    session: "ServedSession"
    prompt: tuple[int, ...]
    segment: Segment | None
    known: int
    messages: list[Message] | None
    key: tuple[int, int] | None


class ServedSession:
    """Hold one conversation, or several that share an id.

    Args:
        name: the id.
        sampling: what requests that do not say otherwise sample with; None = the server's defaults.
        key: names the PRNG keys of its turns; None = random ones.
    """

    def __init__(
        self, name: str, sampling: Sampling | None = None, key: tuple[int, int] | None = None
    ) -> None:
        self.name, self.sampling, self.key = name, sampling, key
        self.segments: list[Segment] = []
        self.used = time.monotonic()
        self.tokens = 0  # of all segments
        self._recorded = 0  # turns

    def continue_messages(
        self, messages: list[Message], variables: Mapping[str, Any], served: ServedModel
    ) -> Turn:
        """Return the turn that answers these messages."""
        for segment in reversed(self.segments):
            known = segment.messages
            if known is not None and len(messages) > len(known) and messages[: len(known)] == known:
                stops = served.eos_token_ids
                if self.sampling is not None:
                    stops = self.sampling.stop_token_ids
                template = TurnTemplate(served.tokenizer, variables)
                new = _between(segment, messages[len(known) :], template, stops)
                return self._turn((*segment.transcript.input, *new), segment, messages)
        return self._turn(served.encode_chat(messages, variables), None, messages)

    def continue_tokens(self, prompt: tuple[int, ...]) -> Turn:
        """Return the turn that goes on from these tokens."""
        for segment in reversed(self.segments):
            known = segment.transcript.input
            if prompt[: len(known)] == known:
                return self._turn(prompt, segment, None)
        return self._turn(prompt, None, None)

    def _turn(
        self, prompt: tuple[int, ...], segment: Segment | None, messages: list[Message] | None
    ) -> Turn:
        turns = sum(len(s.transcript.turns) for s in self.segments)
        key = None if self.key is None else sample_key(*self.key, turns) if turns else self.key
        known = 0 if segment is None else len(segment.transcript.input)
        return Turn(self, prompt, segment, known, messages, key)

    def record(self, turn: Turn, completion: Completion, text: str) -> None:
        """Keep what was sampled in a turn.

        One that was aborted before its first token is none: the next request goes on from where it
        would have. Of a client's session the segments used last are kept, of a training run's all.
        """
        segment = turn.segment
        if not completion.tokens:
            if segment is not None:
                segment.stop_reason = completion.stop_reason
            return
        if segment is None or len(segment.transcript.input) != turn.known:  # or another was faster
            segment = Segment(Transcript(list(turn.prompt)))
            self.segments.append(segment)
        else:
            segment.transcript.add_given(turn.prompt[turn.known :])
        segment.transcript.add_sampled(
            completion.tokens,
            completion.log_probs,
            completion.sampling_mask_ids,
            completion.versions,
            completion.context_versions,
            completion.routes,
        )
        segment.stop_reason = completion.stop_reason
        if turn.messages is not None:
            segment.messages = [*turn.messages, {"role": "assistant", "content": text}]
        self._recorded += 1
        segment.used = self._recorded
        if self.sampling is None and len(self.segments) > MOST_SEGMENTS:
            used = [segment.used for segment in self.segments]
            del self.segments[used.index(min(used))]
        self.tokens = sum(len(s.transcript.input) for s in self.segments)

    def as_json(self) -> dict[str, Any]:
        """Return the answer of GET /sessions/ID."""
        return {"id": self.name, "segments": [segment.as_json() for segment in self.segments]}


class ServedSessions:
    """Hold the sessions of a server, a bounded number, each for a bounded time.

    Any thread may call.

    Those of a training run are kept whole until it takes them.

    Args:
        most: sessions.
        seconds: that one is kept after its last use.
        tokens: that all of them hold; the one used least lately goes first.
    """

    def __init__(self, most: int, seconds: float, tokens: int) -> None:
        self.most, self.seconds, self.tokens = most, seconds, tokens
        self._by_name: OrderedDict[str, ServedSession] = OrderedDict()  # the one used last is last
        self._held: dict[str, ServedSession] = {}
        self._lock = threading.Lock()

    def hold(self, name: str, sampling: Sampling, key: tuple[int, int]) -> None:
        """Begin a session that stays until it is taken."""
        with self._lock:
            self._held[name] = ServedSession(name, sampling, key)

    def open(self, name: str) -> ServedSession:
        """Return the session of this name; a new one if there is none."""
        if not 0 < len(name) <= LONGEST_ID:
            raise ApiError(400, f"X-Session-ID must have 1 to {LONGEST_ID} characters")
        with self._lock:
            self._forget_old()
            if name in self._held:
                return self._held[name]
            session = self._by_name.setdefault(name, ServedSession(name))
            session.used = time.monotonic()
            self._by_name.move_to_end(name)
            held = sum(session.tokens for session in self._by_name.values())
            while len(self._by_name) > (self.most if held <= self.tokens else 1):
                held -= self._by_name.popitem(last=False)[1].tokens
            return session

    def get(self, name: str) -> ServedSession:
        """Return the session of this name; raise `ApiError` 404 if there is none."""
        with self._lock:
            self._forget_old()
            return self._found(self._held.get(name) or self._by_name.get(name), name)

    def take(self, name: str) -> ServedSession:
        """Return the session of this name, and forget it; raise `ApiError` 404 if there is none."""
        with self._lock:
            self._forget_old()
            held = self._held.pop(name, None)
            return self._found(held or self._by_name.pop(name, None), name)

    def _found(self, session: ServedSession | None, name: str) -> ServedSession:
        if session is None:
            message = f"no session {name!r}: it was taken, grew too old, or never was"
            raise ApiError(404, message, code="session_not_found")
        return session

    def _forget_old(self) -> None:
        oldest = time.monotonic() - self.seconds
        while self._by_name and next(iter(self._by_name.values())).used < oldest:
            self._by_name.popitem(last=False)


def _between(
    segment: Segment,
    messages: Sequence[Message],
    template: TurnTemplate,
    stops: Sequence[int],
) -> list[int]:
    """Return the tokens from the end of what was sampled to where the assistant shall speak."""
    try:
        end, rest = template.between(messages, stops)
    except Exception as error:  # whatever a template raises
        message = f"messages: the chat template refuses them: {error}"
        raise ApiError(400, message, param="messages") from error
    closed = segment.transcript.tokens[-1] in stops
    return rest if closed else end + rest
