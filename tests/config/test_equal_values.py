"""What the migration page and the table of eight systems call equal gives equal numbers.

Expected numbers are those of the other system's formula, with the arithmetic beside them.
"""

import re

import jax
import numpy as np
import pytest

from docs.generate.grpo_variants import GRPO_VARIANTS
from jaxrl.array_ops import masked_sum
from jaxrl.config import AlgorithmConfig, TrainConfig, apply_overrides
from jaxrl.data.packing import empty_batch
from jaxrl.losses.off_policy import off_policy_correction
from jaxrl.registry.bind import make_policy_loss
from jaxrl.training.objective import make_objective, minibatch_weights
from jaxrl.training.rewards import make_estimate
from tests.docs.test_migration_pages import VERL_AND_TRL, rows

KEY = jax.random.key(0)


def algorithm_with(settings):
    settings = {f"trainer.algorithm.{name}": value for name, value in settings.items()}
    return apply_overrides(TrainConfig(), settings).trainer.algorithm


def mean_of_losses(algorithm, block_rows=1):
    """Rows of one token with loss 6 and of three with 1, 2, 3."""
    mask = np.array([[1, 0, 0], [1, 1, 1]], np.float32)
    batch = empty_batch(2, 3).replace(loss_mask=mask)
    weights, _ = minibatch_weights(batch, algorithm, block_rows=block_rows)
    return masked_sum(np.array([[6.0, 9, 9], [1, 2, 3]]), weights.policy)


def advantages(algorithm, scores, values=None):
    """Of one prompt's samples; a list of lists has a reward and a value for each token."""
    rewards = np.array(scores, np.float32).reshape(len(scores), -1)
    given = {"token_level_rewards": rewards, "index": np.zeros(len(scores), np.int32)}
    given |= dict.fromkeys(("response_mask", "loss_mask"), np.ones_like(rewards))
    values = None if values is None else np.array(values, np.float32)
    return make_estimate(algorithm)(**given, values=values)[1]


def losses(algorithm, ratios, advantage, probability=0.5):
    """Of the tokens of one sequence."""
    ones = np.ones((1, len(ratios)), np.float32)
    log_probs = np.log(probability) * ones
    batch = empty_batch(*ones.shape).replace(
        loss_mask=ones, old_log_probs=log_probs - np.log(ratios), advantages=advantage * ones
    )
    return make_policy_loss(algorithm)(log_probs, 0 * ones, batch, KEY)[0][0]


def weights_of_ratios(algorithm, ratios):
    """What the off-policy correction makes of rows of pi_old / pi_rollout."""
    log_ratios = np.log(np.array(ratios, np.float32))
    settings = algorithm.off_policy_correction
    found = off_policy_correction(log_ratios, 0 * log_ratios, 0 * log_ratios + 1, settings)
    return found[0] * (found[1] != 0)


def kl(algorithm):
    """Of one token with log pi - log ref = log 2."""
    one = np.ones((1, 1), np.float32)
    batch = empty_batch(1, 1).replace(loss_mask=one, ref_log_probs=0 * one - 3, advantages=0 * one)
    weights, _ = minibatch_weights(batch, algorithm, block_rows=1)
    objective = make_objective(make_policy_loss(algorithm))
    log_probs = batch.ref_log_probs + np.log(2)
    return objective(log_probs, 0 * one, batch, weights, KEY)[1]["policy_kl"]


