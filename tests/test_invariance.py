"""Through the real update: how a minibatch is cut, ordered, padded and spread changes nothing.

Parametrised over the registry, so a new loss is covered by existing. The model of the default run
is small in operations, since compiling is all the time it takes; the slow tests have a transformer.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.array_ops import masked_mean
from jaxrl.config import ClipCovConfig, DecoupledPPOConfig, OffPolicyCorrectionConfig
from jaxrl.config.objective_requirements import allowed_reductions
from jaxrl.data.microbatches import Microbatching
from jaxrl.losses import LOSSES
from jaxrl.models.attention import causal_mask
from jaxrl.parallel import ShardingRules, batch_sharding, make_mesh, replicated
from jaxrl.registry import PolicyLossRegistry
from jaxrl.training.forward import by_target
from jaxrl.training.forward_pass import ForwardPass
from jaxrl.training.objective import merge_metrics, minibatch_weights, policy_objective
from jaxrl.training.optim import init_state, make_apply, make_optimizer, make_schedule
from jaxrl.training.update import Updater
from tests.training import test_update
from tests.training.test_update import ROWS, WIDTH, algorithm_with, make_batch

VOCABULARY, HIDDEN = 32, 16
LENGTHS = (16, 13, 14, 14, 13, 13, 15, 16)  # of one bucket: every cut compiles one shape
CUTS = {
    "2 microbatches": {"microbatches": 2},
    "other order": {"microbatches": 2, "order": (3, 6, 1, 0, 7, 2, 5, 4)},
    "padding": {"microbatches": 2, "width": 40},
    "8 devices": {"microbatches": 1, "devices": 8},
    # 16 + 16, 15 + 14, 14 + 13, 13 + 13 tokens in rows of 32, two rows at a time
    "packed": {"microbatches": 4, "packed_length": 32},
    "masked NaN": {"microbatches": 2, "masked": np.nan},
}


def forward(params, rows, with_entropy=True):
    """Each token from the mean of those before: causal, and of few operations."""
    tokens = rows.tokens
    before = causal_mask(rows.segment_ids) / (1.0 + rows.positions[..., None])
    context = before @ params["embed"][tokens]
    scores = jax.nn.log_softmax(jnp.tanh(context @ params["hidden"])[:, :-1] @ params["head"])
    log_probs = jnp.take_along_axis(scores, rows.targets[:, :-1, None], axis=-1)[..., 0]
    outputs = log_probs, -(jnp.exp(scores) * scores).sum(-1)
    return by_target(rows, *(x * rows.wanted[:, :-1] for x in outputs))


def parameters():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {
        "embed": (VOCABULARY, HIDDEN),
        "hidden": (HIDDEN, HIDDEN),
        "head": (HIDDEN, VOCABULARY),
    }
    return {
        name: jax.random.normal(key, shape) / 2
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


@functools.cache
def make_updater(algorithm, rows, devices, **packing):
    mesh = make_mesh(fsdp=1, devices=jax.devices()[:devices])
    params = jax.device_put(jax.device_get(parameters()), replicated(mesh))
    schedule = make_schedule("constant", lr=1e-2, num_warmup_steps=0, total_steps=10)
    optimizer = make_optimizer(
        schedule, adam_betas=(0.9, 0.99), weight_decay=0.0, max_grad_norm=1.0
    )
    shardings = jax.tree.map(lambda x: x.sharding, params)
    state = init_state(optimizer, jax.tree.map(jnp.copy, params), shardings, replicated(mesh))
    cut = Microbatching(rows, ROWS, groups=devices, **packing)
    spread = batch_sharding(mesh, ShardingRules())
    updater = Updater(
        ForwardPass(forward, lambda x: jax.device_put(x, spread), cut),
        make_apply(optimizer, schedule),
        objective=policy_objective(algorithm, rows // devices),
        shardings=jax.tree.map(lambda x: x.sharding, state),
        microbatching=cut,
    )
    return updater, params


def cut_gradient(
    make,
    algorithm,
    reduction,
    *,
    microbatches,
    width=WIDTH,
    order=None,
    devices=1,
    masked=None,
    correction=None,
    packed_length=None,
    widths=(),
):
    """Flat gradient and metrics of a minibatch.

    The weights alone know the reduction, so that it costs no compilation. The block of
    token_mean_legacy is two rows, whatever the cut; with one it would be sequence_mean.
    """
    batch = make_batch(width, LENGTHS).replace(demonstrated=np.arange(ROWS) % 3 == 0)
    if order is not None:
        batch = jax.tree.map(lambda x: x[np.array(order)], batch)
    if masked is not None:
        names = "old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages"
        held = {name: getattr(batch, name) for name in names}
        empty = batch.loss_mask == 0
        batch = batch.replace(
            **{n: np.where(empty, np.float32(masked), x) for n, x in held.items()}
        )
    packing = {"packed": True, "packed_length": packed_length} if packed_length else {}
    packing |= {"widths": widths} if widths else {}
    updater, params = make(algorithm, -(-ROWS // microbatches), devices, **packing)
    reduced = dataclasses.replace(correction or algorithm, loss_reduction=reduction)
    weights, metrics = minibatch_weights(batch, reduced, block_rows=2)
    grads, parts = updater.gradients(params, batch, jax.device_get(weights), jax.random.key(1))
    flat = np.concatenate([np.ravel(g) for g in jax.tree.leaves(jax.device_get(grads))])
    return flat, merge_metrics(jax.device_get(parts)) | jax.device_get(metrics)


def assert_invariant(make, algorithm, reduction, cuts=CUTS, **options):
    expected, expected_metrics = cut_gradient(make, algorithm, reduction, microbatches=1, **options)
    assert np.abs(expected).max() > 1e-4  # the comparison means something
    for name, cut in cuts.items():
        gradient, metrics = cut_gradient(make, algorithm, reduction, **cut, **options)
        scale = np.abs(expected).max()
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-5 * scale, err_msg=name)
        assert metrics.keys() == expected_metrics.keys()
        for key, value in metrics.items():
            assert value == pytest.approx(expected_metrics[key], rel=1e-4, abs=1e-6), (name, key)


# A loss whose defaults would drop no token of the batch.
SETTINGS = {"clip_cov": ClipCovConfig(clip_ratio=0.2, clip_cov_lb=-1.0, clip_cov_ub=5.0)}
# Hyperparameters without a default, or with one that would drop or clip all or nothing.
HYPERPARAMETERS = {
    "vespo": {"k_pos": 0.3, "k_neg": 0.3},
    "dro": {"beta": 0.5},
    "m2po": {"tau": 0.2},
    "bapo": {"rho": 0.2, "high_min": 1.02},
    "ipo": {"threshold": 0.02},
    "luffy": {"gamma": 0.3},
    "chord": {"mu": 0.4},
}


def algorithm_of(loss, **settings):
    """With KL and entropy terms; the ratios of the batch are clipped here and there."""
    own = {loss: SETTINGS[loss]} if loss in SETTINGS else {}
    own["policy_loss_kwargs"] = HYPERPARAMETERS.get(loss, {})
    return algorithm_with(
        policy_loss_type=loss, eps_clip_low=0.1, eps_clip_high=0.1, **own, **settings
    )


# Each is one compilation of a transformer for every loss; the small model has them one by one.
TRANSFORMER_CUTS = {
    name: CUTS[name] for name in ("other order", "packed", "8 devices", "masked NaN")
}
ONE_LAYER = dataclasses.replace(test_update.MODEL, num_layers=1)


def with_transformer(algorithm, rows, devices, **packing):
    updater, params, _ = test_update.make_updater(
        algorithm, model=ONE_LAYER, microbatch_rows=rows, devices=devices, **packing
    )
    return updater, params


def reinforce(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_log_probs=None):
    """The guide's scalar loss: a mean over B x T."""
    return (-log_probs * advantages).mean(), 0.0


