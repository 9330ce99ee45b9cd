"""What a remote engine and its servers say to each other: requests, answers, new weights.

Dialects of OpenAI's completions: "native", of jaxrl's own server, "vllm", of vLLM 0.32, and
"vllm_lora", of vLLM whose weights stay and which gets adapters. A dialect is what differs between
them, as data and functions; `remote.engine.RemoteEngine` is the rest.
"""

import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from jaxrl.rollout.protocol import Completion, Request, Sampling

Ask = Callable[..., Awaitable[str]]  # (path, body, method="POST") -> the text of the answer
TOKEN_PREFIX = "token_id:"  # of the names of tokens in top_logprobs


class InvalidAnswer(ValueError):
    """Signal that an answer is not what was asked for."""


@dataclass(frozen=True)
class Dialect:
    """Describe how one kind of server is spoken to.

    Attributes:
        name: of the dialect.
        extras: a request's fields beside those that all have in common.
        load: have a server take the weights of a folder, as a version, under a name.
        lacks: settings of Sampling that its protocol does not have.
        alive: answers of GET /health with which a server can be given weights.
        says_versions: answers carry the versions of each token, and /health that of the weights.
        adapters: weights are adapters, which requests ask for by name, as the `model`.
    """

    name: str
    extras: Callable[[Request], dict[str, Any]]
    load: Callable[[Ask, str, int, str], Awaitable[None]]
    lacks: tuple[str, ...]
    alive: frozenset[int]
    says_versions: bool
    adapters: bool = False

    def check(self, sampling: Sampling) -> None:
        """Refuse what no field of the protocol can ask for.

        Raises:
            ValueError: names the setting.
        """
        for name in self.lacks:
            if getattr(sampling, name):
                raise ValueError(
                    f"Sampling.{name} is not available from a {self.name} server over HTTP; turn "
                    "it off, or use the engine in this process (run_engines_locally=true, "
                    "backend='native')"
                )

    def body(self, request: Request, model: str | None) -> dict[str, Any]:
        """Return the JSON of POST /v1/completions for all samples of a request."""
        s = request.sampling
        named = {} if model is None else {"model": model}
        return named | {
            "prompt": list(request.prompt_tokens),
            "n": len(request.keys),
            "max_tokens": s.max_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k,
            "min_p": s.min_p,
            "repetition_penalty": s.repetition_penalty,
            "min_tokens": s.min_tokens,
            "stop": list(s.stop),
            "stop_token_ids": list(s.stop_token_ids),
            "ignore_eos": True,  # nothing but stop_token_ids and stop ends a sample
            "logprobs": s.logprobs,
            "return_token_ids": True,
            "stream": False,
            **self.extras(request),
        }

    def completions(self, answer: Any, request: Request, version: int) -> list[Completion]:
        """Return the samples of an answer, in order.

        Args:
            version: that the server had when it was asked; of every token, where the dialect does
                not say.

        Raises:
            InvalidAnswer: it lacks a sample, or a part of one.
        """
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            if [choice["index"] for choice in choices] != list(range(len(request.keys))):
                raise InvalidAnswer(f"{len(choices)} samples where {len(request.keys)} were asked")
            return [self._completion(choice, request.sampling, version) for choice in choices]
        except InvalidAnswer:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InvalidAnswer(f"an answer without what was asked for: {error!r}") from error

    def _completion(self, choice: Any, sampling: Sampling, version: int) -> Completion:
        tokens, log_prob_columns = choice["token_ids"], choice["logprobs"]
        log_probs = log_prob_columns["token_logprobs"]
        versions = choice["versions"] if self.says_versions else [version] * len(tokens)
        contexts = choice.get("context_versions") or []
        reason, stopped_by = choice["finish_reason"], choice.get("stop_reason")
        if reason not in ("stop", "length", "abort"):
            raise InvalidAnswer(f"finish_reason={reason!r}")
        if not tokens and reason != "abort":
            raise InvalidAnswer("a sample without tokens")
        if not len(tokens) == len(log_probs) == len(versions) <= sampling.max_tokens:
            raise InvalidAnswer(
                f"{len(tokens)} tokens (at most {sampling.max_tokens} were asked), "
                f"{len(log_probs)} log-probs, {len(versions)} versions"
            )
        if len(contexts) not in (0, len(tokens)):
            raise InvalidAnswer(f"{len(tokens)} tokens, {len(contexts)} context_versions")
        if not all(type(token) is int for token in tokens):
            raise InvalidAnswer("token ids that are not integers")
        if not all(math.isfinite(x) and x <= 1e-3 for x in log_probs):
            raise InvalidAnswer("log-probs that are none")
        return Completion(
            tokens=tokens,
            log_probs=log_probs,
            stop_reason=reason,
            versions=versions,
            stop_string=stopped_by if isinstance(stopped_by, str) else None,
            top_log_probs=_top(log_prob_columns.get("top_logprobs"), sampling.logprobs),
            context_versions=contexts,
        )


