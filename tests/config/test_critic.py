"""What a critic and a moving reference need, and what they cannot have."""

import warnings

import pytest

from jaxrl.config import TrainConfig, objective_card, validate

CRITIC = {
    "trainer.critic.model.path": "m",
    "trainer.algorithm.advantage_estimator": "gae",
    "trainer.algorithm.use_kl_loss": False,
}
MOVING = {"trainer.update_ref_every_epoch": True, "trainer.algorithm.use_kl_loss": True}
ADAPTERS = {**MOVING, "trainer.policy.model.lora.rank": 4}


def own(token_level_rewards, response_mask, index, values=None):
    return values, values


def made(settings):
    return TrainConfig.from_cli_overrides(settings)


def test_a_critic_is_valid_and_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validate(made(CRITIC), num_devices=8)
        validate(made(MOVING))
        validate(made(ADAPTERS))


WRONG = [
    (
        {"trainer.critic_mini_batch_size": 2048},
        r"train_batch_size=1024: .*critic_mini_batch_size=2048\); set critic_mini_batch_size to 10",
    ),
    (
        {"trainer.critic_mini_batch_size": 768},
        r"not a multiple of trainer.critic_mini_batch_size=768 \(1024 = 1 x 768 \+ 256\); .* 1536",
    ),
    ({"trainer.critic_mini_batch_size": 0}, r"critic_mini_batch_size=0: must be positive"),
    ({"trainer.algorithm.value_clip": 0}, r"value_clip=0.0: must be > 0, .* None is no clip"),
    ({"trainer.algorithm.value_head_prefix": "model"}, r"value_head_prefix='model': must be a na"),
    ({"trainer.algorithm.value_head_prefix": "a.b"}, r"value_head_prefix='a.b': must be a name"),
    (
        {"trainer.critic.optimizer_config.lr": -1},
        r"trainer.critic.optimizer_config.lr=-1.0: must n",
    ),
    (
        {"trainer.critic.optimizer_config.scheduler": "cosin"},
        r"trainer.critic.optimizer_config.scheduler='cosin': .*did you mean 'cosine'",
    ),
    (
        {
            "generator.step_wise_trajectories": True,
            "generator.max_turns": 2,
            "trainer.algorithm.advantage_estimator": f"{__name__}:own",
        },
        r"step_wise_trajectories=True: .* is that of its last row, .* to one without values",
    ),
    ({"trainer.critic.mesh": {"tensor": 3}}, r"trainer.critic.mesh=\{.*'tensor': 3\}"),
    (
        {"trainer.critic.mesh": {"fsdp": 4}, "trainer.critic.fsdp_config.fsdp_size": 2},
        r"trainer.critic.mesh.fsdp=4: trainer.critic.fsdp_config.fsdp_size=2 says otherwise",
    ),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=str)
def test_a_critic_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        validate(made(CRITIC | settings), num_devices=8)


def test_a_critic_without_effect_is_warned_of():
    settings = CRITIC | {"trainer.algorithm.advantage_estimator": "grpo"}
    with pytest.warns(UserWarning, match=r"'grpo' takes no values: .*path='m' is trained, and has"):
        validate(made(settings))


def test_the_settings_of_a_critic_that_is_not_there_do_not_matter():
    validate(made({"trainer.critic_mini_batch_size": 100, "trainer.algorithm.value_clip": -1}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer.ref.model.path": "r"}, r"every_epoch=True: .* trainer.ref.model.path='r' is an"),
        ({"trainer.ref.mesh": {"fsdp": 1}}, r"every_epoch=True: .* needs trainer.ref.mesh=None"),
    ],
)
def test_a_moving_reference_with_adapters_shares_the_policys_base(settings, message):
    with pytest.raises(ValueError, match=message):
        validate(made(ADAPTERS | settings))


def test_a_moving_reference_without_effect_is_warned_of():
    settings = MOVING | {"trainer.algorithm.use_kl_loss": False}
    with pytest.warns(UserWarning, match="every_epoch=True has no effect: no KL counts"):
        validate(made(settings))


def test_the_card_says_what_the_critic_minimises_and_that_the_reference_moves():
    settings = {
        "trainer.critic_mini_batch_size": 512,
        "trainer.update_epochs_per_batch": 3,
        "trainer.algorithm.value_clip": 0.3,
    }
    card = " ".join(objective_card(made(CRITIC | MOVING | settings)).split())
    for text in (
        "critic minimise mean_b mean_t max((V - y)^2, (c - y)^2) / 2, c = V_old + clip(V - V_old, "
        "-0.3, 0.3) y_t = G_t + V_old,t, the returns AdamW, lr 5e-06 constant_with_warmup",
        "2 minibatches x 3 passes = 6 optimizer updates of 512 prompts, before the policy's",
        "ref is the policy at the end of the last epoch; in the first one the given model",
        "gae: A = normalised G_t",
    ):
        assert text in card
    unclipped = objective_card(made(CRITIC | {"trainer.algorithm.value_clip": None}))
    assert "minimise mean_b mean_t (V - y)^2 / 2" in unclipped
    assert "critic" not in objective_card(TrainConfig())
