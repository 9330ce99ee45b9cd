"""What a client asks for, read from a request's body and checked."""

import dataclasses
import inspect
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl.config import ServeConfig
from jaxrl.rollout.conversations.conversation import sample_key
from jaxrl.rollout.protocol import Sampling
from jaxrl.rollout.server.errors import ApiError
from jaxrl.rollout.server.fields import Fields, check_ids, is_integer, refuse
from jaxrl.rollout.server.served_model import ServedModel
from jaxrl.rollout.server.sessions import Session, Turn, plain_messages
from jaxrl.types import Message

MOST_ALTERNATIVES = 20
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for completions
MOST_STOPS = 16
# An engine compiles anew for each greater number of alternatives: few numbers are asked of it.
_ALTERNATIVES = (0, 5, MOST_ALTERNATIVES)
# What decides the distribution that is sampled from.
_DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Ask:
    """Describe a request for samples.

    Attributes:
        keys: of each sample of each prompt.
        alternatives: reported with each token; None = no log-probs in the answer.
        chat: the answer has the form of a chat.
        turn: of a conversation that the server keeps.
    """

    request_id: str
    prompts: tuple[tuple[int, ...], ...]
    keys: tuple[tuple[tuple[int, int], ...], ...]
    sampling: Sampling
    alternatives: int | None
    chat: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool
    skip_special_tokens: bool
    turn: Turn | None = None

    @property
    def samples(self) -> int:
        """Return the number of samples over all prompts."""
        return sum(map(len, self.keys))


