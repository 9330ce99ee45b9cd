import pytest

from jaxrl.advantages import ESTIMATORS
from jaxrl.config import TrainConfig, apply_overrides, folded_card, objective_card
from jaxrl.losses import LOSSES
from jaxrl.losses.reduction import REDUCTIONS

CARD = """\
objective
  minimise     sum_bt w_bt l_bt + 0.001 KL      (minibatch of B rows b, tokens t, loss mask m)
  policy loss  regular: l = -min(r A, clip(r, 0.8, 1.2) A)
               r = exp(log_probs - old_log_probs)
               old_log_probs: the policy's at the start of the step, recomputed by the trainer
  advantage    grpo: A = (R - mean_G R) / (std_G R + 1e-6), G = the 5 samples of a prompt
  reduction    token_mean: w_bt = m_bt / sum m
  correction   off
  KL           KL = mean_b mean_t k3, k3 = exp(-d) + d - 1, d = log_probs - ref_log_probs
               its gradient is that of KL(ref | policy)
  entropy      off
  temperature  1, of sampling and of every log-softmax
  filters      none
  optimizer    AdamW, lr 1e-06 constant_with_warmup, 0 warm-up updates, weight decay 0.01, gradient
               norm <= 1
  batch        1024 prompts x 5 samples = 5120 rows per step
               -> 4 minibatches x 1 pass = 4 optimizer updates of 256 prompts = 1280 rows
               -> 160 microbatches of 1 row on each of 8 devices"""


def test_a_folded_card_says_what_it_sums():
    assert folded_card(TrainConfig(), 1, 130).splitlines()[:4] == [
        "objective",
        *CARD.splitlines()[1:3],
        "  batch        1024 prompts x 5 samples = 5120 rows per step",
    ]
    gspo = apply_overrides(TrainConfig(), {"trainer.algorithm.policy_loss_type": "gspo"})
    assert "               r = exp(mean_t (log_probs - old_log_probs)), per row" in (
        folded_card(gspo, 1, 130).splitlines()
    )


def test_card_of_the_defaults():
    assert objective_card(TrainConfig(), num_devices=8) == CARD


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (
            {"trainer.algorithm.policy_loss_type": "dual_clip"},
            ["dual_clip: l = -min(r A, clip(r, 0.8, 1.2) A), l = min(l, -3 A) where A < 0"],
        ),
        (
            {
                "trainer.algorithm.policy_loss_type": "gspo",
                "trainer.algorithm.loss_reduction": "sequence_mean",
                "trainer.algorithm.eps_clip_high": 4e-4,
            },
            [
                "gspo: l = -min(r A, clip(r, 0.8, 1.0004) A)",
                "r = exp(mean_t (log_probs - old_log_probs)), per row",
                "sequence_mean: w_bt = m_bt / (B sum_t m_bt)",
            ],
        ),
        (
            {"generator.sampling_params.logprobs": None},
            ["sampler      gives no log-probs: all log-probs are of the trainer's own forward"],
        ),
        (
            {"trainer.algorithm.policy_loss_type": "cross_entropy"},
            ["cross_entropy: l = -log_probs", "advantage    not used by the loss"],
        ),
        (
            {
                "trainer.algorithm.policy_loss_type": "m:f",
                "trainer.algorithm.policy_loss_kwargs.beta": 0.1,
                "trainer.algorithm.advantage_estimator": "m:g",
            },
            ["custom function m:f", "with beta=0.1", "custom function m:g, gamma=1, lambd=1"],
        ),
        (
            {
                "trainer.algorithm.use_kl_loss": False,
                "trainer.algorithm.use_entropy_loss": True,
                "trainer.algorithm.grpo_norm_by_std": False,
                "trainer.algorithm.loss_reduction": "seq_mean_token_sum_norm",
            },
            [
                "minimise     sum_bt w_bt l_bt - 0.01 H ",
                "KL           off",
                "H = sum_bt m_bt H_bt / sum m",
                "grpo: A = R - mean_G R, G",
                "w_bt = m_bt / (B 1536)",
            ],
        ),
        (
            {
                "trainer.train_batch_size": 6,
                "trainer.policy_mini_batch_size": 3,
                "trainer.update_epochs_per_batch": 2,
                "trainer.micro_train_batch_size_per_gpu": 4,
                "trainer.algorithm.advantage_estimator": "rloo",
                "generator.apply_overlong_filtering": True,
            },
            [
                "6 prompts x 5 samples = 30 rows per step",
                "-> 2 minibatches x 2 passes = 4 optimizer updates of 3 prompts = 15 rows",
                "-> 2 microbatches of 4 rows on each of 2 devices, the last with 1 empty row",
                "rloo: A = R - mean of the others in G",
                "filters      loss mask 0 unless stop_reason is 'stop'",
            ],
        ),
    ],
)
def test_card_has_the_numbers_and_fits_the_terminal(overrides, lines):
    card = objective_card(apply_overrides(TrainConfig(), overrides), num_devices=2)
    for line in lines:
        assert line in card
    assert_fits(card)