def centred(log_probs, old_log_probs, advantages, config, loss_mask=None):
    """A user's loss of each token with a mean of the minibatch in it."""
    return -(advantages - masked_mean(advantages, loss_mask)) * log_probs, {}


@pytest.fixture
def user_losses():
    PolicyLossRegistry.register("reinforce", reinforce)
    PolicyLossRegistry.register("centred", centred, batch_statistics=True)
    yield
    PolicyLossRegistry.unregister("reinforce")
    PolicyLossRegistry.unregister("centred")


def cuts_of(loss, reduction, cuts=CUTS):
    """What the public contract exempts is left out."""
    if loss == "reinforce":  # a mean over B x T takes in what is masked
        return {name: cut for name, cut in cuts.items() if name != "masked NaN"}
    if reduction == "token_mean_legacy":  # its blocks are rows in order
        return {name: cut for name, cut in cuts.items() if name != "other order"}
    return cuts


@pytest.mark.some(6)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_cut_changes_nothing(loss):
    algorithm = algorithm_of(loss)
    for reduction in allowed_reductions(loss):
        assert_invariant(make_updater, algorithm, reduction, cuts_of(loss, reduction))


def test_the_cut_changes_nothing_where_the_age_of_tokens_counts():
    algorithm = algorithm_of("decoupled_ppo", decoupled_ppo=DecoupledPPOConfig("log_linear"))
    assert_invariant(make_updater, algorithm, "token_mean")


