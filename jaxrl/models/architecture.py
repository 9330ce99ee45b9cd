"""Say what a decoder is made of: the numbers and choices that its forward reads."""

from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from jaxrl.models.rope import QueryGrowth, RopeScaling


@dataclass(frozen=True)
class Experts:
    """Describe a mixture of experts in the place of MLPs, and its router.

    Example: `Experts(count=128, per_token=8, width=768, normalise=True)` is Qwen3-30B-A3B's.
    """

    count: int
    per_token: int
    width: int  # of the MLP that is one expert
    scoring: str = "softmax"  # over all experts, or "sigmoid" of each
    normalise: bool = False  # the chosen experts' weights add up to 1
    scaling: float = 1.0  # of their weights
    groups: int = 1  # DeepSeek-V3: experts are chosen of the best groups alone
    groups_per_token: int = 1
    bias: bool = False  # DeepSeek-V3: a bias of each expert counts for the choice alone
    shared_width: int | None = None  # of an expert that every token has
    shared_gate: bool = False  # Qwen2: its output times a sigmoid of the token
    dense_layers: tuple[int, ...] = ()  # numbers of the layers that have an MLP
    names: str = "qwen"  # of the tensors in a checkpoint, a key of `EXPERT_WEIGHTS`
    linear_bias: bool = False  # gpt-oss: the router and the experts' matrices have biases
    swiglu_limit: float | None = None  # gpt-oss: gate and up are clamped, see `gated`
    swiglu_alpha: float | None = None

    @property
    def id_dtype(self) -> Any:
        """Return the smallest dtype that has the ids of all experts, and `count` for none."""
        return np.uint8 if self.count < 2**8 else np.uint16