CORRECTION = "off_policy_correction"
TOKEN_MEAN = ({}, mean_of_losses, 3)  # (6 + 1 + 2 + 3) / 4
SEQUENCE_MEAN = ({}, mean_of_losses, 4)  # (6 + (1 + 2 + 3) / 3) / 2
# at most 10 tokens of a response: (6 + 6) / 10 / 2
TOKEN_SUM = ({"max_seq_len": 10}, mean_of_losses, 0.6)
# A sequence of ratios 4 and 1 has sqrt(4 x 1) = 2, clipped at 1 + 0.25 for A = 1
GSPO = ({"eps_clip_high": 0.25}, lambda a: losses(a, [4, 1], 1.0), [-1.25, -1.25])
# setting -> their value -> (what is set beside, what is computed, their number)
EQUAL = {
    "policy_loss.loss_mode": {
        # A = -1: max(4, 1.2) = 4, but at most 3
        "vanilla": ({"clip_ratio_c": 3.0}, lambda a: losses(a, [4], -1.0), [3]),
        # e = min(1, 0.4), -1: mean -0.3: -exp(-0.3)
        "geo_mean": (
            {"eps_clip_low": 0.4, "eps_clip_high": 0.4, "loss_reduction": "sequence_mean"},
            lambda a: losses(a, np.exp([1, -1]), 1.0),
            [-0.7408182, -0.7408182],
        ),
        "gspo": GSPO,
        # -4 / tau sigmoid(tau (2 - 1)), tau 1: -4 x 0.7310586
        "sapo": ({"sapo.tau_pos": 1.0}, lambda a: losses(a, [2], 1.0), [-2.9242343]),
        # weight 2 limited to 1 + 0.28: -1.28 log(1/2)
        "cispo": (
            {"cispo.cispo_eps_clip_low": 0.2, "cispo.cispo_eps_clip_high": 0.28},
            lambda a: losses(a, [2], 1.0),
            [0.8872284],
        ),
        "gpg": ({}, lambda a: losses(a, [2], 3.0), [2.0794415]),  # -3 log(1/2)
        # -(3 log(1/2) - 0.1 / 2 (log 2)^2) = 2.0794415 + 0.0240227
        "dro": (
            {"policy_loss_kwargs": {"beta": 0.1}},
            lambda a: losses(a, [2], 3.0),
            [2.1034642],
        ),
    },
    "loss_agg_mode": {
        "token-mean": TOKEN_MEAN,
        "seq-mean-token-mean": SEQUENCE_MEAN,
        "seq-mean-token-sum-norm": TOKEN_SUM,
    },
    "kl_loss_type": {
        "kl": ({}, kl, 0.6931472),  # log 2
        "mse": ({}, kl, 0.2402265),  # log(2)^2 / 2
        "low_var_kl": ({}, kl, 0.1931472),  # 1/2 + log 2 - 1
    },
    "algorithm.adv_estimator": {
        # 1/2 over the std with n - 1, sqrt(1/2)
        "grpo": ({}, lambda a: advantages(a, [1, 0])[:, 0], [0.7071058, -0.7071058]),
        "rloo": ({}, lambda a: advantages(a, [1, 0, 0])[:, 0], [1, -0.5, -0.5]),
        # errors 0 + 0.6 - 0.2 and 1 - 0.6, sums 0.8 and 0.4: mean 0.6, variance 0.08
        "gae": (
            {},
            lambda a: advantages(a, [[0, 1]], [[0.2, 0.6]])[0],
            [0.7071067, -0.7071067],
        ),
        # returns 1 and 3: mean 2, variance 2
        "reinforce_plus_plus": ({}, lambda a: advantages(a, [1, 3])[:, 0], [-0.7071068, 0.7071068]),
        # less the mean -1 and 1: mean 0, variance 2
        "reinforce_plus_plus_baseline": (
            {},
            lambda a: advantages(a, [1, 3])[:, 0],
            [-0.7071068, 0.7071068],
        ),
        # of rows of one token the baseline is the mean
        "opo": ({}, lambda a: advantages(a, [1, 3])[:, 0], [-1, 1]),
    },
    "norm_adv_by_std_in_grpo": {
        "True": ({}, lambda a: advantages(a, [1, 0])[:, 0], [0.7071058, -0.7071058]),
        "False": ({}, lambda a: advantages(a, [1, 0])[:, 0], [0.5, -0.5]),
    },
    "importance_sampling_level": {
        "token": ({}, lambda a: losses(a, [4, 1], 1.0), [-1.2, -1]),
        "sequence": GSPO,
    },
    "loss_type": {
        "dapo": TOKEN_MEAN,
        "grpo": SEQUENCE_MEAN,
        "dr_grpo": TOKEN_SUM,
        # microbatches of one row: 6 and 2; of two rows it is the mean over tokens, 3
        "bnpo": ({}, mean_of_losses, 4),
    },
    "scale_rewards": {
        # 1/2 / (0.7071068 + 1e-4)
        "group": (
            {"advantage_kwargs": {"epsilon": 1e-4}},
            lambda a: advantages(a, [1, 0])[:, 0],
            [0.7070068, -0.7070068],
        ),
        "none": ({}, lambda a: advantages(a, [1, 0])[:, 0], [0.5, -0.5]),
        # 3/4 / (1/4 + 1e-6), -1/4 / (1/4 + 1e-6)
        "mean": (
            {},
            lambda a: advantages(a, [1, 0, 0, 0])[:, 0],
            [2.999988, *[-0.999996] * 3],
        ),
        # 1/2 / (0.7071068 + 1e-4): one group is the batch
        "batch": (
            {"advantage_kwargs": {"epsilon": 1e-4}},
            lambda a: advantages(a, [1, 0])[:, 0],
            [0.7070068, -0.7070068],
        ),
    },
    "vllm_importance_sampling_mode": {  # the cap is 3
        "token_truncate": (
            {f"{CORRECTION}.token_tis_ratio_clip_high": 3.0},
            lambda a: weights_of_ratios(a, [[4, 2]]),
            [[3, 2]],
        ),
        "sequence_truncate": (  # 2 x 4 = 8 and 2 x 1/2 = 1
            {f"{CORRECTION}.sequence_tis_ratio_clip_high": 3.0},
            lambda a: weights_of_ratios(a, [[2, 4], [2, 0.5]]),
            [[3, 3], [1, 1]],
        ),
        "token_mask": (
            {
                f"{CORRECTION}.token_tis_ratio_clip_high": 3.0,
                f"{CORRECTION}.token_mask_is_threshold_low": 0.0,
                f"{CORRECTION}.token_mask_is_threshold_high": 3.0,
            },
            lambda a: weights_of_ratios(a, [[4, 2]]),
            [[0, 2]],
        ),
        "sequence_mask": (
            {
                f"{CORRECTION}.sequence_tis_ratio_clip_high": 3.0,
                f"{CORRECTION}.sequence_mask_metric": "product",
                f"{CORRECTION}.product_mask_low": 0.0,
                f"{CORRECTION}.product_mask_high": 3.0,
            },
            lambda a: weights_of_ratios(a, [[2, 4], [2, 0.5]]),
            [[0, 0], [1, 1]],
        ),
    },
}


