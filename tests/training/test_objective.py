"""The objective of a minibatch against SkyRL's worker, and what it asks of user functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config import AlgorithmConfig, OffPolicyCorrectionConfig
from jaxrl.config.algorithm import DistillationConfig, EntropyCtrlConfig
from jaxrl.data.packing import empty_batch
from jaxrl.losses.reduction import reduction_weights
from jaxrl.registry import PolicyLossRegistry, bind_estimator
from jaxrl.registry.bind import make_policy_loss
from jaxrl.training.objective import (
    MISMATCH,
    make_objective,
    minibatch_weights,
    mismatch,
    policy_objective,
    step_metrics,
)
from tests import golden
from tests.golden.losses import worker_minibatch

KEY = jax.random.key(0)


def value_and_gradients(algorithm, batch, log_probs, entropy):
    """Of the objective as `Updater` composes it, eagerly."""
    weights, correction = minibatch_weights(batch, algorithm, block_rows=1)
    objective = make_objective(make_policy_loss(algorithm))
    gradients, metrics = jax.grad(objective, (0, 1), has_aux=True)(
        log_probs, entropy, batch, weights, KEY
    )
    return gradients, metrics | correction


@pytest.mark.parametrize("case", golden.cases("worker_total_loss"), ids=lambda case: case["id"])
def test_the_objective_of_skyrls_worker(case):
    """Policy and KL term whatever the cut; SkyRL's entropy is a mean of microbatch means."""
    algorithm, mask = AlgorithmConfig(**case["config"]), case.i["loss_mask"]
    gradients, metrics = value_and_gradients(
        algorithm,
        worker_minibatch(case),
        jnp.asarray(case.i["log_probs"]),
        jnp.asarray(case.i["entropy"]),
    )
    expected = case.o["grad_log_probs32"]
    np.testing.assert_allclose(gradients[0], expected, rtol=1e-4, atol=1e-6)
    for name in ("policy_loss", "policy_kl"):
        if name in metrics:
            assert metrics[name] == pytest.approx(case["metrics"][name], rel=1e-4, abs=1e-6)
    block, coefficient = case["micro_batch_size"], algorithm.entropy_loss_coef
    theirs = reduction_weights(mask, "token_mean_legacy", microbatch_rows=block)
    used = algorithm.use_entropy_loss * coefficient
    np.testing.assert_allclose(case.o["grad_entropy32"], -used * theirs, rtol=1e-4, atol=1e-8)
    np.testing.assert_allclose(gradients[1], -used * mask / mask.sum(), rtol=1e-4, atol=1e-8)


def small_batch(**fields):
    """Two rows of four tokens; the last token of the second row is masked."""
    batch = empty_batch(2, 4).replace(
        loss_mask=np.array([[1, 1, 1, 1], [1, 1, 1, 0]], np.float32),
        old_log_probs=np.full((2, 4), -1.0, np.float32),
        rollout_log_probs=np.log([[0.1, 0.2, 0.4, 0.8], [0.1, 0.2, 0.4, 0.8]]).astype("float32"),
        advantages=np.ones((2, 4), np.float32),
    )
    return batch.replace(**fields)


def corrected(reduction="token_mean", **settings):
    return AlgorithmConfig(
        use_kl_loss=False,
        loss_reduction=reduction,
        off_policy_correction=OffPolicyCorrectionConfig(**settings),
    )


def test_the_first_update_takes_its_ratio_against_the_policy_without_its_gradient():
    # Old log-probs are the policy's own: r = 1 and dL/dlogp = -A r / 7 tokens. If they moved with
    # the policy r would be 1 whatever it does, and the gradient 0.
    algorithm = AlgorithmConfig(use_kl_loss=False, loss_reduction="token_mean")
    advantages = np.array([[1.0, -2.0, 3.0, 0.5], [2.0, 1.0, -1.0, 4.0]], np.float32)
    batch = small_batch(old_log_probs=None, advantages=advantages)
    log_probs = jnp.full((2, 4), -1.0)
    gradients, metrics = value_and_gradients(algorithm, batch, log_probs, jnp.zeros((2, 4)))
    np.testing.assert_allclose(gradients[0], -advantages * batch.loss_mask / 7, rtol=1e-6)
    assert metrics["policy_loss"] == pytest.approx(-4.5 / 7)  # 1 - 2 + 3 + 0.5 + 2 + 1 - 1


