"""Conversations that the server keeps token for token, under the client's X-Session-ID.

A client sends text; the tokens it was answered with are what must be trained on. When a request
goes on from an earlier one of its session, the earlier tokens stay as they are and only what is new
is tokenised. Where it goes on from a place that another went on from already, or nothing in the
session is a beginning of it, a new segment begins. So the segments are the branches of a tree: what
a branch shares with its parent stands in its prompt, and each sampled token is in one response.
"""

import hmac
import itertools
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl.rollout.conversations.conversation import sample_key
from jaxrl.rollout.conversations.turns import Transcript, TurnTemplate
from jaxrl.rollout.protocol import Completion, Sampling
from jaxrl.rollout.server.errors import ApiError
from jaxrl.rollout.server.served_model import ServedModel
from jaxrl.types import Message

LONGEST_ID = 200
MOST_SEGMENTS = 64  # of a session; a client whose requests never go on would fill the memory


@dataclass(frozen=True)
class Point:
    """Describe the end of a turn, from which requests may go on.

    Attributes:
        length: tokens of the segment up to here.
        key: of the PRNG, that the turn was sampled with.
        messages: what a request must begin with to go on; None: the turn came as tokens.
        tools: that the prompt told of.
    """

    length: int
    key: tuple[int, int] | None = None
    messages: list[Message] | None = None
    tools: Any = None


@dataclass
class Segment:
    """Hold a branch of a session: turns of which each goes on from the one before.

    Attributes:
        points: the ends of its turns.
        number: among all that began in the session, from 0.
        parent: number of the segment that its prompt goes on from; None: from none.
        used: number of the session's turn that was recorded here last.
    """

    transcript: Transcript
    number: int = 0
    parent: int | None = None
    points: list[Point] = field(default_factory=list)
    stop_reason: str = ""
    used: int = 0

    @property
    def sampled(self) -> int:
        """Return the number of sampled tokens, those of its parents not counted."""
        return sum(end - start for start, end in self.transcript.turns)

    def as_json(self) -> dict[str, Any]:
        """Return the segment as columns, one entry per response token."""
        transcript = self.transcript
        return {
            "number": self.number,
            "parent": self.parent,
            "prompt_token_ids": transcript.prompt,
            "response_token_ids": transcript.tokens,
            "loss_mask": transcript.loss_mask,
            "logprobs": transcript.rollout_log_probs,
            "versions": transcript.versions,
            "context_versions": transcript.context_versions,
            "turns": transcript.turns,
            "finish_reason": self.stop_reason,
        }


@dataclass
class Turn:
    """Describe the next turn of a session, before it is sampled.

    Attributes:
        prompt: its tokens, those of the conversation so far included.
        segment: what it goes on from; None: a new one begins.
        known: tokens of the segment that it goes on from.
        messages: of the request; None: it came as tokens.
        tools: that the prompt tells of.
        number: of the turn in the session; None: it has not begun.
    """

    session: "ServedSession"
    prompt: tuple[int, ...]
    segment: Segment | None = None
    known: int = 0
    messages: list[Message] | None = None
    tools: Any = None
    number: int | None = None

    def begin(self) -> tuple[int, int] | None:
        """Give the turn a number; return the PRNG key of its sample, None = a random one."""
        self.number = self.session.take_number()
        key = self.session.key
        return sample_key(*key, self.number) if key and self.number else key

    def close(self) -> None:
        """Give the number back if nothing was recorded: the next turn then has the same key."""
        if self.number is not None:
            self.session.return_number(self.number)


