import pytest

from jaxrl.config import TrainConfig, apply_overrides, objective_card

CARD = """\
objective
  minimise     sum_bt w_bt l_bt + 0.001 KL      (minibatch of B rows b, tokens t, loss mask m)
  policy loss  regular: l = -min(r A, clip(r, 0.8, 1.2) A)
               r = exp(log_probs - old_log_probs)
  advantage    grpo: A = (R - mean_G R) / (std_G R + 1e-6), G = the 5 samples of a prompt
  reduction    token_mean: w_bt = m_bt / sum m
  KL           KL = mean_b mean_t k3, k3 = exp(-d) + d - 1, d = log_probs - ref_log_probs
  entropy      off
  temperature  1, of sampling and of every log-softmax
  masked rows  none
  optimizer    AdamW, lr 1e-06 constant_with_warmup, 0 warm-up updates, gradient norm <= 1
  batch        1024 prompts x 5 samples = 5120 rows per step
               -> 4 minibatches x 1 pass = 4 optimizer updates of 256 prompts = 1280 rows
               -> 160 microbatches of 1 row on each of 8 devices"""


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
                "masked rows  loss mask 0 unless stop_reason is 'stop'",
            ],
        ),
    ],
)
def test_card_has_the_numbers_and_fits_the_terminal(overrides, lines):
    card = objective_card(apply_overrides(TrainConfig(), overrides), num_devices=2)
    for line in lines:
        assert line in card
    assert len(card.splitlines()) <= 25
    assert max(len(line) for line in card.splitlines()) <= 100
    assert card.isascii()
