"""Say what a decoder is made of: the numbers and choices that its forward reads."""

from dataclasses import dataclass

from jaxrl.models.rope import RopeScaling


@dataclass(frozen=True)
class TransformerConfig:
    """Describe the architecture of a Llama-, Qwen-, Mistral- or Gemma-shaped decoder.

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
    qk_norm: bool = False  # Qwen3, Gemma 3: RMSNorm over each query and key head
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


@dataclass(frozen=True)
class Experts:
    """Describe the MLP of a layer that is a mixture of experts: its router and its experts.

    Example: `Experts(count=128, per_token=8, width=768, normalise=True)` is Qwen3-30B-A3B's.
    """

    count: int  # E
    per_token: int  # k
    width: int  # F of each
    normalise: bool  # the weights of a token are divided by their sum
    scoring: str = "softmax"  # over all experts; "sigmoid": of each alone
    scaling: float = 1.0  # the weights are multiplied by it
    groups: int = 1  # DeepSeek-V3: a token chooses among the experts of its best groups
    groups_per_token: int = 1
    bias: bool = False  # DeepSeek-V3: added to the scores for the choice, not for the weights
    shared_width: int | None = None  # of an expert that all tokens have beside; None = none
    shared_gate: bool = False  # Qwen2-MoE: what the shared expert gives is times a sigmoid