class AskReader:
    """Reads the bodies of /v1/completions and /v1/chat/completions.

    Args:
        served: model.
        limits: lengths and numbers.
    """

    def __init__(self, served: ServedModel, limits: ServeConfig) -> None:
        self.served, self.limits = served, limits

    def completion(self, body: Mapping[str, Any], session: Session | None) -> Ask:
        """Read the body of a completion; raises `ApiError` for what cannot be served."""
        fields = Fields(body)
        prompts = self._prompts(fields)
        turn = None
        if session is not None:
            turn = session.continue_tokens(_only(prompts))
        alternatives = None
        if fields.take("logprobs") is not None:
            alternatives = fields.integer("logprobs", 0, 0, MOST_ALTERNATIVES)
        return self._ask(
            fields, prompts, alternatives, turn, "cmpl", lambda room: min(COMPLETION_TOKENS, room)
        )

    def chat(self, body: Mapping[str, Any], session: Session | None) -> Ask:
        """Read the body of a chat completion; raises `ApiError` for what cannot be served."""
        fields = Fields(body)
        messages = read_messages(fields)
        variables = {**self.served.variables, **read_variables(fields, self.served.tokenizer)}
        turn = None
        if session is not None:
            turn = session.continue_messages(messages, variables, self.served)
        prompt = turn.prompt if turn else self.served.encode_chat(messages, variables)
        most = fields.integer("top_logprobs", 0, 0, MOST_ALTERNATIVES)
        alternatives = most if fields.flag("logprobs") else None
        if most and alternatives is None:
            refuse("top_logprobs", most, "needs logprobs=true")
        return self._ask(fields, (prompt,), alternatives, turn, "chatcmpl", lambda room: room)

    def _ask(
        self,
        fields: Fields,
        prompts: tuple[tuple[int, ...], ...],
        alternatives: int | None,
        turn: Turn | None,
        kind: str,
        default_tokens: Callable[[int], int],
    ) -> Ask:
        self.served.check_name(fields.text("model", self.served.name))
        room = self._room(prompts)
        base = turn.session.sampling if turn else None
        sampling = self._sampling(fields, base, default_tokens(room), room)
        asked = next(n for n in _ALTERNATIVES if n >= (alternatives or 0))
        stream = fields.flag("stream")
        usage = fields.take("stream_options", {})
        if not isinstance(usage, dict) or set(usage) - {"include_usage", "include_obfuscation"}:
            refuse("stream_options", usage, 'may have "include_usage" only')
        ask = Ask(
            request_id=fields.text("request_id") or f"{kind}-{secrets.token_hex(12)}",
            prompts=prompts,
            keys=self._keys(fields, prompts, turn),
            sampling=dataclasses.replace(sampling, logprobs=asked),
            alternatives=alternatives,
            chat=kind == "chatcmpl",
            stream=stream,
            include_usage=bool(usage.get("include_usage")),
            return_token_ids=fields.flag("return_token_ids"),
            skip_special_tokens=fields.flag("skip_special_tokens", default=True),
            turn=turn,
        )
        fields.end()
        return ask

    def _prompts(self, fields: Fields) -> tuple[tuple[int, ...], ...]:
        prompt = fields.take("prompt")
        special = fields.flag("add_special_tokens", default=True)
        several = isinstance(prompt, list) and not all(map(is_integer, prompt))
        entries = prompt if several else [prompt]
        if len(entries) > self.limits.max_samples_per_request:
            most = self.limits.max_samples_per_request
            refuse("prompt", prompt, f"has {len(entries)} prompts; at most {most} are taken")
        return tuple(self._prompt(entry, special=special) for entry in entries)

    def _prompt(self, prompt: Any, *, special: bool) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self.served.encode(prompt, special=special)
        if not isinstance(prompt, list):
            refuse("prompt", prompt, "must be a string, token ids, or a list of either")
        return check_ids("prompt", prompt, self.served.vocab_size)

    def _room(self, prompts: tuple[tuple[int, ...], ...]) -> int:
        """Return how many tokens are left for an answer."""
        longest, shortest = max(map(len, prompts)), min(map(len, prompts))
        if shortest == 0:
            raise ApiError(400, "the prompt is empty; give at least one token", param="prompt")
        room = self.served.max_model_len - longest
        if room < 1:
            raise ApiError(
                400,
                f"the prompt has {longest} tokens and leaves no room for an answer in the context "
                f"of {self.served.max_model_len}; shorten it",
                param="prompt",
                code="context_length_exceeded",
            )
        return room

    def _sampling(
        self, fields: Fields, base: Sampling | None, default_tokens: int, room: int
    ) -> Sampling:
        fixed, served = base is not None, self.served
        if base is None:
            base = Sampling(default_tokens, stop_token_ids=served.eos_token_ids)
        tokens = fields.take("max_completion_tokens", fields.take("max_tokens"))
        if tokens is None:
            tokens = min(base.max_tokens, room)
        if not is_integer(tokens) or tokens < 1:
            refuse("max_tokens", tokens, "must be a positive integer")
        if tokens > room:
            fix = f"prompt and answer exceed the context of {served.max_model_len}; at most {room}"
            raise ApiError(
                400,
                f"max_tokens={tokens}: {fix}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        top_k = fields.integer("top_k", base.top_k, -1, served.vocab_size)
        ids = () if fields.flag("ignore_eos") else base.stop_token_ids
        more = fields.token_ids("stop_token_ids", served.vocab_size, MOST_STOPS)
        sampling = dataclasses.replace(
            base,
            max_tokens=tokens,
            temperature=fields.number("temperature", base.temperature, 0, 100),
            top_p=fields.number("top_p", base.top_p, 0, 1, above=True),
            top_k=top_k or -1,  # 0 is off, too
            min_p=fields.number("min_p", base.min_p, 0, 1),
            repetition_penalty=fields.number(
                "repetition_penalty", base.repetition_penalty, 0, 100, above=True
            ),
            min_tokens=fields.integer("min_tokens", min(base.min_tokens, tokens), 0, tokens),
            stop_token_ids=tuple(dict.fromkeys((*ids, *more))),
            stop=fields.texts("stop", MOST_STOPS) or base.stop,
        )
        try:
            sampling.check()
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        if fixed:
            _check_distribution(base, sampling)
        return sampling

    def _keys(
        self, fields: Fields, prompts: tuple[tuple[int, ...], ...], turn: Turn | None
    ) -> tuple[tuple[tuple[int, int], ...], ...]:
        given, most = fields.keys(), self.limits.max_samples_per_request // len(prompts)
        n = fields.integer("n", len(given or (0,)), 1, most)
        if turn is not None and n > 1:
            refuse("n", n, "a conversation (X-Session-ID) goes on with one answer")
        if given is not None:
            if len(prompts) > 1 or n != len(given):
                refuse("keys", given, f"needs one prompt, and n={n} keys")
            fields.take("seed")
            return (tuple(given),)
        seed = fields.take("seed")
        if seed is not None and not is_integer(seed):
            refuse("seed", seed, "must be an integer")
        if seed is None and turn is not None and turn.key is not None:
            return ((turn.key,),)
        name = secrets.token_hex(16) if seed is None else seed
        numbers = range(len(prompts))
        return tuple(tuple(sample_key("serve", name, p, i) for i in range(n)) for p in numbers)


def read_messages(fields: Fields) -> list[Message]:
    """Return the messages of a chat, their contents as strings."""
    messages = fields.take("messages")
    if not isinstance(messages, list) or not messages:
        refuse("messages", messages, "must be a list of messages that is not empty")
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        refuse("messages", messages, 'each must be an object with a "role" and a "content"')
    return plain_messages(messages)


def read_variables(fields: Fields, tokenizer: Any) -> dict[str, Any]:
    """Return variables of the chat template; refuse what changes how its text is tokenised."""
    name = "chat_template_kwargs"
    variables = fields.take(name, {})
    if not isinstance(variables, dict):
        refuse(name, variables, "must be an object of template variables")
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters
    if own := sorted(parameters.keys() & variables.keys()):
        fix = f"sets variables of the chat template alone; leave {', '.join(own)} out"
        refuse(name, variables, fix)
    return variables


def _only(prompts: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    if len(prompts) > 1:
        refuse("prompt", f"{len(prompts)} prompts", "a conversation goes on from one prompt")
    return next(iter(prompts))


def _check_distribution(base: Sampling, sampling: Sampling) -> None:
    """Refuse a distribution other than the config's, under which the trainer scores tokens."""
    for name in _DISTRIBUTION:
        ours, theirs = getattr(base, name), getattr(sampling, name)
        if ours != theirs:
            fix = f"this conversation is trained on with {name}={ours}; leave {name} out"
            refuse(name, theirs, fix)