class ServedSession:
    """Hold one conversation, or several that share an id.

    Args:
        name: the id.
        sampling: what requests that do not say otherwise sample with; None = the server's defaults.
        key: names the PRNG keys of its turns; None = random ones.
        fixed: what requests say about temperature, filters and seeds does not count.

    Attributes:
        reward: that was posted; None: none was.
        reward_secret: that must be posted with it, of a training run's session; else None.
    """

    def __init__(
        self,
        name: str,
        sampling: Sampling | None = None,
        key: tuple[int, int] | None = None,
        *,
        fixed: bool = False,
    ) -> None:
        self.name, self.sampling, self.key, self.fixed = name, sampling, key, fixed
        self.segments: list[Segment] = []
        self.used = time.monotonic()
        self.tokens = 0  # of all segments
        self.reward: float | None = None
        self.reward_secret = None if sampling is None else secrets.token_hex(16)
        self._recorded = self._begun = 0  # turns, segments
        self._numbers, self._spoken = set[int](), set[int]()  # of turns that began; that said words
        self._lock = threading.Lock()

    def continue_messages(
        self, messages: list[Message], variables: Mapping[str, Any], served: ServedModel
    ) -> Turn:
        """Return the turn that answers these messages.

        Messages that begin as recorded ones go on from their tokens. Of others the tokens may: a
        client may have said the same in another form.
        """
        tools = variables.get("tools")

        def fits(segment: Segment, point: Point) -> bool:
            return tools == point.tools and _goes_on(point.messages, messages)

        if found := self._latest(fits):
            segment, point = found
            stops = served.eos_token_ids if self.sampling is None else self.sampling.stop_token_ids
            known = segment.transcript.input[: point.length]
            rest, template = (
                messages[len(point.messages or ()) :],
                TurnTemplate(served.tokenizer, variables),
            )
            new = _between(known[-1], rest, template, stops)
            if new is not None:
                return Turn(self, (*known, *new), segment, point.length, messages, tools)
        turn = self.continue_tokens(served.encode_chat(messages, variables))
        turn.messages, turn.tools = messages, tools
        return turn

    def continue_tokens(self, prompt: tuple[int, ...]) -> Turn:
        """Return the turn that goes on from these tokens."""

        shared = {s.number: _shared(prompt, s.transcript.input) for s in self.segments}

        def fits(segment: Segment, point: Point) -> bool:
            return point.length <= shared[segment.number]

        if found := self._latest(fits):
            return Turn(self, prompt, found[0], found[1].length)
        return Turn(self, prompt)

    def take_number(self) -> int:
        """Return the number of the next turn: the first that no other has."""
        with self._lock:
            number = next(i for i in itertools.count() if i not in self._numbers)
            self._numbers.add(number)
            return number

    def return_number(self, number: int) -> None:
        """Let another turn have a number, unless tokens were recorded under it."""
        with self._lock:
            if number not in self._spoken:
                self._numbers.discard(number)

    def record(
        self,
        turn: Turn,
        completion: Completion,
        message: Message | None = None,
        key: tuple[int, int] | None = None,
    ) -> Segment | None:
        """Keep what was sampled in a turn, which may have several samples.

        One that was aborted before its first token is none: the next request goes on from where it
        would have. One that the same key has sampled from the same tokens before is the same one.
        Of a client's session the segments used last are kept, of a training run's all.

        Args:
            message: as the client got it; None: tokens were asked for.
            key: of the PRNG.

        Returns:
            Where it is kept; None: it is not.
        """
        segment = turn.segment
        at_end = segment is not None and segment.points[-1].length == turn.known
        if not completion.tokens:
            if segment is not None and at_end:
                segment.stop_reason = completion.stop_reason
            return None
        if turn.number is not None:
            with self._lock:
                self._spoken.add(turn.number)
        whole = (*turn.prompt, *completion.tokens)
        if self._holds(whole, key):
            return None
        if segment is None or not at_end:  # or another was faster
            parent = None if segment is None else segment.number
            segment = Segment(Transcript(list(turn.prompt)), self._begun, parent)
            self.segments.append(segment)
            self._begun += 1
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
        messages = None
        if turn.messages is not None and message is not None:
            messages = [*turn.messages, message]
        segment.points.append(Point(len(whole), key, messages, turn.tools))
        self._recorded += 1
        segment.used = self._recorded
        if self.sampling is None and len(self.segments) > MOST_SEGMENTS:
            used = [segment.used for segment in self.segments]
            del self.segments[used.index(min(used))]
        self.tokens = sum(len(s.transcript.input) for s in self.segments)
        return segment

    def as_json(self) -> dict[str, Any]:
        """Return the answer of GET /sessions/ID."""
        segments = [segment.as_json() for segment in self.segments]
        return {"id": self.name, "reward": self.reward, "segments": segments}

    def _latest(self, fits: Callable[[Segment, Point], bool]) -> tuple[Segment, Point] | None:
        """Return the longest point that fits; of those, one that nothing goes on from, the last."""
        found = [
            (point.length, point is segment.points[-1], segment.used, segment, point)
            for segment in self.segments
            for point in segment.points
            if fits(segment, point)
        ]
        return max(found, key=lambda entry: entry[:3])[3:] if found else None

    def _holds(self, whole: tuple[int, ...], key: tuple[int, int] | None) -> bool:
        """Return whether a turn of this key ended so."""
        return key is not None and any(
            point.key == key
            and point.length == len(whole)
            and segment.transcript.input[: point.length] == whole
            for segment in self.segments
            for point in segment.points
        )


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

    def hold(
        self, name: str, sampling: Sampling, key: tuple[int, int], *, fixed: bool = False
    ) -> str:
        """Begin a session that stays until it is taken; see `ServedSession`.

        Returns:
            The secret that its reward needs.
        """
        session = ServedSession(name, sampling, key, fixed=fixed)
        with self._lock:
            self._held[name] = session
        assert session.reward_secret is not None
        return session.reward_secret

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

    def take_of_client(self, name: str) -> ServedSession:
        """Take the session for a client; raise `ApiError` 403 for one of a training run, or 404.

        A program that the run's agent started may ask, too.
        """
        if self.get(name).reward_secret is not None:
            raise ApiError(403, f"session {name!r} is taken by the training run that began it")
        return self.take(name)

    def reward(self, name: str, reward: float, secret: str | None) -> None:
        """Reward a session, once.

        Args:
            secret: that was posted with it.

        Raises:
            ApiError: 404 if there is no such session, 403 if it is of a training run and the secret
                is not its own, 409 for another reward than it has.
        """
        session = self.get(name)
        own, told = session.reward_secret, (secret or "").encode(errors="replace")
        if own is not None and not hmac.compare_digest(told, own.encode()):
            raise ApiError(
                403,
                f'session {name!r} is of a training run, and "secret" is not its own: post '
                '{"reward": number, "secret": text} with the reward_secret that the agent was '
                "given; a program of its own reads that from its standard input",
                param="secret",
                code="wrong_reward_secret",
            )
        with self._lock:
            if session.reward not in (None, reward):
                message = f"reward={reward}: session {name!r} has {session.reward} already"
                raise ApiError(409, message, param="reward", code="reward_conflict")
            session.reward = reward

    def _found(self, session: ServedSession | None, name: str) -> ServedSession:
        if session is None:
            message = f"no session {name!r}: it was taken, grew too old, or never was"
            raise ApiError(404, message, code="session_not_found")
        return session

    def _forget_old(self) -> None:
        oldest = time.monotonic() - self.seconds
        while self._by_name and next(iter(self._by_name.values())).used < oldest:
            self._by_name.popitem(last=False)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common at their beginnings."""
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)


def _goes_on(known: list[Message] | None, messages: Sequence[Message]) -> bool:
    """Return whether messages begin with the known ones, and say more."""
    if known is None or len(messages) <= len(known):
        return False
    return all(map(_same, known, messages))


def _same(known: Message, message: Message) -> bool:
    """Return whether a client's message is the known one.

    Of the assistant's it has to say no more than what decides how it goes on: clients add fields of
    their own, and mostly do not send thoughts back.
    """
    if known == message:
        return True
    if known["role"] != "assistant" or message["role"] != "assistant":
        return False
    thoughts = message.get("reasoning_content", known.get("reasoning_content"))
    return (
        known["content"] == message["content"]
        and thoughts == known.get("reasoning_content")
        and _calls(known) == _calls(message)
    )


def _calls(message: Message) -> list[tuple[Any, ...]]:
    return [
        (call.get("id"), call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]


def _between(
    last: int, messages: Sequence[Message], template: TurnTemplate, stops: Sequence[int]
) -> list[int] | None:
    """Return the tokens from the end of what was sampled to where the assistant shall speak.

    Args:
        last: of the tokens that were sampled.

    Returns:
        None: the template writes such messages only after a call of a tool that it sees.
    """
    try:
        end, rest = template.between(messages, stops)
    except Exception:  # whatever a template raises; the whole of the messages is tried next
        return None
    return rest if last in stops else end + rest
