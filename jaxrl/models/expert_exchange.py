"""How tokens come to the devices of their experts, and what experts make of them back.

Two ways, which give the same numbers, up to the order of sums:

- `gather`: each device gathers the tokens of all, and scatters the sums of its experts.
- `all_to_all`: a token goes once to each device that has any of its experts, in a buffer of a fixed
  number of places for each pair of devices. Tokens that find no place travel in a further round, so
  none is dropped, whatever the load, and a buffer cannot overflow.

Either way tokens travel in the compute dtype, and sums and gradients in float32.

Shape legend: S devices, n tokens of a device, D model width, E experts, k experts of a token,
C places for the tokens from one device to another.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.models.architecture import Experts
from jaxrl.types import Array

GATHER, ALL_TO_ALL = "gather", "all_to_all"
SLACK = 1.25  # places for each token that is expected
MOST = 0.75  # of the gather's bytes: routing by places costs some sorting and more collectives
LEAST_SAVED = 2**20  # bytes there; fewer travel while further collectives are started
FURTHER = "further_rounds"  # scope of their loops, which do not run where loads are even
FLOAT32 = 4
# (weights, tokens [m, D], ids [m, k], their weights [m, k]) -> sums [m, D] float32 of the experts
# of a device; ids are as all devices know them
Mix = Callable[[Any, Array, Array, Array], Array]


class Exchange(NamedTuple):
    """Say how tokens travel in a layer.

    Attributes:
        way: `GATHER` or `ALL_TO_ALL`.
        devices: S.
        places: tokens that a device sends to each other one: n, or C in each round.
    """

    way: str
    devices: int
    places: int

    def there(self, width: int, per_token: int, size: int) -> int:
        """Return the bytes that a device sends: tokens, the ids of their experts, and weights.

        Args:
            size: bytes of a number of the compute dtype.
        """
        return self._sent(width * size + per_token * (4 + FLOAT32))

    def back(self, width: int) -> int:
        """Return the bytes of the sums that a device sends."""
        return self._sent(width * FLOAT32)

    def gradient(self, width: int, per_token: int) -> int:
        """Return the bytes of the gradients of sums, tokens and weights that a device sends."""
        return self._sent((2 * width + per_token) * FLOAT32)

    def _sent(self, of_token: int) -> int:
        return (self.devices - 1) * self.places * of_token


def exchange_of(
    experts: Experts, width: int, tokens: int, devices: int, size: int, named: str = "auto"
) -> Exchange:
    """Choose how the tokens of a device travel.

    Of k different experts, each as likely as any other, a device that has E / S has at least one
    with a probability of 1 - C(E - E/S, k) / C(E, k), about 1 - (1 - 1/S)^k; so many of the tokens
    go there, and `SLACK` more find a place in the first round. `all_to_all` is chosen where it
    sends at most `MOST` of what `gather` sends, and `LEAST_SAVED` less.

    Args:
        width: D.
        tokens: n.
        devices: S, which divide the experts.
        size: bytes of a number of the compute dtype.
        named: "auto", or what is taken in any case.
    """
    gather = Exchange(GATHER, devices, tokens)
    if named == GATHER:
        return gather
    e, k = experts.count, experts.per_token
    share = 1 - math.comb(e - e // devices, k) / math.comb(e, k)
    places = math.ceil(SLACK * share * tokens / 8) * 8
    there = Exchange(ALL_TO_ALL, devices, min(places, tokens))
    if named == ALL_TO_ALL:
        return there
    given = width, k, size
    saved = gather.there(*given) - there.there(*given)
    return there if there.places <= MOST * tokens and saved >= LEAST_SAVED else gather


def over_devices(
    exchange: Exchange, mix: Mix, axis: str, dtype: Any, weights: Any, tokens: Array, routes: Any
) -> Array:
    """Return the sums [n, D] float32 of all experts of the tokens of each device of an axis.

    Args:
        mix: what a device does for tokens with its own experts.
        dtype: in which tokens travel.
        weights: of the experts that are here.
        tokens: [n, D] float32, of values that `dtype` has.
        routes: ids [n, k] and weights [n, k]; a token whose ids are all E goes nowhere.
    """
    if exchange.way == ALL_TO_ALL:
        return _all_to_all(exchange, mix, axis, dtype, weights, tokens, *routes)
    gathered = (jax.lax.all_gather(x, axis, tiled=True) for x in routes)
    out = mix(weights, _all_tokens(tokens, axis, dtype), *gathered)
    return jax.lax.psum_scatter(out, axis, scatter_dimension=0, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_tokens(tokens: Array, axis: str, dtype: Any) -> Array:
    """Gather the tokens of all devices of an axis in `dtype`; their gradient is float32."""
    narrow = jax.lax.all_gather(tokens.astype(dtype), axis, tiled=True)
    return narrow.astype(tokens.dtype)


def _all_tokens_forward(tokens: Array, axis: str, dtype: Any) -> tuple[Array, None]:
    return _all_tokens(tokens, axis, dtype), None


def _all_tokens_backward(axis: str, dtype: Any, _: None, g: Array) -> tuple[Array]:
    return (jax.lax.psum_scatter(g, axis, scatter_dimension=0, tiled=True),)


_all_tokens.defvjp(_all_tokens_forward, _all_tokens_backward)


# ---------------------------------------------------------------- to those that need it


class _Wanted(NamedTuple):
    """Hold who wants which tokens of this device.

    Attributes:
        devices: [n, k] those of a token's experts, ascending.
        queue: [n, k] place of the token among those that the device wants; -1 where there is no
            device, or it is that of the expert before, as a token goes there once.
        upto: [S, n] tokens that a device wants of the first, the second, ... up to this one.
        ids: [n, k].
    """

    devices: Array
    queue: Array
    upto: Array
    ids: Array


class _Places(NamedTuple):
    """Say of a round which token stands at a place [S C], n where none does, and where each token
    stands [n, k], S C where it has no place.

    Each is read by a gather; the gradient of one is the other.
    """

    token: Array
    of_token: Array


def _all_to_all(
    exchange: Exchange,
    mix: Mix,
    axis: str,
    dtype: Any,
    weights: Any,
    tokens: Array,
    ids: Array,
    by_id: Array,
) -> Array:
    wanted = _who_wants(ids, exchange.devices, _experts_in(weights))
    # Round r takes places r C to (r + 1) C of each queue. A queue has at most rounds x C tokens, so
    # each has its place in one round. The devices of the axis agree on the number, as they wait
    # for each other in a round; others need not, who have no part in it.
    rounds = -(-wanted.upto[:, -1].max() // exchange.places)
    rounds = jax.lax.pmax(rounds, axis)
    run = functools.partial(_round, exchange, mix, axis, dtype)
    return _rounds(run, rounds, wanted, (weights, tokens, by_id))


def _experts_in(weights: Any) -> int:
    return jax.tree.leaves(weights)[0].shape[0]


def _who_wants(ids: Array, devices: int, here: int) -> _Wanted:
    owners = jnp.sort(ids // here, axis=1)
    again = jnp.pad(owners[:, 1:] == owners[:, :-1], ((0, 0), (1, 0)))
    none = again | (owners == devices)
    wants = (owners == jnp.arange(devices)[:, None, None]).any(axis=-1)
    upto = jnp.cumsum(wants, axis=1, dtype=jnp.int32)
    queue = jnp.take_along_axis(upto.T, jnp.where(none, 0, owners), axis=1) - 1
    return _Wanted(owners, jnp.where(none, -1, queue), upto, ids)


def _places_of(wanted: _Wanted, number: Array | int, places: int) -> _Places:
    first, devices = number * places, len(wanted.upto)
    sought = first + 1 + jnp.arange(places)
    token = jax.vmap(lambda upto: jnp.searchsorted(upto, sought))(wanted.upto)
    at = wanted.queue - first
    inside = (wanted.queue >= 0) & (at >= 0) & (at < places)
    of_token = jnp.where(inside, wanted.devices * places + at, devices * places)
    return _Places(token.reshape(-1), of_token)


def _round(
    exchange: Exchange,
    mix: Mix,
    axis: str,
    dtype: Any,
    number: Array | int,
    wanted: _Wanted,
    given: tuple[Any, Array, Array],
) -> Array:
    """Return of one round what the sums [n, D] have of it."""
    weights, tokens, by_id = given
    places = _places_of(wanted, number, exchange.places)
    nowhere = exchange.devices * _experts_in(weights)
    ids = wanted.ids.at[places.token].get(mode="fill", fill_value=nowhere)
    ids = jax.lax.all_to_all(ids, axis, 0, 0, tiled=True)
    sums = mix(
        weights,
        _there(tokens, places, axis, dtype),
        ids,
        _there(by_id, places, axis, jnp.float32),
    )
    return _back(sums, places, axis)


def _stand(x: Array, places: _Places) -> Array:
    """Return what stands at each place [S C, D] of x [n, D], 0 where no token does."""
    return x.at[places.token].get(mode="fill", fill_value=0)


def _collect(x: Array, places: _Places) -> Array:
    """Return for each token the sum [n, D] of its places in x [S C, D], in the devices' order."""
    return x.at[places.of_token].get(mode="fill", fill_value=0).sum(axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _there(x: Array, places: _Places, axis: str, dtype: Any) -> Array:
    """Return what the others sent [S C, D] of their x [n, D], in `dtype`; its gradient is
    float32."""
    sent = jax.lax.all_to_all(_stand(x.astype(dtype), places), axis, 0, 0, tiled=True)
    return sent.astype(x.dtype)


def _there_forward(x: Array, places: _Places, axis: str, dtype: Any) -> tuple[Array, _Places]:
    return _there(x, places, axis, dtype), places


def _there_backward(axis: str, dtype: Any, places: _Places, g: Array) -> tuple[Array, None]:
    return _collect(jax.lax.all_to_all(g, axis, 0, 0, tiled=True), places), None


_there.defvjp(_there_forward, _there_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _back(sums: Array, places: _Places, axis: str) -> Array:
    """Return for each token [n, D] what the others made of it, whose sums [S C, D] these are."""
    return _collect(jax.lax.all_to_all(sums, axis, 0, 0, tiled=True), places)


def _back_forward(sums: Array, places: _Places, axis: str) -> tuple[Array, _Places]:
    return _back(sums, places, axis), places


def _back_backward(axis: str, places: _Places, g: Array) -> tuple[Array, None]:
    return jax.lax.all_to_all(_stand(g, places), axis, 0, 0, tiled=True), None


_back.defvjp(_back_forward, _back_backward)


# ---------------------------------------------------------------- round after round

Round = Callable[[Array | int, _Wanted, Any], Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounds(run: Round, rounds: Array, wanted: _Wanted, given: Any) -> Array:
    """Return the sum of all rounds.

    JAX does not differentiate a loop whose trips the data decide. The first round is outside of
    it, keeps what it likes for its gradient, and is all there is where loads are even; others are
    computed again, and add to the gradient in the place where it lies.
    """
    return _with_others(run, rounds, wanted, given, run(0, wanted, given))


def _with_others(run: Round, rounds: Array, wanted: _Wanted, given: Any, first: Array) -> Array:
    with jax.named_scope(FURTHER):
        return jax.lax.fori_loop(
            1, rounds, lambda number, out: out + run(number, wanted, given), first
        )


def _rounds_forward(run: Round, rounds: Any, wanted: Any, given: Any) -> tuple[Array, tuple]:
    rounds, wanted = jax.tree.map(lambda x: x.value, (rounds, wanted))
    # no gradient is made of what needs none, such as the weights under an adapter
    fixed = jax.tree.map(lambda x: None if x.perturbed else x.value, given)
    moving = jax.tree.map(lambda x: x.value if x.perturbed else None, given)
    first, pull = jax.vjp(lambda moving: run(0, wanted, _joined(moving, fixed)), moving)
    out = _with_others(run, rounds, wanted, _joined(moving, fixed), first)
    return out, (pull, rounds, wanted, moving, fixed)


def _rounds_backward(run: Round, residuals: tuple, g: Array) -> tuple[None, None, Any]:
    pull, rounds, wanted, moving, fixed = residuals

    def add(number: Array, gradient: Any) -> Any:
        again = jax.vjp(lambda moving: run(number, wanted, _joined(moving, fixed)), moving)[1]
        return jax.tree.map(jnp.add, gradient, *again(g))

    (first,) = pull(g)
    with jax.named_scope(FURTHER):
        return None, None, jax.lax.fori_loop(1, rounds, add, first)


_rounds.defvjp(_rounds_forward, _rounds_backward, symbolic_zeros=True)


def _joined(moving: Any, fixed: Any) -> Any:
    return jax.tree.map(
        lambda m, f: f if m is None else m, moving, fixed, is_leaf=lambda x: x is None
    )
