"""The adapters of many models on one base: what they are trained with, and the programs.

Adapters of S models lie stacked on the devices, with the gradient that each has gathered and the
moments of its optimizer. A tile (`tiles.py`) belongs to one of them. One program computes tiles of
any models one after the other, in a loop whose body and shapes never change, and adds each gradient
to what its model has: so no bit of a model depends on who else is there, nor on how many are. The
base has no gradient, and a product of a tile fills the device, as a row of training does.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.models.lora import LoraConfig, attach
from jaxrl.models.placement import model_shardings
from jaxrl.models.transformer import Params, abstract_params, init_params
from jaxrl.parallel import Placement, fetch, replicated
from jaxrl.parallel.jit_once import Bound, jit_once
from jaxrl.parallel.rules import batch_devices
from jaxrl.tools.tinker.losses import LOSSES
from jaxrl.tools.tinker.tiles import Tile
from jaxrl.types import Array, ModelRows

PER_DISPATCH = 16  # tiles that a program computes at most


class Tenant(struct.PyTreeNode):
    """Hold what training changes of one model; of S models stacked, with a leading S."""

    adapters: Params
    gradients: Params  # since the last update
    mu: Params
    nu: Params
    count: Array  # [] updates
    scale: Array  # [] alpha / rank


class Adam(NamedTuple):
    """Hold the numbers of an update, by the API's names; those that are absent are off."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


def new_tenant(lora: LoraConfig, seed: int, rank: int, alpha: float, chosen: set[str]) -> Tenant:
    """Draw the adapters of a model, on the host, and the rest of it as zeros.

    Columns beyond its rank, and adapters of matrices that are not trained, are 0 on both sides:
    then their gradients are, too, and they stay so.

    Args:
        lora: of all models: the largest rank, all matrices.
        chosen: adapters that are trained, by the name of their leaf.
    """
    adapters = jax.device_get(init_params(lora, seed))
    for name, pair in adapters.items():
        keep = np.arange(lora.rank) < (rank if name in chosen else 0)
        pair["a"] = pair["a"] * keep.astype(np.float32)
        pair["b"] = np.zeros_like(pair["b"])
    zeros = jax.tree.map(np.zeros_like, adapters)
    return Tenant(adapters, zeros, zeros, zeros, count=np.int32(0), scale=np.float32(alpha / rank))