def test_a_correction_multiplies_the_weights_of_the_reduction():
    # w = exp(old - rollout) = e^-1 / (0.1, 0.2, 0.4, 0.8) = 3.679, 1.839, 0.920, 0.460, cap 2
    # each of 7 tokens counts 1/7
    weights, metrics = minibatch_weights(
        small_batch(), corrected(tis_ratio_type="token"), block_rows=1
    )
    row = np.array([2, 1.8394, 0.9197, 0.45985]) / 7
    np.testing.assert_allclose(weights.policy[0], row, rtol=1e-4)
    np.testing.assert_allclose(weights.policy[1], row * [1, 1, 1, 0], rtol=1e-4)
    np.testing.assert_allclose(weights.entropy.sum(), 1)  # the other terms are not corrected
    # (2 (3.679 + 1.839 + 0.920) + 0.460) / 7
    assert metrics["is_ratio_mean"] == pytest.approx(1.9051, rel=1e-4)
    assert metrics["tis_token_clip_high_ratio"] == pytest.approx(2 / 7)


@pytest.mark.parametrize(("renormalize", "count"), [(False, 7), (True, 4)])
def test_renormalize_counts_the_tokens_that_are_left(renormalize, count):
    # 0.5 <= w <= 2 keeps two tokens of each row
    settings = {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2}
    algorithm = corrected(**settings, renormalize=renormalize)
    weights, _ = minibatch_weights(small_batch(), algorithm, block_rows=1)
    np.testing.assert_allclose(weights.policy, np.array([[0, 1, 1, 0]] * 2) / count, rtol=1e-6)


def test_a_correction_multiplies_the_weights_of_the_teachers_term():
    # min(w, 2) = 2, 1.839, 0.920, 0.460 as above; the teacher has a word on the 4 tokens of row 0
    algorithm = AlgorithmConfig(
        loss_reduction="token_mean",
        off_policy_correction=OffPolicyCorrectionConfig(tis_ratio_type="token"),
        distillation=DistillationConfig(coef=1.0),
    )
    batch = small_batch(taught=np.array([[1] * 4, [0] * 4], np.float32))
    weights, _ = minibatch_weights(batch, algorithm, block_rows=1)
    expected = np.array([[2, 1.8394, 0.9197, 0.45985], [0] * 4]) / 4
    np.testing.assert_allclose(weights.taught, expected, rtol=1e-4)


def test_renormalize_leaves_the_kl_that_is_averaged_as_the_loss_is():
    # 0.5 <= w <= 2 keeps two tokens of each row for the loss; the KL counts all 7
    algorithm = AlgorithmConfig(
        loss_reduction="token_mean",
        kl_loss_reduction="loss",
        off_policy_correction=OffPolicyCorrectionConfig(
            token_mask_is_threshold_low=0.5, token_mask_is_threshold_high=2, renormalize=True
        ),
    )
    batch = small_batch()
    weights, _ = minibatch_weights(batch, algorithm, block_rows=1)
    np.testing.assert_allclose(weights.kl_as_loss, batch.loss_mask / 7, rtol=1e-6)


ADVANTAGES = np.array([[1.0, 1.0, 1.0, 1.0], [-1.0, -1.0, -1.0, 0.0]], np.float32)


def test_tokens_that_are_not_learnt_from_have_no_loss_and_the_others_their_weight():
    # r = 1: dL/dlogp = -A / 7. Row 1 is dropped by OPSM: mean of log w = log(0.1 0.2 0.4)/3 + 1 is
    # -0.609, so of log (pi_rollout / pi_theta) too: not above 0; with -0.7 it is. Top entropy: the
    # floor(0.3 7) = 2 tokens of entropy 5 and 4.
    batch = small_batch(advantages=ADVANTAGES)
    log_probs, entropy = jnp.full((2, 4), -1.0), jnp.array([[1.0, 5, 1, 1], [1, 1, 4, 9]])
    plain = -ADVANTAGES * batch.loss_mask / 7
    for settings, kept in (
        ({"opsm_delta": 0.0}, np.ones((2, 4))),
        ({"opsm_delta": -0.7}, np.array([[1, 1, 1, 1], [0, 0, 0, 0]])),
        ({"top_entropy_quantile": 0.3}, np.array([[0, 1, 0, 0], [0, 0, 1, 0]])),
        ({"opsm_delta": -0.7, "top_entropy_quantile": 0.3}, np.array([[0, 1, 0, 0], [0] * 4])),
    ):
        algorithm = AlgorithmConfig(use_kl_loss=False, **settings)
        gradients, _ = value_and_gradients(algorithm, batch, log_probs, entropy)
        np.testing.assert_allclose(gradients[0], plain * kept, rtol=1e-6, err_msg=str(settings))
        np.testing.assert_array_equal(gradients[1], 0)


