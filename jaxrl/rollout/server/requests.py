"""What a client asks for: a request's body, checked against the model and the limits."""

import dataclasses
import inspect
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl.config import ServeConfig
from jaxrl.rollout.conversations.conversation import sample_key
from jaxrl.rollout.protocol import Constraint, Sampling
from jaxrl.rollout.server.answer_formats import tags
from jaxrl.rollout.server.bodies import (
    MOST_ALTERNATIVES,
    ChatBody,
    CompletionBody,
    NamedTool,
    Rendered,
    SamplesBody,
)
from jaxrl.rollout.server.errors import ApiError, refuse
from jaxrl.rollout.server.grammars import ANY_OBJECT, Form, Grammars
from jaxrl.rollout.server.served_model import ServedModel
from jaxrl.rollout.server.sessions import ServedSession, Turn

COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for completions
# An engine compiles anew for each greater number of alternatives: few numbers are asked of it.
_ALTERNATIVES = (0, 5, MOST_ALTERNATIVES)
# What decides the distribution that is sampled from.
_DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class SampleRequest:
    """Describe a request for samples.

    Attributes:
        keys: of each sample of each prompt.
        alternatives: reported with each token; None = no log-probs in the answer.
        prompt_alternatives: reported with each token of the prompt; None = nothing of them.
        echo: texts of the prompts, which answers begin with, as their log-probs do; None = not so.
        chat: the answer has the form of a chat.
        keep_stop: the text has what stopped it, too.
        turn: of a conversation that the server keeps.
        calls: of tools that are read in an answer, at most; None = all.
        constrain: makes the constraint of each sample; None = any token may come.
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
    keep_stop: bool = False
    turn: Turn | None = None
    calls: int | None = 0
    constrain: Callable[[], Constraint] | None = None
    prompt_alternatives: int | None = None
    echo: tuple[str, ...] | None = None

    @property
    def scores_prompts(self) -> bool:
        """Return whether something of the prompts' own tokens is to be told."""
        echoes = self.echo is not None and self.alternatives is not None
        return echoes or self.prompt_alternatives is not None

    @property
    def named_tokens(self) -> int:
        """Return how many tokens an answer names of prompts, and in place of theirs."""
        if not self.scores_prompts:
            return 0
        each = 1 + max(self.alternatives or 0, self.prompt_alternatives or 0)
        prompts = zip(self.prompts, self.keys, strict=True)
        return sum(each * len(prompt) * len(keys) for prompt, keys in prompts)

    @property
    def samples(self) -> int:
        """Return the number of samples over all prompts."""
        return sum(map(len, self.keys))


