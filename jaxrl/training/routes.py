"""The experts that tokens are sent to again, as a model has them."""

from collections.abc import Sequence

import numpy as np

from jaxrl.models.adapter import AdaptedModel
from jaxrl.models.architecture import TransformerConfig, routes_shape


def routes_of_any_token(model: TransformerConfig | AdaptedModel, replay: str) -> np.ndarray | None:
    """Return some experts [Lx, k], as a batch has them of each token; None: none are replayed.

    Args:
        replay: `trainer.policy.router_replay`.
    """
    if replay == "off" or isinstance(model, AdaptedModel) or model.experts is None:
        return None
    return np.zeros(routes_shape(model), model.experts.id_dtype)


def routes_of_model(rows: Sequence[np.ndarray], model: TransformerConfig) -> list[np.ndarray]:
    """Return the experts of each row [n, Lx, k] in the model's dtype; [0, 0, 0] is a row of none.

    A token of which one id is no expert's is as one of which nothing is known.

    Raises:
        ValueError: a row is of other layers, or of another number of experts; it is named.
    """
    assert model.experts is not None
    shape, dtype, count = routes_shape(model), model.experts.id_dtype, model.experts.count
    found = []
    for number, given in enumerate(rows):
        row = given if len(given) else np.zeros((0, *shape), dtype)
        if row.shape[1:] != shape:
            raise ValueError(
                f"rollout_expert_indices[{number}] has {row.shape[1:]} (layers, experts of a token)"
                f", the model {shape}: give those of its layers with experts alone"
            )
        known = (row < count).all(axis=(1, 2), keepdims=True)
        found.append(np.where(known, row, np.iinfo(dtype).max).astype(dtype))
    return found