class Tenants:
    """Hold the models that are on the devices, and run their programs.

    Args:
        forward: of the base, `(params, rows, with_entropy=, of_ids=, top_k=) -> log_probs [R, L],
            entropy` and perhaps log-probs of given ids, or the likeliest, at temperature 1.
        base: its parameters.
        lora: the largest adapters of a model.
        placement: of both.
        slots: S, models that are there at once.

    Attributes:
        rows: R, of a tile.
    """

    def __init__(
        self,
        forward: Callable[..., tuple[Array, ...]],
        base: Params,
        lora: LoraConfig,
        placement: Placement,
        slots: int,
    ) -> None:
        self._base, self.lora, self.slots = base, lora, slots
        self.rows = batch_devices(placement.mesh, placement.rules)
        self._whole = replicated(placement.mesh)
        axes = model_shardings(lora, placement)
        stacked = jax.tree.map(lambda x: NamedSharding(x.mesh, PartitionSpec(None, *x.spec)), axes)
        self._one = Tenant(axes, axes, axes, axes, self._whole, self._whole)
        shardings = Tenant(stacked, stacked, stacked, stacked, self._whole, self._whole)
        shapes = jax.tree.map(lambda x: (slots, *x.shape), abstract_params(lora))
        trees = [_zeros(shapes) for _ in range(4)]
        empty = Tenant(*trees, count=np.zeros(slots, np.int32), scale=np.zeros(slots, np.float32))
        self._all = jax.device_put(empty, shardings)
        self._likeliest = jit_once(Bound(_likeliest, forward, lora), static_argnums=3)
        self._score = jit_once(Bound(_compute, forward, lora, learns=False))
        self._learn = jit_once(
            Bound(_compute, forward, lora, learns=True),
            donate_argnums=0,
            out_shardings=(shardings, None, None),
        )
        self._update = jit_once(_update, donate_argnums=0, out_shardings=(shardings, None))
        self._put = jit_once(_put, donate_argnums=0, out_shardings=shardings)
        self._take = jit_once(_take, out_shardings=self._one)

    def put(self, slot: int, tenant: Tenant) -> None:
        """Bring a model to a slot; what was there is gone."""
        self._all = self._put(self._all, jax.device_put(tenant, self._one), np.int32(slot))

    def take(self, slot: int) -> Tenant:
        """Return the model of a slot, on the host."""
        return fetch(self._take(self._all, np.int32(slot)))

    def run(
        self, tiles: Sequence[Tile], *, learns: bool
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Compute tiles of one shape, in their order.

        Args:
            learns: gradients are added to those of the models.

        Returns:
            log-probs [R, L] of the targets, and losses [R, L], of each tile; [R, L, K] of several.
        """
        log_probs, losses = [], []
        for first in range(0, len(tiles), PER_DISPATCH):
            part = tiles[first : first + PER_DISPATCH]
            full = [*part, *[part[0]] * (PER_DISPATCH - len(part))]
            stacked = jax.tree.map(lambda *x: np.stack(x), *full)
            given = self._all, self._base, stacked, np.int32(len(part))
            if learns:
                self._all, *found = self._learn(*given)
            else:
                found = self._score(*given)
            for kept, new in zip((log_probs, losses), fetch(found), strict=True):
                kept += list(new[: len(part)])
        return log_probs, losses

    def likeliest(self, tile: Tile, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the likeliest ids at the places of a tile, best first, and their log-probs.

        Returns:
            [R, L, K] each; K is `number`, or the vocabulary where that is smaller.
        """
        return fetch(self._likeliest(self._all, self._base, tile, number))

    def update(self, slot: int, adam: Adam) -> dict[str, float]:
        """Make an optimizer step of a model with the gradient that it has, which is then 0.

        A gradient that is not finite changes nothing.

        Returns:
            grad_norm, before it is clipped, and skipped_updates, 0 or 1.
        """
        numbers = jax.tree.map(np.float32, adam)
        self._all, (norm, finite) = self._update(self._all, np.int32(slot), numbers)
        return {"grad_norm": float(norm), "skipped_updates": float(not finite)}


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(
        lambda shape: np.zeros(shape, np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def _take(tenants: Tenant, slot: Array) -> Tenant:
    return jax.tree.map(lambda x: x[slot], tenants)


def _put(tenants: Tenant, tenant: Tenant, slot: Array) -> Tenant:
    return jax.tree.map(lambda all_, x: all_.at[slot].set(x), tenants, tenant)


def _compute(
    forward: Callable[..., tuple[Array, ...]],
    lora: LoraConfig,
    tenants: Tenant,
    base: Params,
    tiles: Tile,
    number: Array,
    *,
    learns: bool,
) -> tuple[Any, ...]:
    """Compute the first `number` of some tiles [N, ...].

    Returns:
        The tenants with their gradients, if they learn; log-probs and losses [N, R, L], of several
        targets [N, R, L, K].
    """

    def of_tile(adapters: Params, scale: Array, tile: Tile) -> tuple[Array, tuple[Array, Array]]:
        several = tile.ids is not None
        given = _given(lora, base, adapters, scale, tile)
        found = forward(*given, with_entropy=False, of_ids=several)[2 * several]
        log_probs = jnp.roll(found, -1, axis=1)  # a place's score is that of its target
        if tile.id_weights is not None:  # cross-entropy with several targets
            losses = jnp.where(tile.id_weights != 0, -tile.id_weights * log_probs, 0)
            return losses.sum(), (log_probs, losses)
        branches = [
            lambda x, loss=loss: loss.of_tokens(x, tile.inputs, tile.settings)
            for loss in LOSSES.values()
        ]
        losses = jax.lax.switch(tile.loss, branches, log_probs)
        losses = jnp.where(tile.segment_ids > 0, losses, 0)
        return losses.sum(), (log_probs, losses)

    def body(i: Array, given: tuple[Any, ...]) -> tuple[Any, ...]:
        gradients, *kept = given
        tile = jax.tree.map(lambda x: x[i], tiles)
        adapters = jax.tree.map(lambda x: x[tile.slot], tenants.adapters)
        one = adapters, tenants.scale[tile.slot], tile
        if learns:
            new, found = jax.grad(of_tile, has_aux=True)(*one)
            gradients = jax.tree.map(lambda x, g: x.at[tile.slot].add(g), gradients, new)
        else:
            _, found = of_tile(*one)
        return gradients, *(x.at[i].set(y) for x, y in zip(kept, found, strict=True))

    zeros = jnp.zeros((tiles.tokens if tiles.ids is None else tiles.ids).shape, jnp.float32)
    start = tenants.gradients if learns else ()
    gradients, *kept = jax.lax.fori_loop(0, number, body, (start, zeros, zeros))
    return (tenants.replace(gradients=gradients), *kept) if learns else tuple(kept)


def _given(
    lora: LoraConfig, base: Params, adapters: Params, scale: Array, tile: Tile
) -> tuple[Params, ModelRows]:
    """Return what a forward of a tile is given."""
    scaled = {n: {"a": w["a"], "b": w["b"] * scale} for n, w in adapters.items()}
    wanted = (tile.segment_ids > 0).at[:, -1].set(False)
    rows = ModelRows(tile.tokens, tile.positions, tile.segment_ids, tile.targets, wanted)
    return attach(lora, base, scaled), rows.replace(teacher_ids=tile.ids)


def _likeliest(
    forward: Callable[..., tuple[Array, ...]],
    lora: LoraConfig,
    tenants: Tenant,
    base: Params,
    tile: Tile,
    number: int,
) -> tuple[Array, Array]:
    adapters = jax.tree.map(lambda x: x[tile.slot], tenants.adapters)
    given = _given(lora, base, adapters, tenants.scale[tile.slot], tile)
    *_, ids, log_probs = forward(*given, with_entropy=False, top_k=number)
    # a place's scores are of what follows; the last is of all other ids
    return jnp.roll(ids, -1, axis=1), jnp.roll(log_probs[..., :-1], -1, axis=1)


def _update(tenants: Tenant, slot: Array, adam: Adam) -> tuple[Tenant, tuple[Array, Array]]:
    """Return the tenants after an update of one, as `make_optimizer` has it.

    Its norm, and whether that is finite, come along.
    """
    one = _take(tenants, slot)
    norm = optax.tree.norm(one.gradients)
    finite = jnp.isfinite(norm)
    clipped = (adam.grad_clip_norm > 0) & (norm > adam.grad_clip_norm)
    factor = jnp.where(clipped, adam.grad_clip_norm / norm, 1.0)
    gradients = jax.tree.map(lambda g: g * factor, one.gradients)
    optimizer = optax.chain(
        optax.scale_by_adam(adam.beta1, adam.beta2, adam.eps),
        optax.add_decayed_weights(adam.weight_decay),
        optax.scale(-adam.learning_rate),
    )
    before = optimizer.init(one.adapters)
    state = optax.tree_utils.tree_set(before, count=one.count, mu=one.mu, nu=one.nu)
    updates, state = optimizer.update(gradients, state, one.adapters)
    moved = optax.tree_utils.tree_get(state, "mu"), optax.tree_utils.tree_get(state, "nu")
    changed = (optax.apply_updates(one.adapters, updates), *moved, one.count + 1)
    kept = one.adapters, one.mu, one.nu, one.count
    adapters, mu, nu, count = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), changed, kept
    )
    zeros = jax.tree.map(jnp.zeros_like, gradients)
    after = Tenant(adapters, zeros, mu, nu, count, one.scale)
    return _put(tenants, after, slot), (norm, finite)
