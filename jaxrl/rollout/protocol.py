"""What every rollout engine speaks: token ids in, token ids and log-probs out."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

MOST_COUNT = 2**31 - 1  # of an int32
LEAST_FACTOR = 1e-4  # of logits; rounding of those divided by less decides what is drawn


@dataclass(frozen=True)
class Sampling:
    """Describe how tokens are drawn and what ends a sample.

    `temperature=0` is greedy, and others near 0 are refused; `top_k=-1`, `top_p=1`, `min_p=0`,
    `repetition_penalty=1` are off.

    Attributes:
        min_tokens: nothing stops a sample before it has as many tokens.
        stop_token_ids: the token that stops a sample is its last.
        stop: strings, looked for in the decoded text; the sample ends with the token that completes
            one, after the first `min_tokens`.
        logprobs: most probable alternatives that are reported with each token.
        raw_log_probs: report also the log-probs without temperature, filters and penalties.
        keep_sampling_mask: report with each token the set that the filters left; needs `top_k`,
            which bounds it.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    logprobs: int = 0
    raw_log_probs: bool = False
    keep_sampling_mask: bool = False

    def check(self) -> None:
        """Refuse, by a ValueError, what devices cannot count or float32 logits be divided by."""
        counts = {"top_k": [self.top_k], "min_tokens": [self.min_tokens]}
        for name, numbers in {**counts, "stop_token_ids": self.stop_token_ids}.items():
            if wrong := [n for n in numbers if not -MOST_COUNT <= n <= MOST_COUNT]:
                raise ValueError(f"{name}={wrong[0]} must be at most {MOST_COUNT}, as int32 counts")
        temperature, penalty = self.temperature, self.repetition_penalty
        if temperature != 0 and not LEAST_FACTOR <= temperature <= 1 / LEAST_FACTOR:
            raise ValueError(
                f"temperature={temperature:g} must be 0, which is greedy, or from {LEAST_FACTOR:g} "
                f"to {1 / LEAST_FACTOR:g}: float32 logits are divided by it"
            )
        if not LEAST_FACTOR <= penalty <= 1 / LEAST_FACTOR:
            raise ValueError(
                f"repetition_penalty={penalty:g} must be from {LEAST_FACTOR:g} to "
                f"{1 / LEAST_FACTOR:g}, and 1 is off: float32 logits are divided by it"
            )


class Constraint(Protocol):
    """Say which tokens may come next in one sample; it is asked and told in turns."""

    def allowed(self) -> np.ndarray:
        """Return the ids that may come next, as bits of uint8 [V / 8, rounded up].

        Bit i % 8 of entry i // 8, from the lowest on, is id i. Where the text may end, the ids that
        stop the sample are among them. What it raises ends the sample.
        """
        ...

    def take(self, tokens: Sequence[int]) -> None:
        """Go on behind tokens that were drawn; nothing may be raised here."""
        ...


@dataclass(frozen=True)
class Adapter:
    """Name one of the adapters that an engine holds beside its base.

    Attributes:
        name: of its weights: what is cached of a prompt is found by requests with the same name.
        place: where it was put.
    """

    name: str
    place: int


@dataclass(frozen=True)
class Request:
    """Ask for n samples of one prompt.

    Attributes:
        keys: PRNG key data of each sample.
        on_tokens: an engine that can calls it, between two blocks of tokens, with the number of a
            sample that goes on and its new tokens, as a Completion with stop_reason "". It must
            return at once. What came last is only in the sample's own Completion.
        conversations: for each sample a future that is done when the conversation it is a turn of
            is over. An engine that can keeps its pages for the conversation's next turn until then,
            so whoever made the future must end it (`cancel` does) whatever happens. Empty: nothing
            is kept.
        references: tokens that the samples may repeat, as earlier answers, with -1 between two
            texts. An engine that guesses tokens looks in them.
        guesses: such an engine is to guess.
        adapter: that is added to the base's weights; None = the base alone.
        constrain: makes the constraint of each sample; None = any token may come. All else is as
            ever: log-probs are of the distribution over the tokens that it allows.

    Example: `Request(prompt_tokens=(3, 1, 4, 13), keys=((7, 1), (7, 2)), sampling=Sampling(
    max_tokens=8, stop_token_ids=(45,)))` asks for two samples; the same key gives the same tokens.
    """

    prompt_tokens: tuple[int, ...]
    keys: tuple[tuple[int, int], ...]
    sampling: Sampling
    on_tokens: Callable[[int, "Completion"], None] | None = field(default=None, compare=False)
    conversations: tuple[Future[None], ...] = field(default=(), compare=False)
    references: tuple[int, ...] = field(default=(), compare=False)
    guesses: bool = field(default=True, compare=False)
    adapter: Adapter | None = None
    constrain: Callable[[], Constraint] | None = field(default=None, compare=False)

    @functools.cached_property
    def prompt(self) -> np.ndarray:
        """Return the prompt as an array [n], which nobody may write to."""
        return np.array(self.prompt_tokens, np.int32)

    @property
    def longest(self) -> int:
        """Return the most tokens that prompt and response have together."""
        return len(self.prompt_tokens) + self.sampling.max_tokens

    def check(self, max_model_len: int | None, has_text: bool, *, constrains: bool = False) -> None:
        """Refuse what an engine can never serve.

        Args:
            max_model_len: most tokens of a row.
            has_text: the engine can decode text.
            constrains: the engine asks constraints before each token.

        Raises:
            ValueError: says what is wrong, and the fix.
        """
        if not self.prompt_tokens or self.sampling.max_tokens < 1:
            raise ValueError(f"empty prompt or max_tokens < 1 in {self}")
        if max_model_len is not None and self.longest > max_model_len:
            raise ValueError(
                f"a prompt of {len(self.prompt_tokens)} tokens and max_tokens="
                f"{self.sampling.max_tokens} need more than max_model_len={max_model_len}; shorten "
                "one, or raise the limit"
            )
        self.sampling.check()
        if self.sampling.stop and not has_text:
            raise ValueError(
                f"stop={self.sampling.stop} is looked for in text: give the engine decode_text"
            )
        if self.sampling.keep_sampling_mask and self.sampling.top_k < 1:
            raise ValueError(
                f"keep_sampling_mask with top_k={self.sampling.top_k}: the set could be the whole "
                "vocabulary; set top_k, e.g. 64"
            )
        if self.constrain is None:
            return
        if not constrains:
            raise ValueError("constrain: this engine asks no constraint; the native one does")
        if self.sampling.min_tokens or not self.sampling.stop_token_ids:
            raise ValueError(
                f"min_tokens={self.sampling.min_tokens}, stop_token_ids="
                f"{self.sampling.stop_token_ids}: a constrained sample ends, by a stop token, "
                "where its constraint does; set min_tokens=0 and stop_token_ids"
            )