def _top(places: list[dict[str, float]] | None, number: int) -> list[dict[int, float]]:
    """Return ids and log-probs of the most probable tokens; servers may add the sampled one."""
    if not number:
        return []
    named = [
        {int(name.removeprefix(TOKEN_PREFIX)): x for name, x in place.items()}
        for place in places or ()
    ]
    ranked = (sorted(place.items(), key=lambda item: -item[1])[:number] for place in named)
    return [dict(place) for place in ranked]


# ---- jaxrl's own server


def _native_extras(request: Request) -> dict[str, Any]:
    return {"keys": [list(key) for key in request.keys]}


async def _native_load(ask: Ask, folder: str, version: int, name: str) -> None:
    del name
    await ask("/update_weights", {"path": folder, "version": version})


# ---- vLLM


def _vllm_extras(request: Request) -> dict[str, Any]:
    """Return the fields of a request that vLLM alone has.

    vLLM numbers the samples of a request from its seed on.
    """
    high, low = request.keys[0]
    return {
        "seed": (high << 32 | low) & (2**63 - 1),
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
    }


async def _vllm_load(ask: Ask, folder: str, version: int, name: str) -> None:
    """Load new weights: requests in flight are frozen, then go on with them.

    Where one of the calls fails the server is left paused: it must not go on with old weights.
    """
    del version, name  # vLLM counts none
    await ask("/pause?mode=keep", None)
    arguments = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
    await ask("/collective_rpc", arguments)
    await ask("/reset_prefix_cache", None)
    await ask("/resume", None)


async def _vllm_load_adapter(ask: Ask, folder: str, version: int, name: str) -> None:
    """Load a new adapter beside the old one; requests in flight end with the one they named.

    Not in place, under the old name (`load_inplace`): vLLM 0.32 then reads the folder again before
    every decoding step, and dies when it is gone.
    """
    del version
    held = _adapters(await ask("/v1/models", None, "GET"))
    if name not in held:
        await ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
    for old in held:
        if old != name:
            await ask("/v1/unload_lora_adapter", {"lora_name": old})


def _adapters(listed: str) -> list[str]:
    """Return the names of the adapters among models: models have no parent."""
    try:
        return [model["id"] for model in json.loads(listed)["data"] if model["parent"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidAnswer(f"GET /v1/models gives {listed[:80]!r}") from error


_LACKS = ("keep_sampling_mask", "raw_log_probs")
DIALECTS = {
    "native": Dialect(
        "native",
        _native_extras,
        _native_load,
        (*_LACKS, "logprobs"),  # alternatives go by their text, which several ids may share
        frozenset({200, 503}),  # 503: it has no weights yet
        True,
    ),
    "vllm": Dialect("vllm", _vllm_extras, _vllm_load, _LACKS, frozenset({200}), False),
    "vllm_lora": Dialect(
        "vllm", _vllm_extras, _vllm_load_adapter, _LACKS, frozenset({200}), False, adapters=True
    ),
}
