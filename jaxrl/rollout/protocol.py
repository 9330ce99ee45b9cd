"""What every rollout engine speaks: token ids in, token ids and log-probs out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `temperature=0` is greedy; `top_k=-1`, `top_p=1`, `min_p=0` are off."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """n samples of one prompt.

    Example: `Request(prompt_tokens=(3, 1, 4, 13), keys=((7, 1), (7, 2)), sampling=Sampling(
    max_tokens=8, stop_token_ids=(45,)))` asks for two samples; the same key gives the same tokens.
    """

    prompt_tokens: tuple[int, ...]
    keys: tuple[tuple[int, int], ...]  # PRNG key data of each sample
    sampling: Sampling


@dataclass(frozen=True)
class Completion:
    """One sample. `tokens` ends with the stop token if there was one."""

    tokens: list[int]
    log_probs: list[float]  # under the distribution that each token was drawn from
    stop_reason: str  # "stop" or "length"
    policy_version: int


class Engine(Protocol):
    """A sampler that holds one version of the policy."""

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """The samples of each request, in order."""
        ...

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Compile for batches with the shapes of these requests; nothing to do without XLA."""
        ...

    def update_weights(self, params: Any, version: int) -> None:
        """Sample from these parameters from now on."""
        ...

    def sleep(self) -> None:
        """Free the memory that only decoding needs."""
        ...

    def wake(self) -> None:
        """Undo `sleep`."""
        ...