@dataclass(frozen=True)
class TransformerConfig:
    """Describe the architecture of a decoder: that of Llama, and what other families change.

    Example: `TransformerConfig(vocab_size=32, hidden_size=64, intermediate_size=128, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=16)` is the 100k-parameter model of the quickstart.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    attention_bias: bool = False  # Qwen2: biases on q, k and v
    # Qwen3, Gemma 3: RMSNorm over each query and key head; OLMoE: "whole", over all of them
    qk_norm: bool | str = False
    initializer_range: float = 0.02
    attention_output_bias: bool = False
    activation: str = "silu"  # a key of `ACTIVATIONS`
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None  # a sliding layer sees this many tokens, its own included
    sliding_layers: tuple[bool, ...] = ()  # one per layer; empty: no layer slides
    local_rope_theta: float | None = None  # Gemma 3: unscaled rope of sliding layers; None = same
    post_norms: bool = False  # Gemma: norms after attention and after the MLP as well
    unit_offset_norm: bool = False  # Gemma: norms multiply by 1 + scale
    scale_embeddings: bool = False  # Gemma: embeddings times sqrt(D)
    query_pre_attn_scalar: float | None = None  # scores / its square root; None = h
    attention_softcap: float | None = None  # Gemma 2: scores -> cap tanh(scores / cap)
    final_softcap: float | None = None  # the same for logits
    value_head: str | None = None  # a critic: name of its head, which has the vocabulary's place
    experts: Experts | None = None
    pre_norms: bool = True  # False, OLMo 2: only those after attention and after the MLP
    layer_norm: bool = False  # Nemotron: LayerNorm with a bias in place of RMSNorm
    gated_mlp: bool = True  # False, Nemotron: down(activation(up x))
    rotary_dim: int | None = None  # of a head's dims, the first so many turn; None = all
    rope_pairs: bool = False  # GLM-4: neighbouring dims turn together, not i and i + h / 2
    rope_layers: tuple[bool, ...] = ()  # SmolLM3: whether a layer's heads turn; empty: all do
    query_growth: QueryGrowth | None = None  # Ministral 3
    attention_scale: float | None = None  # Granite: of the scores, in place of 1 / sqrt(h)
    embedding_multiplier: float = 1.0  # Granite
    residual_multiplier: float = 1.0  # Granite: of what attention and MLP add
    logits_scaling: float = 1.0  # Granite: logits are divided by it
    attention_sinks: bool = False  # gpt-oss: each head has a score that goes to no key
    names: str = "llama"  # of the tensors in a checkpoint, a key of `NAMES`


# Fields that checkpoints from before they existed do not have; `describe` leaves them out where
# they say nothing.
LATER_FIELDS = (
    *("experts", "pre_norms", "layer_norm", "gated_mlp", "rotary_dim", "rope_pairs"),
    *("rope_layers", "query_growth", "attention_scale", "embedding_multiplier"),
    *("residual_multiplier", "logits_scaling", "attention_sinks", "names"),
)
LATER_EXPERTS_FIELDS = ("linear_bias", "swiglu_limit", "swiglu_alpha")


DENSE, EXPERTS = KINDS = ("dense", "experts")  # of layers


class Stack(NamedTuple):
    """Name the layers of one kind, whose parameters are stacked."""

    kind: str
    layers: tuple[int, ...]  # their numbers in the model


class LayerRun(NamedTuple):
    """Name neighbouring layers of one kind, which one scan goes through."""

    kind: str
    in_stack: slice
    in_model: slice


class LayerFlags(NamedTuple):
    """Hold what distinguishes layers of one kind, each a bool or [L] bool.

    Attributes:
        slides: it sees `sliding_window` tokens.
        turns: its queries and keys have rotary positions.
    """

    slides: Any
    turns: Any


def layer_flags(config: TransformerConfig) -> LayerFlags:
    """Return the flags of all layers, [L] bool each."""
    no, yes = (False,) * config.num_layers, (True,) * config.num_layers
    return LayerFlags(
        np.asarray(config.sliding_layers or no), np.asarray(config.rope_layers or yes)
    )


def layer_stacks(config: TransformerConfig) -> tuple[Stack, ...]:
    """Return the stacks of a model: one for each kind of layer that it has."""
    experts, layers = config.experts, range(config.num_layers)
    dense = tuple(i for i in layers if experts is None or i in experts.dense_layers)
    rest = tuple(i for i in layers if i not in dense)
    return tuple(stack for stack in (Stack(DENSE, dense), Stack(EXPERTS, rest)) if stack.layers)


def routes_shape(config: TransformerConfig) -> tuple[int, int]:
    """Return (Lx, k): the layers with experts, and the experts of a token in each."""
    assert config.experts is not None
    return len(dict(layer_stacks(config))[EXPERTS]), config.experts.per_token


def layer_params(config: TransformerConfig, tokens: float = 1.0) -> float:
    """Return the number of parameters that tokens use together in the products of all layers.

    Of a layer's E experts a token uses k, and n tokens that choose evenly E (1 - (1 - k / E)^n);
    of infinitely many tokens they are all.
    """
    c = config
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    mlp = {DENSE: (2 + c.gated_mlp) * c.hidden_size * c.intermediate_size}
    if (e := c.experts) is not None:
        used = e.count * (1 - (1 - e.per_token / e.count) ** tokens)
        widths = used * e.width + (e.shared_width or 0)
        mlp[EXPERTS] = c.hidden_size * (e.count + 3 * widths + e.shared_gate)
    return sum(len(stack.layers) * (attention + mlp[stack.kind]) for stack in layer_stacks(c))


def by_kind(config: TransformerConfig, layers: Any) -> dict[str, Any]:
    """Return what `params["layers"]`, or a tree parallel to it, has of each kind of layer.

    A model of one kind has its arrays there, others have a dict of them for each kind.
    """
    stacks = layer_stacks(config)
    return {stacks[0].kind: layers} if len(stacks) == 1 else layers


def joined(stacks: dict[str, Any]) -> Any:
    """Return what `params["layers"]` is, given the layers of each kind: undo `by_kind`."""
    return stacks if len(stacks) > 1 else next(iter(stacks.values()))


def layer_runs(config: TransformerConfig) -> list[LayerRun]:
    """Return the runs of a model from its first layer to its last."""
    place = {i: (s.kind, n) for s in layer_stacks(config) for n, i in enumerate(s.layers)}
    runs = []
    for kind, group in groupby(range(config.num_layers), lambda i: place[i][0]):
        first, *rest = group
        begin, length = place[first][1], 1 + len(rest)
        runs.append(LayerRun(kind, slice(begin, begin + length), slice(first, first + length)))
    return runs
