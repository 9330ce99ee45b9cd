"""Do faster than plain XLA what accelerators can: references, kernels, and the choice."""

from jaxrl.models.kernels.delta_rule import DELTA_RULE
from jaxrl.models.kernels.grouped_product import GROUPED_PRODUCT
from jaxrl.models.kernels.head_log_probs import HEAD_LOG_PROBS
from jaxrl.models.kernels.packed_attention import PACKED_ATTENTION
from jaxrl.models.kernels.paged_attention import PAGED_ATTENTION
from jaxrl.models.kernels.tree_attention import TREE_ATTENTION

OPERATIONS = {
    operation.name: operation
    for operation in (
        PACKED_ATTENTION,
        TREE_ATTENTION,
        HEAD_LOG_PROBS,
        PAGED_ATTENTION,
        GROUPED_PRODUCT,
        DELTA_RULE,
    )
}

__all__ = [
    "DELTA_RULE",
    "GROUPED_PRODUCT",
    "HEAD_LOG_PROBS",
    "OPERATIONS",
    "PACKED_ATTENTION",
    "PAGED_ATTENTION",
    "TREE_ATTENTION",
]