TERMS = [
    {"top_entropy_quantile": 0.4},
    {
        "opsm_delta": 0.05,
        "positive_nll_coef": 0.3,
        "use_unbiased_kl": True,
        "kl_loss_reduction": "loss",
    },
]


@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_the_cut_changes_nothing_for_other_terms(terms):
    algorithm = algorithm_of("regular", **terms)
    for reduction in ("token_mean", "prompt_mean"):
        assert_invariant(make_updater, algorithm, reduction)


@pytest.mark.parametrize("loss", ["reinforce", "centred"])
def test_the_cut_changes_nothing_for_a_loss_of_the_minibatch(user_losses, loss):
    cuts = cuts_of(loss, "token_mean")
    assert_invariant(make_updater, algorithm_of(loss), "token_mean", cuts)


def test_the_number_of_microbatches_does_not_change_the_width_that_a_scalar_loss_sees(user_losses):
    cuts = {f"{n} microbatches": {"microbatches": n} for n in (2, 4)}
    assert_invariant(make_updater, algorithm_of("reinforce"), "token_mean", cuts, width=24)


@pytest.mark.some(2)
@pytest.mark.parametrize("loss", ["regular", "gspo", "clip_cov", "centred"])
def test_few_shapes_change_nothing(user_losses, loss):
    # packed: 16, 16, 15, 14 + 13, 14 + 13, 13 tokens in six rows of 27, of which four are a full
    # microbatch and one is a quarter of it: 4, 1 and 1 rows. Padded: all rows have 16 tokens.
    cuts = {
        "packed": {"microbatches": 2, "packed_length": 27, "widths": (16,)},
        "padded": {"microbatches": 4, "widths": (8, 16)},
    }
    assert_invariant(make_updater, algorithm_of(loss), "token_mean", cuts)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [*LOSSES, "reinforce", "centred"])
def test_the_cut_changes_nothing_for_a_transformer(user_losses, loss):
    algorithm = algorithm_of(loss)
    for reduction in allowed_reductions(loss):
        cuts = cuts_of(loss, reduction, TRANSFORMER_CUTS)
        assert_invariant(with_transformer, algorithm, reduction, cuts)


CORRECTIONS = [
    {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.05},
    {"tis_ratio_type": "sequence", "sequence_mask_metric": "product", "product_mask_low": 0.8},
    {"outlier_token_is_threshold_high": 1.2, "renormalize": True},
    {
        "token_mask_is_threshold_low": 0.9,
        "token_mask_is_threshold_high": 1.1,
        "sequence_mask_metric": "geometric",
        "renormalize": True,
    },
]


@pytest.mark.parametrize("settings", CORRECTIONS, ids=str)
def test_the_cut_changes_nothing_under_a_correction(settings):
    """No compilation of its own: the correction is in the weights."""
    algorithm = algorithm_of("regular")
    corrected = algorithm_of("regular", off_policy_correction=OffPolicyCorrectionConfig(**settings))
    plain, _ = cut_gradient(make_updater, algorithm, "token_mean", microbatches=1)
    for reduction in ("token_mean", "sequence_mean", "prompt_mean"):
        assert_invariant(make_updater, algorithm, reduction, correction=corrected)
    weighed, metrics = cut_gradient(
        make_updater, algorithm, "token_mean", microbatches=1, correction=corrected
    )
    assert np.abs(weighed - plain).max() > 1e-3 * np.abs(plain).max()
    assert "is_ratio_mean" in metrics