def claims():
    """Rows of the page that pair values: (their setting, their value, our field, our value)."""
    for heading in ("verl", "TRL"):
        for theirs, ours, note in rows(VERL_AND_TRL, heading):
            field = re.match(r"`trainer\.algorithm\.([\w.]+)`", ours)
            for name, value in re.findall(r"`([\w-]+)`: `([\w=\"+]+)`", note) if field else ():
                setting = next(s for s in EQUAL if f"{s}`" in theirs)
                other = re.fullmatch(r'(\w+)="(\w+)"', value)  # another field than the row's
                yield setting, name, *(other.groups() if other else (field.group(1), value))


@pytest.mark.parametrize(("setting", "name", "field", "value"), claims(), ids=str)
def test_paired_values_compute_the_same_numbers(setting, name, field, value):
    beside, compute, number = EQUAL[setting][name]
    value = {"True": True, "False": False}.get(value, value)
    algorithm = algorithm_with({field: value, **beside})
    found = jax.jit(lambda: compute(algorithm))()  # one program in place of one for each operation
    np.testing.assert_allclose(found, number, rtol=2e-6)


def test_every_number_is_claimed():
    found = {(setting, name) for setting, name, *_ in claims()}
    assert found == {(setting, name) for setting, names in EQUAL.items() for name in names}


