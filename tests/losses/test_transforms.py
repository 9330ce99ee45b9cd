"""Every registered loss under jit, vmap, pmap and shard_map, however the minibatch is cut.

Parametrised over the table of losses, so that a new one is covered by existing. All variants of
a loss share one jitted function where they can: compiling is what takes long.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxrl.array_ops import masked_sum
from jaxrl.config import AlgorithmConfig, DecoupledPPOConfig
from jaxrl.losses import BATCH_STATISTICS, LOSSES, ROWS as LOSS_ROWS
from jaxrl.losses.reduction import REDUCTIONS, reduction_weights

CONFIG = AlgorithmConfig()
KEY = jax.random.key(7)
ROWS, TOKENS = 8, 6


@jax.jit
def user_loss(log_probs, old_log_probs, advantages, config, loss_mask=None):
    """A user's own, jitted; the config is a static pytree."""
    return -config.eps_clip_low * advantages * log_probs, {}


LOG_LINEAR = AlgorithmConfig(decoupled_ppo=DecoupledPPOConfig(proximal="log_linear"))


def log_linear(
    log_probs, old, advantages, config, loss_mask=None, rollout_log_probs=None, staleness=None
):
    """The second form of decoupled PPO, which looks at the age of the tokens."""
    given = loss_mask, rollout_log_probs, staleness
    return LOSSES["decoupled_ppo"](log_probs, None, advantages, LOG_LINEAR, *given)


ALL = {**LOSSES, "user": user_loss, "log_linear": log_linear}
REQUIRED = {"dro": {"beta": 0.1}}  # hyperparameters without a default


def allowed(name):
    """The reductions that a loss is defined with."""
    return (name in LOSS_ROWS and LOSS_ROWS[name].reductions) or REDUCTIONS


