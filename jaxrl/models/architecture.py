"""Say what a decoder is made of: the numbers and choices that its forward reads."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
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
class DeltaNet:
    """Describe gated DeltaNet layers: linear attention whose state is corrected by the delta rule.

    Each query and key head serves neighbouring value heads. Yang et al., Gated Delta Networks,
    https://arxiv.org/abs/2412.06464.

    Example: `DeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128, window=4)` is
    Qwen3.5-9B's.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    window: int  # tokens that the convolution of queries, keys and values sees
    grouped: bool = False  # Qwen3-Next: one matrix has all that belongs to a key head

    @property
    def channels(self) -> int:
        """Return the channels of the convolution: of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class ShortConvolution:
    """Describe gated short convolutions in the place of attention: LFM2's.

    https://arxiv.org/abs/2511.23404.
    """

    window: int  # tokens
    bias: bool = False  # of both projections and the convolution


@dataclass(frozen=True)
class Latent:
    """Describe latent attention: the keys and values of all heads are made of one short vector.

    A query and a key have `plain` dims, and behind them `turned` ones with rotary positions, whose
    key is the same for all heads. DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.

    Example: `Latent(rank=512, plain=128, turned=64, value_dim=128, query_rank=1536)` is
    DeepSeek-V3's: 576 numbers of a token in the cache, where 128 heads have 40,960.
    """

    rank: int  # numbers of the vector
    plain: int
    turned: int
    value_dim: int  # of a head
    query_rank: int | None = None  # of the vector that queries are made of; None = of the token
    norm_eps: float = 1e-6  # of both vectors, whatever that of the layers


class OriginTensors(NamedTuple):
    """Say how the tensors of an export lie in the folder that the model was read from.

    Attributes:
        dtypes: of those that the model has, by the name in `hf_shapes`; of safetensors.
        stacked_experts: one holds all experts of a layer, see `weight_map`.
        prefix: what stands there for the first part of a name, as "model.".
        others: bytes of those that the model does not have, by their name there.
    """

    dtypes: Mapping[str, str]
    stacked_experts: bool
    prefix: Mapping[str, str]
    others: Mapping[str, int]

    def renamed(self, name: str) -> str:
        """Return the name there of one in `hf_shapes`."""
        first = next((p for p in self.prefix if name.startswith(p)), "")
        return self.prefix.get(first, "") + name.removeprefix(first)


@dataclass(frozen=True)
class Origin:
    """Hold what an export keeps of the folder that a model was read from.

    Attributes:
        folder: path or hub id.
        config: its config.json, with what the run put into it.
        generation: its generation_config.json; empty without one.
        tensors: how its weights lie there; None = the model's are random.
    """

    folder: str
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    tensors: OriginTensors | None


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
    output_gate: bool = False  # Qwen3-Next: attention times a sigmoid of the token, by dim
    mixers: tuple[str, ...] = ()  # one of `MIXERS` per layer; empty: all attention
    delta_net: DeltaNet | None = None
    convolution: ShortConvolution | None = None
    latent: Latent | None = None  # h is the width of queries and keys, and each head has its own
    # the tokenizer has the first so many ids: the others are padding, of probability 0; None = all
    known_ids: int | None = None
    # of whoever read it, no part of what the model is: equal models may have others
    origin: Origin | None = field(default=None, compare=False, repr=False)

    def described(self) -> dict[str, Any]:
        """Return all that the model is by field, without where it was read from."""
        known = asdict(replace(self, origin=None))
        del known["origin"]
        return known


# Fields that checkpoints from before they existed do not have; `describe` leaves them out where
# they say nothing.
LATER_FIELDS = (
    *("experts", "pre_norms", "layer_norm", "gated_mlp", "rotary_dim", "rope_pairs"),
    *("rope_layers", "query_growth", "attention_scale", "embedding_multiplier"),
    *("residual_multiplier", "logits_scaling", "attention_sinks", "names"),
    *("output_gate", "mixers", "delta_net", "convolution", "latent"),
)
LATER_EXPERTS_FIELDS = ("linear_bias", "swiglu_limit", "swiglu_alpha")
# Of no weight: checkpoints, folders and exports agree whatever they are.
NOT_OF_WEIGHTS = ("known_ids",)
SOFTMAX, DELTA, CONVOLUTION = MIXERS = ("attention", "delta", "convolution")
DENSE, EXPERTS = "dense", "experts"  # what a layer has behind its mixer


class Kind(NamedTuple):
    """Say what layers of one kind are made of."""

    mixer: str
    mlp: str


KINDS = {  # of layers
    mlp if mixer == SOFTMAX else f"{mixer}_{mlp}": Kind(mixer, mlp)
    for mixer in MIXERS
    for mlp in (DENSE, EXPERTS)
}


class Stack(NamedTuple):
    """Name the layers of one kind, whose parameters are stacked."""

    kind: str
    layers: tuple[int, ...]  # their numbers in the model


class LayerRun(NamedTuple):
    """Name neighbouring layers of one kind, which one scan goes through."""

    kind: str
    in_stack: slice
    in_model: slice
    in_routes: slice  # among the layers with experts


class Period(NamedTuple):
    """Name runs that the model has several times, one after the other.

    Attributes:
        runs: of the first time.
        times: how often.
    """

    runs: tuple[LayerRun, ...]
    times: int

    @property
    def starts(self) -> dict[str, int]:
        """Return where it begins in the stack of each of its kinds."""
        return {run.kind: run.in_stack.start for run in reversed(self.runs)}

    @property
    def from_its_start(self) -> list[LayerRun]:
        """Return its runs as they lie in itself."""
        first, starts = self.runs[0], self.starts
        return [
            LayerRun(
                run.kind,
                _moved(run.in_stack, starts[run.kind]),
                _moved(run.in_model, first.in_model.start),
                _moved(run.in_routes, first.in_routes.start),
            )
            for run in self.runs
        ]

    @property
    def routed(self) -> int:
        """Return how many layers with experts it has each time."""
        return sum(_size(run.in_routes) for run in self.runs)

    def layers(self, kind: str | None = None) -> int:
        """Return how many layers it has each time, of a kind or of all."""
        return sum(_size(run.in_model) for run in self.runs if kind in (None, run.kind))


def with_known_ids(config: TransformerConfig, known: int | None) -> TransformerConfig:
    """Return the model with logits of its first `known` ids alone; None = of all that it has."""
    return replace(config, known_ids=known if known and known < config.vocab_size else None)


def layer_mixers(config: TransformerConfig) -> tuple[str, ...]:
    """Return the mixer of each layer, of `MIXERS`."""
    return config.mixers or (SOFTMAX,) * config.num_layers


def keeps_states(config: TransformerConfig) -> bool:
    """Return whether a model has layers that keep a state in the place of keys and values."""
    return any(mixer != SOFTMAX for mixer in layer_mixers(config))


def cached_attention(config: TransformerConfig) -> TransformerConfig:
    """Return the model with its attention as the engine's cache has it.

    Latent attention has one key head there, the latent and the turned dims, for all queries.
    """
    if (n := config.latent) is None:
        return config
    scale = config.attention_scale or config.head_dim**-0.5
    return replace(config, num_kv_heads=1, head_dim=n.rank + n.turned, attention_scale=scale)


def layer_kinds(config: TransformerConfig) -> list[str]:
    """Return the kind of each layer, a key of `KINDS`."""
    names, experts = {kind: name for name, kind in KINDS.items()}, config.experts
    dense = range(config.num_layers) if experts is None else experts.dense_layers
    return [
        names[Kind(mixer, DENSE if i in dense else EXPERTS)]
        for i, mixer in enumerate(layer_mixers(config))
    ]


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
    kinds = layer_kinds(config)
    stacks = (Stack(kind, tuple(i for i, k in enumerate(kinds) if k == kind)) for kind in KINDS)
    return tuple(stack for stack in stacks if stack.layers)


def layers_with(config: TransformerConfig, part: str) -> int:
    """Count the layers that have a mixer of `MIXERS`, or an MLP that is `DENSE` or `EXPERTS`."""
    return sum(part in KINDS[kind] for kind in layer_kinds(config))


def routes_shape(config: TransformerConfig) -> tuple[int, int]:
    """Return (Lx, k): the layers with experts, and the experts of a token in each."""
    assert config.experts is not None
    return layers_with(config, EXPERTS), config.experts.per_token


def layer_params(config: TransformerConfig, tokens: float = 1.0) -> float:
    """Return the number of parameters that tokens use together in the products of all layers.

    Of a layer's E experts a token uses k, and n tokens that choose evenly E (1 - (1 - k / E)^n);
    of infinitely many tokens they are all.
    """
    c = config
    queries = (2 + c.output_gate) * c.num_heads
    mixer = {SOFTMAX: c.hidden_size * c.head_dim * (queries + 2 * c.num_kv_heads)}
    if (latent := c.latent) is not None:
        token, wide, rank = c.hidden_size, c.num_heads * c.head_dim, latent.query_rank
        makes_queries = token * wide if rank is None else rank * (token + wide)
        expands = latent.rank * c.num_heads * (latent.plain + latent.value_dim)
        others = token * (latent.rank + latent.turned + c.num_heads * latent.value_dim)
        mixer[SOFTMAX] = makes_queries + expands + others
    if (n := c.delta_net) is not None:
        values = n.value_heads * n.value_dim
        widths = n.channels + 2 * values + 2 * n.value_heads  # also of the gate, and the output
        mixer[DELTA] = c.hidden_size * widths + n.channels * n.window
    if (convolution := c.convolution) is not None:
        mixer[CONVOLUTION] = c.hidden_size * (4 * c.hidden_size + convolution.window)
    mlp = {DENSE: (2 + c.gated_mlp) * c.hidden_size * c.intermediate_size}
    if (e := c.experts) is not None:
        used = e.count * (1 - (1 - e.per_token / e.count) ** tokens)
        widths = used * e.width + (e.shared_width or 0)
        mlp[EXPERTS] = c.hidden_size * (e.count + 3 * widths + e.shared_gate)
    kinds = [(KINDS[stack.kind], len(stack.layers)) for stack in layer_stacks(c)]
    return sum(number * (mixer[kind.mixer] + mlp[kind.mlp]) for kind, number in kinds)


def attention_flops(config: TransformerConfig) -> int:
    """Return the FLOPs of scores and values for a token and a position that it sees.

    2 for q k^T and 2 for probs v, per head dim, in each layer that has attention.
    """
    values = config.head_dim if config.latent is None else config.latent.value_dim
    return 2 * layers_with(config, SOFTMAX) * config.num_heads * (config.head_dim + values)


def state_flops(config: TransformerConfig) -> int:
    """Return the FLOPs by which a token reads, corrects and reads the states of the delta rule."""
    net = config.delta_net
    if net is None:
        return 0
    return 6 * layers_with(config, DELTA) * net.value_heads * net.key_dim * net.value_dim


def position_elements(config: TransformerConfig) -> int:
    """Return the numbers of a position in the cache: keys and values where there is attention."""
    kept = cached_attention(config)
    parts = 2 if config.latent is None else 1  # values are dims of the key there
    return parts * layers_with(config, SOFTMAX) * kept.num_kv_heads * kept.head_dim


def state_elements(config: TransformerConfig) -> int:
    """Return the numbers of a row's states, in all layers that keep one."""
    elements, net = 0, config.delta_net
    if net is not None:
        memory = net.value_heads * net.key_dim * net.value_dim
        elements += layers_with(config, DELTA) * (memory + (net.window - 1) * net.channels)
    if config.convolution is not None:
        width = (config.convolution.window - 1) * config.hidden_size
        elements += layers_with(config, CONVOLUTION) * width
    return elements


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
    runs: list[LayerRun] = []
    of_kind, layer, routed = dict.fromkeys(KINDS, 0), 0, 0
    for kind, group in groupby(layer_kinds(config)):
        size = len(list(group))
        experts = size if KINDS[kind].mlp == EXPERTS else 0
        begins = of_kind[kind], layer, routed
        sizes = size, size, experts
        slices = (slice(at, at + n) for at, n in zip(begins, sizes, strict=True))
        runs.append(LayerRun(kind, *slices))
        of_kind[kind], layer, routed = of_kind[kind] + size, layer + size, routed + experts
    return runs


def layer_periods(config: TransformerConfig) -> list[Period]:
    """Return the runs of a model as they repeat.

    Three layers of one kind and one of another, twelve times, are one period; a run that does not
    repeat is one, once.
    """
    left, periods = layer_runs(config), []
    while left:
        shapes = [(run.kind, _size(run.in_model)) for run in left]
        for length in range(1, len(left) // 2 + 1):
            times = 1
            while shapes[times * length :][:length] == shapes[:length]:
                times += 1
            if times > 1:
                break
        else:
            length = times = 1
        periods.append(Period(tuple(left[:length]), times))
        left = left[times * length :]
    return periods


def _size(part: slice) -> int:
    return part.stop - part.start


def _moved(part: slice, start: int) -> slice:
    return slice(part.start - start, part.stop - start)