def test_what_the_page_says_of_unequal_values():
    # a KL of 1 on a row of one token, beside nine without: 1/2 here, 1/10 over tokens
    mask = np.zeros((2, 9), np.float32)
    mask[0, 0] = mask[1] = 1
    weights, _ = minibatch_weights(
        empty_batch(2, 9).replace(loss_mask=mask), AlgorithmConfig(), block_rows=1
    )
    np.testing.assert_allclose([weights.kl[0, 0], weights.policy[0, 0]], [0.5, 0.1], rtol=1e-6)


# ---------------------------------------------------------------- the table of eight systems

# One prompt, scores 1 and 0, each answered with two tokens of which the second response has one.
# pi / pi_old = 1.5, 1 and 0.5; pi_old / pi_rollout = 1, 2 and 4. Advantages:
#   std: +-0.5 / 0.7071068 = +-0.7071; mean alone: +-0.5; of the other: +-1
#   then over the batch (AReaL): 0.7071, 0.7071, -0.7071: mean 0.2357, variance 4/9: 0.7071, -1.4142
MASK = np.array([[1, 1], [1, 0]], np.float32)
MOVED = np.array([[1.5, 1], [0.5, 1]], np.float32)
APART = np.array([[1, 2], [4, 1]], np.float32)
S = 0.7071068
SYSTEMS = {
    # -S min(1.5, 1.2), -S; A < 0: max(0.5, 0.8) S, at most 3 S; over 3 tokens
    "verl": S * (-1.2 - 1 + 0.8) / 3,
    "SkyRL": S * (-1.2 - 1 + 0.8) / 3,  # and 0.001 KL, here of the reference itself
    # of sequences: 1 x 2 = 2 weighs 2, 4 is above 3 and dropped
    "TRL": 0.5 / (S + 1e-4) * 2 * (-1.2 - 1) / 3,
    # p - q of the sampler: 0.15 - 0.1, 0.2 - 0.1 and 0.2 - 0.1 are within 0.2; ratios 1.5, 2, 2
    "prime-rl": 0.5 * (-1.5 - 2 + 2) / 3,
    # weights 1, 2, 4; 1.5 clipped to 1.4; A < 0: max(0.5, 0.6)
    "AReaL": (-1 * S * 1.4 - 2 * S + 4 * 2 * S * 0.6) / 3,
    "slime": S * ((-1.2 - 1) / 2 + 0.8) / 2,
    "OpenRLHF": 0.5 / (S + 1e-9) * (-1.2 - 1 + 0.8) / 3,  # with a KL of 0
    "NeMo-RL": (-1.2 - 1 + 0.8) / 3,  # one other has no std
}


@pytest.mark.parametrize("variant", GRPO_VARIANTS, ids=lambda v: v.system)
def test_the_objective_of_each_of_the_eight_systems(variant):
    total = jax.jit(lambda: objective_of(algorithm_with(variant.settings)))()
    np.testing.assert_allclose(total, SYSTEMS[variant.system], rtol=1e-5)


def objective_of(algorithm):
    rewards = np.array([[0, 1], [0, 0]], np.float32)
    data = {"token_level_rewards": rewards, "response_mask": MASK, "loss_mask": MASK}
    _, found, _ = make_estimate(algorithm)(**data, index=np.zeros(2, np.int32))
    rollout = np.full((2, 2), np.log(0.1), np.float32)
    old = rollout + np.log(APART)
    batch = empty_batch(2, 2).replace(
        loss_mask=MASK,
        old_log_probs=old,
        rollout_log_probs=rollout,
        ref_log_probs=old + np.log(MOVED),
        advantages=found,
    )
    weights, _ = minibatch_weights(batch, algorithm, block_rows=1)
    objective = make_objective(make_policy_loss(algorithm))
    return objective(old + np.log(MOVED), 0 * MASK, batch, weights, KEY)[0]