def assert_fits(card):
    assert len(card.splitlines()) <= 30
    assert max(len(line) for line in card.splitlines()) <= 100
    assert card.isascii()


def card_of(**algorithm):
    changes = {f"trainer.algorithm.{name.replace('__', '.')}": x for name, x in algorithm.items()}
    card = objective_card(apply_overrides(TrainConfig(), changes))
    assert_fits(card)
    return " ".join(card.split())


LOSSES_WITH_NUMBERS = {
    "regular": "l = -min(r A, clip(r, 0.8, 1.2) A) r = exp(log_probs - old_log_probs) old",
    "dual_clip": "clip(r, 0.8, 1.2) A), l = min(l, -3 A) where A < 0 r = exp(log_probs - old",
    "gspo": "clip(r, 0.8, 1.2) A) r = exp(mean_t (log_probs - old_log_probs)), per row",
    "sapo": "l = -4/tau sigmoid(tau (r - 1)) A, tau = 1 where A > 0, else 1.05 r =",
    "cispo": "l = -sg[clip(r, 0, 5)] A log_probs r = exp(log_probs - old_log_probs)",
    "rollout_is": "l = -sg[r] A log_probs where 0.8 < r < 1.2, else 0 r = exp(log_probs - rollout",
    "dppo": "l = -r A; 0 where |p - q| > 0.2 (A > 0, p > q) or 0.2 (A < 0, p < q) r = exp(log_pr",
    "decoupled_ppo": "sg[v] -min(r A, clip(r, 0.8, 1.2) A) where v <= 5, else 0 r = exp(log_probs "
    "- old_log_probs), v = exp(old_log_probs - rollout_log_probs) old_log_probs: the policy's at",
    "clip_cov": "0 for 0.0002 of the tokens, random with 1 < cov < 5 r = exp(log_probs - old",
    "kl_cov": "l = -r A, + 1 |log r| for the 0.2 of the tokens with highest cov r = exp",
    "gmpo": "l = -r A, e = min(d, 0.2) where A > 0, max(d, -0.2) where A < 0 r = exp(mean_t e)",
    "importance_sampling": "l = -r A r = exp(log_probs - old_log_probs)",
    "cross_entropy": "l = -log_probs advantage not used",
    "ce_gppo": "l = -w A, w = 0.75 x 0.8 r/sg[r] where r < 0.8, A < 0; 1 x 1.2 r/sg[r] where r",
    "vespo": "l = -sg[W^k exp(lambda (1 - W))] A log_probs, k = 2, lambda = 3 where A >= 0, else "
    "3, 2 W = exp(sum_t (log_probs - old_log_probs)), per row",
    "luspo": "clip(r, 0.8, 1.2) A) |y|, |y| = tokens of the row r = exp(mean_t (log_probs - old",
    "topr": "alpha = min(W, 1) where A < 0, else 1 W = exp(sum_t (log_probs - rollout_log_probs))",
    "gpg": "l = -A log_probs advantage",
    "dro": "l = -A log_probs + beta/2 (log r)^2 r = exp(log_probs - old_log_probs)",
    "m2po": "l = -r A; where A log r > 0, 0 for the largest (log r)^2 until the mean is <= 0.04 r",
    "aspo": "w = min(1/r, 3) where A > 0, r <= 1.2; min(r, 3) where A < 0, r >= 0.8; else 0 r =",
    "dcpo": "clip(r, 1/2 + sqrt(1 - 0.8/q)/2, 1/2 + sqrt(1 + 0.8/q)/2) A), r <= 10 r = exp(",
    "bapo": "low in [0.6, 0.9], high in [1.2, 3]: |l| of A > 0 at least 0.4 of all r = exp(",
    "luffy": "clip(r, 0.8, 1.2) A); of demonstrations -p/(p + 0.1) A, p = exp(log_probs) r = exp(",
    "chord": "mean of samples, times 0.9; of demonstrations -sg[p(1 - p)] log_probs, mean of their",
    "ipo": "l = -r A where |p - q| <= 0.1, else 0; + 0.001 (log r)^2 r = exp(log_probs - rollout",
}