def minibatch(dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    shape = (ROWS, TOKENS)
    mask = (rng.uniform(size=shape) < 0.7).astype(dtype)
    mask[3] = 0  # a row with nothing to learn from
    old = rng.normal(-1.5, 0.5, shape)
    return {
        "log_probs": (old + rng.normal(0, 0.3, shape)).astype(dtype),
        "old": old.astype(dtype),
        "rollout": (old + rng.normal(0, 0.2, shape)).astype(dtype),
        "advantages": np.repeat(rng.normal(0, 1, (ROWS, 1)), TOKENS, 1).astype(dtype),
        "mask": mask,
        "row_ids": np.arange(ROWS, dtype=np.int32),
        "staleness": rng.integers(0, 4, shape, np.int32),
        "groups": np.arange(ROWS, dtype=np.int32) // 2,
    }


def per_token(name, x, config=CONFIG):
    """Loss [B, T] of a batch of arrays."""
    func, offered = ALL[name], {"key": KEY, "row_ids": x["row_ids"], "staleness": x["staleness"]}
    named = inspect.signature(func).parameters
    offered = {k: v for k, v in offered.items() if k in named}
    if "rollout_log_probs" in named:
        offered["rollout_log_probs"] = x["rollout"]
    offered |= REQUIRED.get(name, {})
    loss, _ = func(
        x["log_probs"], x["old"], x["advantages"], config, loss_mask=x["mask"], **offered
    )
    return loss


def weigh(x, kind, **axis):
    return reduction_weights(
        x["mask"], kind, max_seq_len=16, group_ids=x["groups"], microbatch_rows=2, **axis
    )


def objective(name, log_probs, x, weights):
    return masked_sum(per_token(name, {**x, "log_probs": log_probs}), weights)


def value_and_grad(name, x, weights):
    return jax.value_and_grad(functools.partial(objective, name))(x["log_probs"], x, weights)


@functools.cache
def jitted(name):
    """One program of each loss for all tests that give it the same shapes."""
    return jax.jit(functools.partial(value_and_grad, name))


def assert_close(found, expected, tolerance=1e-5):
    for one, other in zip(found, expected, strict=True):
        scale = max(1.0, np.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * scale)


def take_rows(x, rows):
    return {k: v[rows] for k, v in x.items()}


@pytest.mark.some(6)
@pytest.mark.parametrize("name", sorted(ALL))
def test_pmap_and_shard_map_equal_one_device(name):
    """All allowed reductions in one compilation each; a device holds two of the rows.

    A loss that looks at the whole minibatch gets it whole, on every device.
    """
    x, kinds = minibatch(), allowed(name)
    expected = [jitted(name)(x, np.asarray(weigh(x, kind))) for kind in kinds]
    whole = name in BATCH_STATISTICS

    def on_a_device(part, own):
        part = jax.lax.all_gather(part, "devices", tiled=True) if whole else part
        results = []
        for kind in kinds:
            weights = weigh(own, kind, axis_name="devices")
            if whole:
                weights = jax.lax.all_gather(weights, "devices", tiled=True)
            value, grad = value_and_grad(name, part, weights)
            total = value if whole else jax.lax.psum(value, "devices")
            start = jax.lax.axis_index("devices") * 2
            mine = jax.lax.dynamic_slice_in_dim(grad, start, 2) if whole else grad
            results.append((total[None], mine))
        return results

    split = {k: v.reshape(4, 2, *v.shape[1:]) for k, v in x.items()}
    mapped = jax.pmap(on_a_device, "devices", devices=jax.devices()[:4])(split, split)
    mesh = Mesh(np.array(jax.devices()[:4]), ("devices",))
    spec = PartitionSpec("devices")
    sharded = jax.jit(
        jax.shard_map(
            on_a_device, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False
        )
    )(x, x)
    for found in (mapped, sharded):
        for (values, grads), (value, grad) in zip(found, expected, strict=True):
            assert_close((np.ravel(values), grads.reshape(grad.shape)), (np.full(4, value), grad))


@pytest.mark.parametrize("name", sorted(ALL))
def test_neither_vmap_nor_the_cut_into_microbatches_changes_anything(name):
    """In float64 to 1e-12: vmap, order of rows, padding, microbatches; for all allowed reductions.

    So a loss that is not in BATCH_STATISTICS looks at no row of another microbatch.
    """
    with jax.enable_x64(True):
        x = minibatch("float64")
        order = np.random.default_rng(5).permutation(ROWS)
        both = {k: np.stack([v, v[order]]) for k, v in x.items()}
        mapped = jax.jit(jax.vmap(functools.partial(value_and_grad, name)))
        wide = {k: np.pad(v, [(0, 0), (0, 3)]) if v.ndim == 2 else v for k, v in x.items()}
        size = ROWS if name in BATCH_STATISTICS else 4
        parts = [slice(start, start + size) for start in range(0, ROWS, size)]
        for kind in allowed(name):
            weights = np.asarray(weigh(x, kind))
            values, gradients = mapped(both, np.stack([weights, weights[order]]))
            value, gradient = values[0], gradients[0]
            assert_close((values[1], gradients[1]), (value, gradient[order]), 1e-12)
            padded = np.asarray(weigh(wide, kind))
            cut = [jitted(name)(take_rows(wide, rows), padded[rows]) for rows in parts]
            sums = sum(v for v, _ in cut), np.concatenate([g for _, g in cut])
            assert_close(sums, (value, np.pad(gradient, [(0, 0), (0, 3)])), 1e-12)


@pytest.mark.parametrize("name", sorted({*LOSSES, "log_linear"}))
def test_what_is_masked_reaches_neither_value_nor_gradient(name):
    x = minibatch()
    weights = np.asarray(weigh(x, allowed(name)[0]))
    grad = jitted(name)
    expected = grad(x, weights)
    for poison in (np.nan, np.inf, -np.inf):
        for names in (("log_probs",), ("old", "rollout"), ("advantages",)):
            bad = {k: np.where(x["mask"] == 0, poison, x[k]).astype(np.float32) for k in names}
            for one, other in zip(grad({**x, **bad}, weights), expected, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", sorted({*LOSSES, "log_linear"}))
def test_bfloat16_inputs_give_a_float32_loss_eager_as_jitted(name):
    x = minibatch()
    floats = ("log_probs", "old", "rollout", "advantages")
    small = {k: jnp.asarray(x[k], "bfloat16") for k in floats}
    exact = {**x, **{k: np.asarray(v, np.float32) for k, v in small.items()}}
    loss = per_token(name, {**x, **small})
    assert loss.dtype == jnp.float32
    np.testing.assert_array_equal(loss, per_token(name, exact))
    weights = np.asarray(weigh(x, allowed(name)[0]))
    value, _ = jitted(name)(exact, weights)
    assert_close([value], [np.where(weights, loss * weights, 0).sum()])


@pytest.mark.parametrize("name", sorted({*LOSSES, "log_linear"} - {"cross_entropy", "clip_cov"}))
def test_on_policy_gradient_is_minus_advantage_times_weight(name):
    """Where all policies are the same: clip_cov drops tokens, cross_entropy knows no advantage."""
    x = minibatch()
    x |= {"old": x["log_probs"], "rollout": x["log_probs"]}
    weights = np.asarray(weigh(x, "sequence_mean"))
    _, grad = jitted(name)(x, weights)
    lengths = x["mask"].sum(-1, keepdims=True)
    factor = {"luspo": lengths, "chord": 0.9}.get(name, 1)  # which they multiply by
    np.testing.assert_allclose(grad, -x["advantages"] * weights * factor, rtol=1e-5, atol=1e-7)