def test_the_likelihood_of_right_rows_is_averaged_over_their_tokens():
    # rewards 1 and 0: the four tokens of row 0 have -0.1 / 4 each, beside -A / 7
    rewards = np.zeros((2, 4), np.float32)
    rewards[0, 3] = 1
    batch, log_probs = small_batch(rewards=rewards), jnp.full((2, 4), -1.0)
    algorithm = AlgorithmConfig(use_kl_loss=False, positive_nll_coef=0.1)
    gradients, metrics = value_and_gradients(algorithm, batch, log_probs, jnp.zeros((2, 4)))
    expected = -batch.loss_mask / 7 - 0.1 * np.array([[0.25] * 4, [0] * 4])
    np.testing.assert_allclose(gradients[0], expected, rtol=1e-6)
    assert metrics["positive_nll"] == pytest.approx(1.0)
    assert metrics["final_loss"] == pytest.approx(-1 + 0.1)


def test_the_kl_is_averaged_as_it_is_told_to_be():
    # k2 of d = 1: gradient 1 a token. Mean over sequences: 1 / 8 and 1 / 6; as the loss 1 / 7 each;
    # weighed by r = 1 its gradient is d + d^2 / 2 = 1.5, but k2 is no unbiased one: k1 has 1 + 1
    ref = np.full((2, 4), -2.0, np.float32)
    batch = small_batch(advantages=np.zeros((2, 4), np.float32), ref_log_probs=ref)
    log_probs, mask = jnp.full((2, 4), -1.0), batch.loss_mask
    settings = {"kl_loss_coef": 1.0, "kl_estimator_type": "k2"}
    for changes, expected in (
        ({}, mask / [[8], [6]]),
        ({"kl_loss_reduction": "loss"}, mask / 7),
        ({"use_unbiased_kl": True, "kl_estimator_type": "k1"}, 2 * mask / [[8], [6]]),
    ):
        algorithm = AlgorithmConfig(**settings | changes)
        gradients, _ = value_and_gradients(algorithm, batch, log_probs, jnp.zeros((2, 4)))
        np.testing.assert_allclose(gradients[0], expected, rtol=1e-6, err_msg=str(changes))


def test_an_adaptive_coefficient_of_the_entropy_is_that_of_the_step():
    algorithm = AlgorithmConfig(
        use_kl_loss=False, use_entropy_loss=True, entropy_ctrl=EntropyCtrlConfig("adaptive")
    )
    batch, zeros = small_batch(), jnp.zeros((2, 4))
    objective = make_objective(make_policy_loss(algorithm))
    for known, coef in (({}, 0.01), ({"entropy_coef": 0.5}, 0.5), ({"entropy_coef": 0.0}, 0.0)):
        weights, _ = minibatch_weights(batch, algorithm, block_rows=1, **known)
        slope, _ = jax.grad(objective, 1, has_aux=True)(zeros - 1, zeros, batch, weights, KEY)
        np.testing.assert_allclose(slope, -coef * batch.loss_mask / 7, rtol=1e-6)


def test_group_ids_need_not_start_at_zero():
    # one prompt of seven tokens
    algorithm = AlgorithmConfig(loss_reduction="prompt_mean")
    batch = small_batch(index=np.array([9, 9], np.int32))
    weights, _ = minibatch_weights(batch, algorithm, block_rows=1)
    np.testing.assert_allclose(weights.policy, batch.loss_mask / 7)


def test_the_kl_in_the_rewards_is_no_term_of_the_loss():
    algorithm = AlgorithmConfig(use_kl_loss=False, use_kl_in_reward=True, kl_loss_coef=0.5)
    batch = small_batch(ref_log_probs=np.zeros((2, 4), np.float32))
    _, metrics = value_and_gradients(algorithm, batch, jnp.full((2, 4), -1.0), jnp.zeros((2, 4)))
    assert "policy_kl" not in metrics
    assert metrics["final_loss"] == metrics["policy_loss"]


def test_the_mismatch_of_a_step_is_that_of_its_first_update():
    def update(difference):
        name = f"{MISMATCH}_max"
        return [{name: difference, "policy_loss": difference}], {"skipped_updates": 0}

    metrics = step_metrics([update(1.0), update(3.0)])  # the second holds what the first changed
    assert metrics[f"policy/{MISMATCH}_max"] == 1.0
    assert metrics["policy/policy_loss"] == 2.0  # (1 + 3) / 2