@dataclass(frozen=True)
class Completion:
    """Hold one sample as it was drawn.

    Attributes:
        tokens: with the stop token, if one stopped it.
        log_probs: of each token under the distribution it was drawn from; empty where the engine
            has none.
        stop_reason: "stop", "length", or "abort" if the engine was told to end it.
        versions: of the policy that drew each token.
        stop_string: the member of `Sampling.stop` that ended it.
        top_log_probs: per token, the `Sampling.logprobs` most probable ids and their log-probs.
        raw_log_probs: per token, under the model's own distribution, if they are asked for.
        sampling_mask_ids: per token, the ids it was drawn from, filled up with -1 to `top_k`, if
            they are asked for. Nothing but -1 = all ids.
        context_versions: per token, the oldest version that computed keys and values it was drawn
            from; empty where the engine does not say.
        routes: [n, Lx, k] ids of the experts that the first n tokens of prompt and response were
            sent to, in each of the Lx layers with experts; all but the last one, which was not
            computed. None where the engine does not say.
        steps: that drew the tokens, of an engine that guesses some; 0 = it does not.
    """

    tokens: list[int]
    log_probs: list[float]
    stop_reason: str
    versions: list[int]
    stop_string: str | None = None
    top_log_probs: list[dict[int, float]] = field(default_factory=list)
    raw_log_probs: list[float] = field(default_factory=list)
    sampling_mask_ids: list[tuple[int, ...]] = field(default_factory=list)
    context_versions: list[int] = field(default_factory=list)
    routes: np.ndarray | None = field(default=None, compare=False)
    steps: int = field(default=0, compare=False)

    @property
    def flaw(self) -> str:
        """Say why this is no sample, whoever gave it; "" = it is one."""
        if not self.tokens:
            return "" if self.stop_reason == "abort" else "no token"
        for name in ("log_probs", "versions", "context_versions"):
            if len(getattr(self, name)) not in (0, len(self.tokens)):
                return f"{len(self.tokens)} tokens and {len(getattr(self, name))} {name}"
        return ""


class PromptScores(NamedTuple):
    """Hold how likely a model finds the tokens of a prompt, each behind those before it.

    All are under the model's own distribution: at temperature 1, without filters and penalties.
    The first token, behind which nothing is, has no score.
    """

    log_probs: np.ndarray  # [n - 1]
    ranks: np.ndarray  # [n - 1] 1 = no id is likelier
    top_ids: np.ndarray  # [n - 1, K] the likeliest, best first
    top_log_probs: np.ndarray  # [n - 1, K]


class Sampler(Protocol):
    """Draw samples for requests that may come at any time.

    What there is to tell of samples, by `on_tokens` and the callbacks of their futures, is told by
    threads of the engine's own, never within a call of the engine: so whoever calls it may hold
    locks that those who are told want. These may call the engine, but must not wait for samples,
    which come no further meanwhile. Futures have rules of their own beside: who adds a callback to
    one that is done calls it himself, and who cancels one calls all of them.
    """

    def submit(self, requests: Sequence[Request]) -> list[list[Future[Completion]]]:
        """Queue requests and return at once: one future per sample.

        Cancelling a future frees what its sample holds. Requests of one call are admitted in order,
        and what is drawn from them depends on nothing that is submitted later.

        Raises:
            ValueError: a request that can never be served; nothing of the call is queued.
        """
        ...


class Engine(Sampler, Protocol):
    """Describe a sampler that holds one version of the policy."""

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Call `submit`, and wait for all of it."""
        ...

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Compile for batches with the shapes of these requests; nothing to do without XLA."""
        ...

    def update_weights(self, params: Any, version: int) -> None:
        """Sample from these parameters from the next block of tokens on."""
        ...

    def describe(self) -> str:
        """Describe the shapes of what is compiled, in a line."""
        ...

    def sleep(self) -> None:
        """Free the memory that only decoding needs."""
        ...

    def wake(self) -> None:
        """Undo `sleep`."""
        ...
