"""What a layer keeps for its backward pass, by name; the rest is computed again.

| policy | keeps, per layer | computes again |
|---|---|---|
| none | everything | nothing |
| dots | results of the matrix products with weights | norms, activations, attention |
| attention | its input, the attention output | all but the attention itself |
| full | its input | the layer |
| offload | its input, in host memory | the layer |

On GPUs "attention" does not spare its kernels the second forward pass: their statistics have no
name, so only the output is kept. Chen et al., https://arxiv.org/abs/1604.06174. The names are those
that `decoder_layer` gives.
"""

from collections.abc import Callable
from typing import Any

import jax

ATTENTION, LAYER_INPUT = "attention", "layer_input"
_policies = jax.checkpoint_policies
REMAT_POLICIES: dict[str, Any] = {
    "none": None,
    "dots": _policies.dots_with_no_batch_dims_saveable,
    "attention": _policies.save_only_these_names(ATTENTION),
    "full": _policies.nothing_saveable,
    "offload": _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


def recompute(func: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """Let `func` keep for its backward pass what the policy says.

    Raises:
        ValueError: no policy of that name.
    """
    if policy not in REMAT_POLICIES:
        raise ValueError(f"remat={policy!r} is unknown; choose one of {list(REMAT_POLICIES)}")
    return func if policy == "none" else jax.checkpoint(func, policy=REMAT_POLICIES[policy])