def test_masked_nan_stays_out_of_the_mismatch():
    nan = np.where(small_batch().loss_mask > 0, 0, np.nan).astype("float32")
    batch = small_batch(rollout_log_probs=nan, old_log_probs=None)
    weights, _ = minibatch_weights(batch, corrected(), block_rows=1)
    metrics = mismatch(jnp.full((2, 4), -0.5), batch, weights)
    assert {float(x) for x in metrics.values()} == {0.5}


# ---------------------------------------------------------------- functions of users


@pytest.fixture
def loss_of():
    """A policy loss as the trainer calls it, registered as "mine"."""

    def evaluate(func, batch=None, **settings):
        PolicyLossRegistry.register("mine", func)
        algorithm = AlgorithmConfig(policy_loss_type="mine", use_kl_loss=False, **settings)
        log_probs = jnp.full((2, 4), -1.0)
        return value_and_gradients(algorithm, batch or small_batch(), log_probs, log_probs)

    yield evaluate
    PolicyLossRegistry.unregister("mine")


def no_pair(log_probs, old_log_probs, advantages, config):
    return -log_probs


def forgetful(log_probs, old_log_probs, advantages, config):
    -log_probs * advantages, {}


def three(log_probs, old_log_probs, advantages, config):
    return -log_probs, {}, {}


def transposed(log_probs, old_log_probs, advantages, config):
    return log_probs.T, {}


def no_metrics(log_probs, old_log_probs, advantages, config):
    return -log_probs, None


def integers(log_probs, old_log_probs, advantages, config):
    return jnp.ones(log_probs.shape, int), {}


def text(log_probs, old_log_probs, advantages, config):
    return "loss", {}


def row_metric(log_probs, old_log_probs, advantages, config):
    return -log_probs, {"ratio": log_probs.sum(-1)}


def raises(log_probs, old_log_probs, advantages, config):
    raise KeyError("alpha")


def branches(log_probs, old_log_probs, advantages, config):
    return (log_probs if log_probs.sum() > 0 else -log_probs), {}


@pytest.mark.parametrize(
    ("func", "message"),
    [
        (no_pair, r"'mine' must return \(loss, metrics\), got one array: return loss, \{\}"),
        (forgetful, r"got NoneType: is a `return` missing\?"),
        (three, r"'mine' must return \(loss, metrics\), got tuple of 3"),
        (
            transposed,
            r"'mine' returned loss of shape \(4, 2\); expected one number \(\) or the loss of each "
            r"token \(2, 4\)",
        ),
        (integers, r"'mine' returned a loss of int32; it must be floating point"),
        (no_metrics, r"'mine' returned metric 'clip_ratio' of type NoneType; expected one number"),
        (text, r"'mine' returned loss of type str; expected one number"),
        (
            row_metric,
            r"'mine' returned metric 'ratio' of shape \(2,\); expected one number \(\) or",
        ),
        (raises, r"policy loss 'mine' raised KeyError: 'alpha'"),
        (branches, r"'mine' raised TracerBoolConversionError: .*no Python if"),
    ],
)
def test_what_is_wrong_with_a_loss_is_named(loss_of, func, message):
    with pytest.raises(ValueError, match=message):
        loss_of(jax.jit(func) if func is branches else func)


def test_a_correction_of_one_number_is_refused(loss_of):
    def scalar(log_probs, old_log_probs, advantages, config):
        return -log_probs.mean(), 0.0

    with pytest.raises(ValueError, match="'mine' returned one number: .* would have no effect"):
        loss_of(scalar, off_policy_correction=OffPolicyCorrectionConfig(tis_ratio_type="token"))


def test_a_loss_gets_the_ids_of_its_rows(loss_of):
    def by_row(log_probs, old_log_probs, advantages, config, *, row_ids, group_ids):
        return log_probs * row_ids[:, None], {"group_max": group_ids.max()}

    batch = small_batch(row_ids=np.array([5, 3], np.int32))
    gradients, metrics = loss_of(by_row, batch)
    # 5 / 7 on four tokens, 3 / 7 on three
    np.testing.assert_allclose(gradients[0], batch.loss_mask * [[5 / 7], [3 / 7]], rtol=1e-6)
    assert metrics["loss_metrics/group_max"] == pytest.approx(0, abs=1e-6)