def test_every_loss_and_estimator_has_its_formula():
    assert LOSSES_WITH_NUMBERS.keys() == LOSSES.keys()
    for name, formula in LOSSES_WITH_NUMBERS.items():
        assert formula in card_of(policy_loss_type=name)
    for name in ESTIMATORS:
        assert f"advantage {name}: A = " in card_of(advantage_estimator=name)
    for name in REDUCTIONS:
        assert f"reduction {name}: w_bt = m_bt / (" in card_of(loss_reduction=name).replace(
            "m_bt / sum", "m_bt / (sum"
        )


def test_settings_of_the_estimator_are_in_its_equation():
    card = card_of(advantage_kwargs={"epsilon": 1e-4})
    assert "A = (R - mean_G R) / (std_G R + 0.0001), G = the 5 samples of a prompt red" in card
    card = card_of(advantage_kwargs={"grpo_norm_by_std": False})
    assert "grpo: A = R - mean_G R, G = the 5 samples of a prompt red" in card
    token = {"advantage_estimator": "grpo_token", "gamma": 0.9}
    assert "R = r_t + 0.5 R_t+1" in card_of(**token, advantage_kwargs={"gamma": 0.5})
    gae = {"advantage_estimator": "gae", "gamma": 0.5}
    assert "G_t = d_t + 0.25 G_t+1" in card_of(**gae, advantage_kwargs={"lambd": 0.5})


def mean_loss(log_probs, old_log_probs, advantages, config):
    return -(log_probs * advantages).mean(), 0.0


def test_a_loss_of_one_number_reduces_by_itself():
    card = card_of(policy_loss_type=f"{__name__}:mean_loss")
    assert "minimise l + 0.001 KL (" in card
    assert "reduction the loss reduces by itself; token_mean has no effect" in card


def test_the_policy_that_the_ratio_is_relative_to():
    assert "old_log_probs: the policy's at the start of the step, recomputed" in card_of()
    rollout = "r = exp(log_probs - rollout_log_probs) rollout_log_probs: the sampler's"
    assert rollout in card_of(policy_loss_type="cispo", cispo__cispo_anchor="rollout")
    card = card_of(policy_loss_type="decoupled_ppo", decoupled_ppo__proximal="log_linear")
    assert "prox = rollout_log_probs + d / (d + 1) sg[log_probs - rollout_log_probs] d = st" in card
    card = card_of(old_log_probs="rollout")
    assert "old_log_probs: the sampler's, as it recorded them; no forward pass advantage" in card
    once = {"trainer.train_batch_size": 8, "trainer.policy_mini_batch_size": 8}
    card = objective_card(apply_overrides(TrainConfig(), once))
    assert "old_log_probs: the policy's own, since a batch has one update; r = 1" in card
    # a correction has to know the old policy anyway
    once["trainer.algorithm.off_policy_correction.tis_ratio_type"] = "token"
    assert "recomputed by the trainer" in objective_card(apply_overrides(TrainConfig(), once))