class RequestReader:
    """Read the bodies of /v1/completions and /v1/chat/completions.

    Args:
        served: model.
        limits: lengths and numbers.
        constrains: the engine asks the constraints of requests.
        scores: the engine tells the log-probs of prompts.
    """

    def __init__(
        self,
        served: ServedModel,
        limits: ServeConfig,
        *,
        constrains: bool = False,
        scores: bool = False,
    ) -> None:
        self.served, self.limits = served, limits
        self.constrains, self.scores = constrains, scores
        self.grammars = Grammars(served)

    def completion(self, raw: Mapping[str, Any], session: ServedSession | None) -> SampleRequest:
        """Read the body of a completion; raises `ApiError` for what cannot be served."""
        body = CompletionBody.model_validate(raw)
        prompts = self._prompts(body)
        turn = None
        if session is not None:
            turn = session.continue_tokens(_only(prompts))
        self._check_scores(body, turn)
        return self._request(
            body,
            prompts,
            turn,
            alternatives=body.logprobs,
            default_tokens=COMPLETION_TOKENS,
            chat=False,
            prompt_alternatives=body.prompt_logprobs,
            echo=self._texts(body, prompts) if body.echo else None,
        )

    def _texts(self, body: CompletionBody, prompts: tuple[tuple[int, ...], ...]) -> tuple[str, ...]:
        """Return what the prompts of a body say."""
        decode = self.served.tokenizer.decode
        return tuple(
            given
            if isinstance(given, str)
            else decode(list(prompt), skip_special_tokens=body.skip_special_tokens)
            for given, prompt in zip(body.prompt, prompts, strict=True)
        )

    def _check_scores(self, body: CompletionBody, turn: Turn | None) -> None:
        """Refuse what cannot be told of prompts, and an answer that would tell nothing."""
        if body.prompt_logprobs is not None:
            asked = "prompt_logprobs"
            if body.stream:
                fix = "comes with the whole answer; leave stream out"
                refuse(asked, body.prompt_logprobs, fix)
        else:
            asked = "echo" if body.echo and body.logprobs is not None else ""
        if asked and not self.scores:
            fix = "the engine of this server scores no prompts; the native one does"
            refuse(asked, getattr(body, asked), fix)
        if body.max_tokens != 0:
            return
        if not body.echo and body.prompt_logprobs is None:
            fix = "tells nothing without echo or prompt_logprobs; set one of them, or at least 1"
            refuse("max_tokens", 0, fix)
        if turn is not None:
            refuse("max_tokens", 0, "a turn of a conversation has at least one token")

    def chat(self, raw: Mapping[str, Any], session: ServedSession | None) -> SampleRequest:
        """Read the body of a chat completion; raises `ApiError` for what cannot be served."""
        body = ChatBody.model_validate(raw)
        if body.top_logprobs and not body.logprobs:
            refuse("top_logprobs", body.top_logprobs, "needs logprobs=true")
        if not body.tools and body.tool_choice not in ("auto", "none"):
            refuse("tool_choice", body.tool_choice, "needs tools")
        if body.tools and self.served.answer_format is None:
            fix = "no calls are read in answers here; the server needs serve.answer_format=tags"
            refuse("tools", body.tools, fix)
        variables = self.variables(body)
        if body.tools:
            variables["tools"] = body.tools
        turn = None
        if session is not None:
            if not body.add_generation_prompt:
                fix = "a turn of a conversation begins where the assistant does; leave it out"
                refuse("add_generation_prompt", False, fix)
            turn = session.continue_messages(body.messages, variables, self.served)
        prompt = turn.prompt if turn else self.served.encode_chat(body.messages, variables)
        return self._request(
            body,
            (prompt,),
            turn,
            alternatives=body.top_logprobs if body.logprobs else None,
            default_tokens=self.served.max_model_len,
            chat=True,
            calls=_most_calls(body),
        )

    def variables(self, body: Rendered) -> dict[str, Any]:
        """Return how the chat template writes messages; refuse what tokenises texts otherwise."""
        kwargs, tokenizer = body.chat_template_kwargs, self.served.tokenizer
        apply = tokenizer.apply_chat_template
        if taken := sorted(inspect.signature(apply).parameters.keys() & kwargs.keys()):
            fix = f"sets variables of the chat template alone; leave {', '.join(taken)} out"
            refuse("chat_template_kwargs", kwargs, fix)
        variables = {**self.served.variables, **kwargs}
        if body.reasoning_effort is not None:
            if not re.search(r"\breasoning_effort\b", tokenizer.get_chat_template()):
                fix = "the chat template of this model has no such variable; leave it out"
                refuse("reasoning_effort", body.reasoning_effort, fix)
            if kwargs.get("reasoning_effort", body.reasoning_effort) != body.reasoning_effort:
                fix = "chat_template_kwargs has another one; leave one of them out"
                refuse("reasoning_effort", body.reasoning_effort, fix)
            variables["reasoning_effort"] = body.reasoning_effort
        if not body.add_generation_prompt:
            variables["add_generation_prompt"] = False
        if body.continue_final_message:
            if body.add_generation_prompt:
                refuse("continue_final_message", True, "needs add_generation_prompt=false")
            if body.messages[-1]["role"] != "assistant":
                refuse("continue_final_message", True, "needs a last message of the assistant")
            variables["continue_final_message"] = True
        return variables

    def _request(
        self,
        body: SamplesBody,
        prompts: tuple[tuple[int, ...], ...],
        turn: Turn | None,
        *,
        alternatives: int | None,
        default_tokens: int,
        chat: bool,
        calls: int | None = 0,
        prompt_alternatives: int | None = None,
        echo: tuple[str, ...] | None = None,
    ) -> SampleRequest:
        self.served.check_name(body.model)
        constrain = self._constrain(body, turn)
        if turn is not None and turn.session.fixed:
            body = body.model_copy(update=dict.fromkeys((*_DISTRIBUTION, "seed", "keys")))
        sampling = self._sampling(body, prompts, turn, default_tokens)
        reported = next(n for n in _ALTERNATIVES if n >= (alternatives or 0))
        new_id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        return SampleRequest(
            request_id=body.request_id or new_id,
            prompts=prompts,
            keys=self._keys(body, prompts, turn),
            sampling=dataclasses.replace(sampling, logprobs=reported),
            alternatives=alternatives,
            chat=chat,
            stream=body.stream,
            include_usage=body.stream_options.include_usage,
            return_token_ids=body.return_token_ids,
            skip_special_tokens=body.skip_special_tokens,
            keep_stop=body.include_stop_str_in_output,
            turn=turn,
            calls=calls,
            constrain=constrain,
            prompt_alternatives=prompt_alternatives,
            echo=echo,
        )

    def _constrain(self, body: SamplesBody, turn: Turn | None) -> Callable[[], Constraint] | None:
        """Return what constrains each sample of a request, if its body asks for that."""
        (form, where), called, several = _form(body), [], False
        asked = where.partition(".")[0]
        if isinstance(body, ChatBody) and body.tools:
            choice = body.tool_choice
            functions = [tool["function"] for tool in body.tools]
            several = body.parallel_tool_calls
            if isinstance(choice, NamedTool):
                functions = [f for f in functions if f["name"] == choice.function.name]
                several = False
                if not functions:
                    refuse("tool_choice", choice.function.name, "names none of the tools")
            if choice == "required" or isinstance(choice, NamedTool):
                asked, form, called = "tool_choice", None, functions
            elif choice == "auto" and form is not None:
                called = functions  # it answers, or calls
        if form is None and not called:
            return None
        value = getattr(body, asked)
        if not self.constrains:
            refuse(asked, value, "the engine of this server asks no grammar; the native one does")
        if called and self.served.answer_format is not tags:
            fix = "how calls are written is only known of serve.answer_format=tags"
            refuse(asked, value, f"{fix}; set that, or tool_choice='none'")
        if turn is not None and turn.session.sampling is not None:
            fix = "the trainer scores tokens without a grammar"
            refuse(asked, value, f"this conversation is trained on, and {fix}; leave it out")
        if body.min_tokens or body.ignore_eos:
            fix = "an answer ends where its grammar does; leave min_tokens and ignore_eos out"
            refuse(asked, value, fix)
        if form is not None:
            asked, value = where, form.value
        return self.grammars.constrain(asked, value, form, called, several=several)

    def _prompts(self, body: CompletionBody) -> tuple[tuple[int, ...], ...]:
        most = self.limits.max_samples_per_request
        if len(body.prompt) > most:
            fix = f"has {len(body.prompt)} prompts; at most {most} are taken"
            refuse("prompt", body.prompt, fix)
        return tuple(
            self.served.encode(prompt, special=body.add_special_tokens)
            if isinstance(prompt, str)
            else self.served.check_ids("prompt", prompt)
            for prompt in body.prompt
        )

    def _sampling(
        self,
        body: SamplesBody,
        prompts: tuple[tuple[int, ...], ...],
        turn: Turn | None,
        default_tokens: int,
    ) -> Sampling:
        """Return how samples are drawn: as the body says, else the session, else by default."""
        served, longest = self.served, max(map(len, prompts))
        room = served.max_model_len - longest
        if not all(prompts):
            raise ApiError(400, "the prompt is empty; give at least one token", param="prompt")
        scores_alone = body.max_tokens == 0 and isinstance(body, CompletionBody)
        if room < (0 if scores_alone else 1):
            raise ApiError(
                400,
                f"the prompt has {longest} tokens and leaves no room for an answer in the context "
                f"of {served.max_model_len}; shorten it",
                param="prompt",
                code="context_length_exceeded",
            )
        trained_with = turn.session.sampling if turn else None
        base = trained_with or Sampling(default_tokens, stop_token_ids=served.eos_token_ids)
        if body.max_tokens == 0 and not scores_alone:
            refuse("max_tokens", 0, "an answer in a chat has at least one token")
        tokens = body.max_completion_tokens or body.max_tokens
        if tokens is None:
            tokens = min(base.max_tokens, room)
        if tokens > room:
            fix = f"prompt and answer exceed the context of {served.max_model_len}; at most {room}"
            raise ApiError(
                400,
                f"max_tokens={tokens}: {fix}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if (body.top_k or 0) > served.vocab_size:
            refuse("top_k", body.top_k, f"must be at most {served.vocab_size}")
        if (body.min_tokens or 0) > tokens:
            refuse("min_tokens", body.min_tokens, f"must be at most max_tokens, which is {tokens}")
        more_stops = served.check_ids("stop_token_ids", body.stop_token_ids)
        stops = (*(() if body.ignore_eos else base.stop_token_ids), *more_stops)
        distribution = body.model_dump(include=set(_DISTRIBUTION), exclude_none=True)
        if body.top_k == 0:
            distribution["top_k"] = -1  # off, too
        sampling = dataclasses.replace(
            base,
            max_tokens=tokens,
            min_tokens=min(base.min_tokens, tokens) if body.min_tokens is None else body.min_tokens,
            stop_token_ids=tuple(dict.fromkeys(stops)),
            stop=tuple(body.stop) or base.stop,
            **distribution,
        )
        try:
            sampling.check()
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        if trained_with is not None:
            _check_distribution(trained_with, sampling)
        return sampling

    def _keys(
        self, body: SamplesBody, prompts: tuple[tuple[int, ...], ...], turn: Turn | None
    ) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return the PRNG key of each sample of each prompt."""
        most = self.limits.max_samples_per_request // len(prompts)
        n = body.n or len(body.keys or (0,))
        if n > most:
            refuse("n", n, f"must be at most {most}")
        if body.keys is not None and (len(prompts) > 1 or n != len(body.keys)):
            refuse("keys", body.keys, f"needs one prompt, and n={n} keys")
        key = None if turn is None else turn.begin()
        if body.keys is not None:
            return (tuple((first, second) for first, second in body.keys),)
        if body.seed is None and key is not None:
            return ((key, *(sample_key(*key, "sample", i) for i in range(1, n))),)
        name = secrets.token_hex(16) if body.seed is None else body.seed
        numbers = range(len(prompts))
        return tuple(tuple(sample_key("serve", name, p, i) for i in range(n)) for p in numbers)


def _form(body: SamplesBody) -> tuple[Form | None, str]:
    """Return what the text of an answer must be, and which field says so; None: anything."""
    form, structured = body.response_format, body.structured_outputs
    asks = form is not None and form.type != "text"
    if structured is not None:
        if asks:
            fix = "response_format says already what an answer is; leave one of them out"
            refuse("structured_outputs", structured.model_dump(exclude_none=True), fix)
        kind = structured.kind
        if kind == "json_object":
            return Form("json", ANY_OBJECT), "structured_outputs.json_object"
        return Form(kind, structured.value), f"structured_outputs.{kind}"
    if form is None or not asks:
        return None, "response_format"
    if form.json_schema is None:
        return Form("json", ANY_OBJECT), "response_format"
    return Form("json", form.json_schema.schema_), "response_format.json_schema.schema"


def _most_calls(body: ChatBody) -> int | None:
    if not body.tools or body.tool_choice == "none":
        return 0
    return None if body.parallel_tool_calls else 1


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
