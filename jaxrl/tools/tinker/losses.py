"""The losses of Tinker's API, each a sum over the tokens of a call.

https://tinker-docs.thinkingmachines.ai/losses. They are those of `jaxrl.losses`, with the sampler's
log-probs for those of the old policy.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

from jaxrl.array_ops import Array, FloatBT
from jaxrl.losses.cispo import cispo
from jaxrl.losses.cross_entropy import cross_entropy
from jaxrl.losses.dro import dro
from jaxrl.losses.importance_sampling import importance_sampling
from jaxrl.losses.regular import regular

Inputs = Mapping[str, FloatBT]  # by the API's names
Settings = Mapping[str, Array]  # of a call, a number each


class ApiLoss(NamedTuple):
    """Say what is true of one loss of the API.

    Attributes:
        of_tokens: (log_probs [B, T], inputs, settings) -> loss [B, T].
        inputs: of each token, beside its target.
        settings: numbers of a call, with their defaults.
    """

    of_tokens: Callable[[FloatBT, Inputs, Settings], FloatBT]
    inputs: Sequence[str]
    settings: Mapping[str, float] = MappingProxyType({})


def weighted_cross_entropy(log_probs: FloatBT, inputs: Inputs, settings: Settings) -> FloatBT:
    """Return -w_t log pi(a_t | s_t), of weights of any sign."""
    del settings
    return inputs["weights"] * cross_entropy(log_probs, None, None, None)[0]


def importance(log_probs: FloatBT, inputs: Inputs, settings: Settings) -> FloatBT:
    """Return -r_t A_t, with r_t = pi / q of the sampler's q."""
    del settings
    return importance_sampling(log_probs, inputs["logprobs"], inputs["advantages"])[0]


def ppo(log_probs: FloatBT, inputs: Inputs, settings: Settings) -> FloatBT:
    """Return -min(r_t A_t, clip(r_t, low, high) A_t)."""
    bounds = SimpleNamespace(
        eps_clip_low=1 - settings["clip_low_threshold"],
        eps_clip_high=settings["clip_high_threshold"] - 1,
    )
    return regular(log_probs, inputs["logprobs"], inputs["advantages"], bounds)[0]


def clipped_weight(log_probs: FloatBT, inputs: Inputs, settings: Settings) -> FloatBT:
    """Return -sg[clip(r_t, low, high)] A_t log pi(a_t | s_t)."""
    bounds = SimpleNamespace(
        cispo_eps_clip_low=1 - settings["clip_low_threshold"],
        cispo_eps_clip_high=settings["clip_high_threshold"] - 1,
        cispo_anchor="old",
    )
    config = SimpleNamespace(cispo=bounds)
    return cispo(log_probs, inputs["logprobs"], inputs["advantages"], config)[0]


def penalised(log_probs: FloatBT, inputs: Inputs, settings: Settings) -> FloatBT:
    """Return -(A_t log pi - beta / 2 (log pi - log q)^2)."""
    given = log_probs, inputs["logprobs"], inputs["advantages"], None
    return dro(*given, beta=settings["beta"])[0]  # pyright: ignore[reportArgumentType]


OFF_POLICY = "logprobs", "advantages"
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES = {  # by the API's name
    "cross_entropy": ApiLoss(weighted_cross_entropy, ("weights",)),
    "importance_sampling": ApiLoss(importance, OFF_POLICY),
    "ppo": ApiLoss(ppo, OFF_POLICY, CLIP),
    "cispo": ApiLoss(clipped_weight, OFF_POLICY, CLIP),
    "dro": ApiLoss(penalised, OFF_POLICY, {"beta": 0.05}),
}
INPUTS = "weights", *OFF_POLICY  # of all of them
SETTINGS = {**CLIP, "beta": 0.05}