def test_every_active_correction_has_a_line():
    card = card_of(
        off_policy_correction__tis_ratio_type="token",
        off_policy_correction__sequence_mask_metric="geometric",
        off_policy_correction__outlier_token_is_threshold_low=0.01,
        off_policy_correction__outlier_token_is_threshold_high=100,
        off_policy_correction__token_mask_is_threshold_low=0.5,
        off_policy_correction__token_mask_is_threshold_high=2,
        off_policy_correction__renormalize=True,
    )
    for line in (
        "minimise sum_bt c_bt w_bt l_bt + 0.001 KL",
        "correction v = exp(old_log_probs - rollout_log_probs); w counts the tokens left",
        "c = 0 for rows with any v < 0.01 or v > 100",
        "c = 0 for tokens with v outside [0.5, 2]",
        "c = min(v, 2)",
        "c = 0 for rows with geometric mean of v outside [0.99, 1.01]",
    ):
        assert line in card
    card = card_of(
        off_policy_correction__tis_ratio_type="sequence",
        off_policy_correction__sequence_mask_metric="product",
    )
    assert "w counts the tokens of m, dropped or not c = min(prod_t v, 5), per row" in card
    assert "c = 0 for rows with product of v outside [0.5, 2]" in card


def test_kl_in_the_rewards_and_its_controller():
    settings = {"use_kl_loss": False, "use_kl_in_reward": True}
    card = card_of(**settings)
    assert "minimise sum_bt w_bt l_bt (" in card
    assert "KL in the rewards: r_t - beta k3_t, k3 = exp(-d) + d - 1, d = old_log_probs" in card
    assert "beta = 0.001, fixed" in card
    # 1024 prompts x 5 samples
    assert (
        "beta = 0.001 at first; after each step beta (1 + clip(KL / 0.1 - 1, -0.2, 0.2) 5120 / "
        "10000)" in card_of(**settings, kl_ctrl__type="adaptive")
    )


def test_filters_and_shaped_rewards_are_named():
    card = card_of(
        dynamic_sampling__type="replace",
        zero_variance_filter=True,
        overlong_buffer={"len": 100, "penalty_factor": 0.5},
        advantage_batch_normalize=True,
    )
    for line in (
        "filters replace: batches are drawn until rewards differ; if 0.3 of the prompts differ, "
        "they replace the others, at most 30",
        "reward less 0.5 (length - 924) / 100 beyond 924 of 1024 tokens",
        "loss mask 0 for prompts whose rewards differ by at most 1e-06",
        "then (A - mean A) / std A over the sampled tokens of the batch",
    ):
        assert line in card
    assert "those that differ are collected, at most 30" in card_of(dynamic_sampling__type="filter")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({}, "sampling is up to 4 steps ahead, 768 prompts at a time; weights change in flight"),
        (
            {"schedule": "lockstep", "max_staleness_steps": 2},
            "ahead        batch t is sampled by the policy after max(0, t - 1 - 2) steps",
        ),
        (
            {"max_staleness_steps": 0},
            "ahead        batch t is sampled by the policy after max(0, t - 1) steps",
        ),
    ],
)
def test_how_far_sampling_is_ahead(settings, line):
    changes = {"enabled": True, **settings}
    changes = {f"trainer.fully_async.{name}": value for name, value in changes.items()}
    changes["trainer.train_batch_size"] = 256
    assert line in objective_card(apply_overrides(TrainConfig(), changes))


def test_the_card_of_a_mesh_needs_no_devices():
    mesh = {"trainer.policy.mesh": {"expert": 4, "tensor": 2, "fsdp": -1}}
    config = apply_overrides(TrainConfig(), mesh)
    assert objective_card(config) == objective_card(config, num_devices=8)
    assert "on each of 4 groups of 2 devices" in objective_card(config)
    assert objective_card(TrainConfig()) == objective_card(TrainConfig(), num_devices=1)


def test_a_notebook_shows_the_card_as_a_table():
    card = objective_card(TrainConfig())
    table = card._repr_html_()
    assert table.count("<tr>") == 11  # of 15 labels: no sampler, ahead, critic, platform here
    assert '<th style="text-align: left">policy loss</th>' in table
    assert "l = -min(r A, clip(r, 0.8, 1.2) A)<br>" in table
    assert "norm &lt;= 1" in table  # gradient norm <= 1