def test_a_loss_may_name_the_log_probs_of_the_sampler_as_skyrl_does(loss_of):
    def weighted(log_probs, old_log_probs, advantages, config, rollout_logprobs=None):
        return log_probs * rollout_logprobs, {}

    batch = small_batch(rollout_log_probs=np.full((2, 4), -3.0, np.float32))
    gradients, _ = loss_of(weighted, batch)
    np.testing.assert_allclose(gradients[0], -3 / 7 * batch.loss_mask, rtol=1e-6)  # 7 tokens


def test_a_loss_may_ask_for_the_versions_and_the_age_of_tokens(loss_of):
    def aged(log_probs, old_log_probs, advantages, config, **batch):
        versions = batch["token_versions"] + 100 * batch["context_versions"]
        return log_probs * (versions + 10 * batch["staleness"]), {}

    names = ("token_versions", "staleness", "context_versions")
    fields = {name: np.full((2, 4), x, np.int32) for name, x in zip(names, (2, 3, 1), strict=True)}
    batch = small_batch(**fields)
    gradients, _ = loss_of(aged, batch)
    np.testing.assert_allclose(gradients[0], 132 / 7 * batch.loss_mask, rtol=1e-6)  # 7 tokens


def test_a_loss_that_does_not_read_versions_does_not_get_them():
    """Else whether a generator records them would be another program."""
    batch = small_batch(token_versions=np.zeros((2, 4), np.int32), staleness=np.ones((2, 4)))
    plain = policy_objective(AlgorithmConfig(), 1)
    assert plain.seen(batch).token_versions is plain.seen(batch).staleness is None
    aged = policy_objective(AlgorithmConfig(policy_loss_type="decoupled_ppo"), 1)
    assert aged.seen(batch).token_versions is None
    np.testing.assert_array_equal(aged.seen(batch).staleness, batch.staleness)


def test_the_mismatch_is_measured_where_the_sampler_is_the_old_policy():
    log_probs = jnp.full((2, 4), -1.0)
    batch = small_batch(rollout_log_probs=np.full((2, 4), -1.5, np.float32))
    for source, measured in (("trainer", False), ("rollout", True)):
        algorithm = AlgorithmConfig(use_kl_loss=False, old_log_probs=source)
        _, metrics = value_and_gradients(algorithm, batch, log_probs, log_probs)
        assert (f"{MISMATCH}_mean" in metrics) is measured
    assert metrics[f"{MISMATCH}_mean"] == pytest.approx(0.5)


def estimator_of(func, **settings):
    from jaxrl.registry import AdvantageEstimatorRegistry

    AdvantageEstimatorRegistry.register("mine", func)
    try:
        return bind_estimator(AlgorithmConfig(advantage_estimator="mine", **settings))
    finally:
        AdvantageEstimatorRegistry.unregister("mine")


ARRAYS = {
    "token_level_rewards": np.ones((2, 4), np.float32),
    "response_mask": np.ones((2, 4), np.float32),
    "index": np.zeros(2, np.int32),
    "loss_mask": np.ones((2, 4), np.float32),
}


@pytest.mark.parametrize(
    ("func", "message"),
    [
        (
            lambda **kwargs: kwargs["index"],
            r"'mine' must return \(advantages, returns\), got one array: return advantages, adv",
        ),
        (
            lambda token_level_rewards, **_: (token_level_rewards.sum(-1), token_level_rewards),
            r"'mine' returned advantages of shape \(2,\); expected a number for each token \(2",
        ),
        (
            lambda token_level_rewards, **_: (token_level_rewards, 0.0),
            r"'mine' returned returns of shape \(\); expected a number for each token \(2, 4\)",
        ),
        (lambda **kwargs: kwargs["nothing"], "'mine' raised KeyError: 'nothing'"),
        (
            lambda *, scores, **_: None,
            # in the words of Python, which are longer from 3.12 on
            "'mine': missing a required (keyword-only )?argument: 'scores'. It is called",
        ),
        (lambda **kwargs: (None, kwargs["index"]), "'mine' returned advantages of type NoneType; "),
    ],
)
def test_what_is_wrong_with_an_estimator_is_named(func, message):
    with pytest.raises(ValueError, match=f"advantage estimator {message}"):
        estimator_of(func)(**ARRAYS)


def test_an_estimator_gets_its_own_hyperparameters():
    def scaled(token_level_rewards, response_mask, index, *, scale=1.0, gamma, **_):
        return scale * gamma * token_level_rewards, token_level_rewards

    estimate = estimator_of(scaled, gamma=0.5, advantage_kwargs={"scale": 3.0})
    assert estimate(**ARRAYS)[1][0, 0] == 1.5
