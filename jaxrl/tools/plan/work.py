"""Count the work of a run's phases from shapes: FLOPs, and bytes that a device must read.

XLA's own count takes the body of a loop once, and nothing of a kernel.
"""

from typing import NamedTuple

from jaxrl.models.architecture import (
    TransformerConfig,
    attention_flops,
    layer_params,
    position_elements,
    state_elements,
    state_flops,
)

# Share of the layers' products and attention that a remat policy computes again.
RECOMPUTED = {
    "none": (0, 0),
    "dots": (0, 1),
    "attention": (1, 0),
    "full": (1, 1),
    "offload": (1, 1),
}


STATE_BYTES = 4  # nearly all of a state is float32


class Work(NamedTuple):
    """Hold what one execution of a program computes, on all its devices together.

    Attributes:
        flops: useful ones.
        recomputed: what is computed again for the backward pass.
        weight_reads: times that a device reads all its weights, in the compute dtype.
        attention: of all these FLOPs those of scores and values, which a kernel may hide.
        head: those of the vocabulary head, of which the same holds.
    """

    flops: float
    recomputed: float = 0.0
    weight_reads: int = 0
    attention: float = 0.0
    head: float = 0.0


def forward_work(model: TransformerConfig, rows: int, length: int, wanted: int) -> Work:
    """Count one forward pass over rows of `length` tokens, `wanted` of which are scored."""
    layers = rows * layers_flops(model, 0, length)
    attention = layers - 2 * rows * layer_params(model) * length
    head = rows * _head(model, wanted)
    return Work(layers + head, weight_reads=1, attention=attention, head=head)


def gradient_work(
    model: TransformerConfig, rows: int, length: int, wanted: int, remat: str, *, frozen: bool
) -> Work:
    """Count the gradient of rows of `length` tokens; the head always computes its logits again.

    Args:
        frozen: the weights have no gradients, adapters have.
    """
    once = forward_work(model, rows, length, wanted)
    products = 2 * rows * layer_params(model) * length
    again, attention = RECOMPUTED[remat]
    recomputed, passes = (
        once.head + again * products + attention * once.attention,
        2 if frozen else 3,
    )
    return Work(
        passes * once.flops,
        recomputed,
        weight_reads=2 + again,
        attention=(passes + attention) * once.attention,
        head=(passes + 1) * once.head,
    )


def _head(model: TransformerConfig, wanted: int) -> int:
    """Return the FLOPs of the head of a row; a critic's is next to nothing."""
    return 0 if model.value_head else head_flops(model, wanted)


def layers_flops(model: TransformerConfig, start: int, stop: int) -> float:
    """Return the FLOPs of the layers for positions start..stop-1 of one sequence.

    2 per parameter that a token uses; see `attention_flops`, and `state_flops` of layers without.
    """
    seen = (stop * (stop + 1) - start * (start + 1)) // 2
    each = 2 * layer_params(model) + state_flops(model)
    return each * (stop - start) + attention_flops(model) * seen


def head_flops(model: TransformerConfig, tokens: int) -> int:
    """Return the FLOPs of the logits of `tokens` positions."""
    return 2 * model.hidden_size * model.vocab_size * tokens


def decode_step_bytes(
    model: TransformerConfig, batch: float, context: float, bytes_per_element: int
) -> float:
    """Return the bytes that one decode step must read.

    They are every weight once that the rows use, the keys and values of each row, and its states,
    which are written, too.

    Args:
        batch: rows; a part of one where some are dead.
        context: mean positions seen by a row.
    """
    weights = layer_params(model, batch) + model.hidden_size * model.vocab_size
    cache = position_elements(model) * context * batch
    states = 2 * STATE_BYTES * state_elements(model) * batch
    return bytes_per_element * (weights + cache) + states
