"""The critic: what it values, its gradient through the real update, whole runs."""

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

from jaxrl.data.microbatches import Microbatching
from jaxrl.data.packing import empty_batch, minibatches, one_per_row
from jaxrl.models import hf
from jaxrl.models.export import save_pretrained
from jaxrl.models.linear import merge
from jaxrl.models.lora import LoraConfig, attach, select_modules, trained, with_trained
from jaxrl.models.transformer import abstract_params, forward, init_params, logical_axes, normalise
from jaxrl.parallel import Placement, batch_sharding, make_mesh, param_shardings, replicated
from jaxrl.parallel.jit_once import Bound
from jaxrl.train import train
from jaxrl.training.critic import critic_model, explained_variance
from jaxrl.training.forward import state_values
from jaxrl.training.forward_pass import ForwardPass
from jaxrl.training.objective import merge_metrics, value_objective
from jaxrl.training.optim import abstract_state, make_apply, new_critic_state
from jaxrl.training.update import Updater, pass_order
from tests.test_train import ROOT, assert_bitwise_equal, metric_lines, small
from tests.training import test_update
from tests.training.test_update import PACKINGS, ROWS, assert_same, make_batch

MODEL = dataclasses.replace(test_update.MODEL, num_layers=1, value_head="value_head")
TINY = str(ROOT / "configs" / "tiny_char_model")


def parameters():
    """With a head that is not almost 0."""
    params = init_params(MODEL, 0)
    return params | {"value_head": 10 * params["value_head"]}


def value_batch(width=16):
    """`make_batch` with returns and old values, some of them outside the clip."""
    batch = make_batch(width)
    noise = np.random.default_rng(4).normal(0, 1, (2, ROWS, 16)).astype("float32")
    noise = np.pad(noise, ((0, 0), (0, 0), (0, width - 16)))
    return batch.replace(returns=noise[0] * batch.response_mask, values=noise[1])


@functools.cache
def make_updater(microbatch_rows, devices=1, sizes=(), **packing):
    """The critic's updater and parameters on a mesh."""
    placement = Placement(make_mesh(devices=jax.devices()[:devices], **dict(sizes)))
    mesh, groups = placement.mesh, placement.size(("data", "fsdp"))
    axes, shapes = logical_axes(MODEL), abstract_params(MODEL)
    shardings = param_shardings(mesh, axes, shapes, placement.rules)
    optimizer, schedule = optax.sgd(0.1), optax.constant_schedule(0.1)
    spread = placement if devices > 1 else None
    values = Bound(state_values, MODEL, dtype=jnp.float32, remat="full", placement=spread)
    cut, rows = (
        Microbatching(microbatch_rows, ROWS, groups=groups, **packing),
        batch_sharding(mesh, placement.rules),
    )
    like = abstract_state(optimizer, MODEL, shardings, replicated(mesh), new=new_critic_state)
    updater = Updater(
        ForwardPass(values, lambda x: jax.device_put(x, rows), cut, options={}),
        make_apply(optimizer, schedule, "critic"),
        objective=value_objective(0.3),
        shardings=jax.tree.map(lambda x: x.sharding, like),
        microbatching=cut,
    )
    return updater, jax.device_put(jax.device_get(parameters()), shardings)


def gradient(batch, **cut):
    updater, params = make_updater(**cut)
    weights, _ = updater.weights(batch)
    grads, parts = updater.gradients(params, batch, weights, jax.random.key(1))
    flat = np.concatenate([np.ravel(g) for g in jax.tree.leaves(jax.device_get(grads))])
    return flat, merge_metrics(jax.device_get(parts))


# ---------------------------------------------------------------- values


def test_a_value_is_the_heads_on_the_state_before_the_token():
    batch, params = value_batch(), parameters()
    rows = one_per_row(batch.tokens, batch.lengths, batch.loss_mask)
    value = jax.jit(functools.partial(state_values, MODEL, dtype=jnp.float32))
    (values,) = value(params, rows)
    assert not values[:, 0].any()  # nothing is before the first token
    inside = np.arange(16) < batch.lengths[:, None]
    assert not values[~inside].any()
    first = batch.tokens[:1, :9]

    @jax.jit
    def of_last(params):
        alone = forward(MODEL, params, first, np.arange(9)[None], np.ones((1, 9), np.int32))
        return normalise(alone[0, -1], params["final_norm"], MODEL) @ params["value_head"][:, 0]

    expected = of_last(params)
    assert values[0, 9] == pytest.approx(float(expected), abs=1e-5)
    assert abs(expected) > 1e-2


def test_packed_values_are_those_of_padded_rows():
    batch = value_batch()
    padded, packed = (
        make_updater(**cut)[0].forward_pass(make_updater(**cut)[1], batch)
        for cut in ({"microbatch_rows": ROWS}, {"packed": True, **PACKINGS[1]})
    )
    assert np.abs(padded[0]).max() > 1e-2
    np.testing.assert_allclose(packed, padded, rtol=0, atol=1e-5)


def test_the_objective_is_half_the_squared_error_averaged_over_sequences():
    batch = empty_batch(2, 4).replace(
        loss_mask=np.array([[0, 1, 1, 0], [0, 1, 0, 0]], np.float32),
        values=np.array([[0, 0.0, 1.0, 9.0], [0, 2.0, 0, 0]], np.float32),
        returns=np.array([[0, 1.0, 1.0, 5.0], [0, 0.0, 0, 0]], np.float32),
    )
    objective = value_objective(0.5)
    weights, metrics = objective.weights(batch)
    assert metrics == {}
    values = jnp.array([[7.0, 1.0, 2.0, 3.0], [7.0, 1.75, 7.0, 7.0]])
    total, metrics = objective.loss(values, batch, weights, None)
    # row 0: the first value, 0 -> 1, counts as 0.5: errors max(0, 0.25) = 0.25 and
    # max(1, 0.25) = 1 -> mean 0.625; row 1: 1.75^2 = 3.0625; half their mean
    assert float(total) == pytest.approx((0.625 + 3.0625) / 2 / 2)
    assert float(metrics["critic_loss"]) == float(total)
    assert float(metrics["values_mean"]) == pytest.approx((1 + 2 + 1.75) / 3)
    assert float(metrics["values_clipfrac"]) == pytest.approx(1 / 3)


CUTS = [
    {"microbatch_rows": 3, "widths": (16,)},
    *({"packed": True, **cut} for cut in PACKINGS),
    {"microbatch_rows": 8, "devices": 8, "sizes": (("fsdp", 2), ("tensor", 2))},
]


def test_the_gradient_of_the_value_loss_depends_on_no_cut():
    batch = value_batch()
    nowhere = np.where(batch.loss_mask > 0, batch.returns, np.nan)
    batch = batch.replace(returns=nowhere)  # what is masked must not matter
    whole = gradient(batch, microbatch_rows=ROWS)
    assert 0 < whole[1]["values_clipfrac"] < 1
    for cut in CUTS:
        assert_same(gradient(batch, **cut), whole)
    assert_same(gradient(value_batch(width=40), microbatch_rows=ROWS), whole)


def test_how_much_of_the_returns_the_values_explain():
    batch = empty_batch(1, 4).replace(
        loss_mask=np.array([[0, 1, 1, 1]]), returns=np.array([[9.0, 0, 1, 2]])
    )
    # var(returns) = 2/3; errors 0, 1, 1 have variance 2/9
    batch = batch.replace(values=np.array([[0.0, 0, 0, 1]]))
    assert explained_variance(batch)["critic/explained_variance"] == pytest.approx(2 / 3)
    assert explained_variance(batch.replace(returns=np.ones((1, 4)))) == {}


# ---------------------------------------------------------------- adapters

LORA = LoraConfig(MODEL, select_modules(MODEL, "all-linear"), rank=2, alpha=6)


def test_the_head_is_trained_whole_beside_the_adapters():
    base, adapters = parameters(), init_params(LORA, 5)
    assert not any("value_head" in name for name in LORA.modules)
    assert adapters["value_head"].shape == (MODEL.hidden_size, 1)
    adapters |= {"value_head": base["value_head"]}
    batch = value_batch()
    rows = one_per_row(batch.tokens, batch.lengths, batch.loss_mask)

    @jax.jit
    @jax.value_and_grad
    def value_sum(new, params):
        (values,) = state_values(MODEL, with_trained(params, new), rows, dtype=jnp.float32)
        return values.sum()

    whole = attach(LORA, base, adapters)
    assert_bitwise_equal(trained(whole), adapters)
    total, grads = value_sum(adapters, whole)
    same, of_all = value_sum(base, base)
    assert float(total) == pytest.approx(float(same), rel=1e-6)  # B is 0
    np.testing.assert_allclose(grads["value_head"], of_all["value_head"], rtol=1e-5)
    # dL/dB = (alpha / rank) A^T dL/dW, and A has no gradient where B is 0
    expected = 3 * np.einsum("ldr,ldf->lrf", adapters["w_up"]["a"], of_all["layers"]["w_up"])
    np.testing.assert_allclose(grads["w_up"]["b"], expected, rtol=1e-4, atol=1e-5)
    assert np.abs(expected).max() > 1e-3
    assert not grads["w_up"]["a"].any()


# ---------------------------------------------------------------- passes


def test_each_pass_draws_its_minibatches_from_seed_step_and_number():
    batch = empty_batch(8, 8).replace(index=np.repeat(np.arange(4), 2))
    orders = {n: pass_order(batch, 7, 3, n) for n in range(8)}
    assert orders[0] is None
    assert all(sorted(orders[n]) == [0, 1, 2, 3] for n in range(1, 8))
    assert len({tuple(orders[n]) for n in range(1, 8)}) > 3
    np.testing.assert_array_equal(orders[2], pass_order(batch, 7, 3, 2))
    several = [tuple(pass_order(batch, *name, 1)) for name in ((7, 3), (7, 4), (8, 3), (9, 9))]
    assert len(set(several)) > 1


def test_minibatches_in_another_order_keep_groups_whole():
    batch = empty_batch(7, 8).replace(index=np.array([0, 0, 0, 1, 2, 2, 3]))
    first, second = minibatches(batch, 2, np.array([2, 0, 3, 1]))
    assert first.row_ids.tolist() == [4, 5, 0, 1, 2]
    assert first.index.tolist() == [0, 0, 1, 1, 1]
    assert second.row_ids.tolist() == [6, 3]
    assert second.index.tolist() == [0, 1]


# ---------------------------------------------------------------- folders


def test_a_language_model_becomes_a_critic_with_a_drawn_head(tmp_path):
    policy = dataclasses.replace(MODEL, value_head=None, tie_embeddings=False)
    weights = init_params(policy, 1)
    save_pretrained(tmp_path / "policy", policy, weights)
    critic = dataclasses.replace(policy, value_head="score")
    mesh = make_mesh(devices=jax.devices()[:1])
    shardings = jax.tree.map(lambda _: replicated(mesh), abstract_params(critic))
    load = functools.partial(hf.load_or_init, random_init=False, seed=3, shardings=shardings)
    params = load(tmp_path / "policy", critic)
    assert "unembed" not in params
    np.testing.assert_array_equal(params["embed"], weights["embed"])
    assert np.std(params["value_head"]) == pytest.approx(1 / 17, rel=0.5)  # 1 / (hidden + 1)
    save_pretrained(tmp_path / "critic", critic, params)
    saved = load_file(tmp_path / "critic" / "model.safetensors")
    assert saved["score.weight"].shape == (1, 16)
    assert "lm_head.weight" not in saved
    assert_bitwise_equal(load(tmp_path / "critic", critic), params)


# ---------------------------------------------------------------- whole runs

PPO = {
    "trainer.critic.model.path": TINY,
    "trainer.critic.model.random_init": True,
    "trainer.critic.optimizer_config.lr": 1e-3,
    "trainer.critic_mini_batch_size": 4,
    "trainer.algorithm.advantage_estimator": "gae",
    "trainer.algorithm.gamma": 1.0,
    "trainer.update_epochs_per_batch": 2,
    "trainer.update_ref_every_epoch": True,
    "trainer.eval_interval": -1,
}
SHORT = {
    "data.train_data": ["jaxrl.envs.toys.sort_digits:prompts(size=4, seed=0)"],
    "trainer.epochs": 2,
    "generator.sampling_params.max_generate_length": 3,
}


@pytest.fixture(name="ppo", scope="module")
def ppo_fixture(tmp_path_factory):
    """Two steps, each an epoch; rows of one length: 5 tokens of the prompt and up to 3."""
    folder = tmp_path_factory.mktemp("ppo")
    return folder, train(small(folder, **PPO, **SHORT, **{"trainer.hf_save_interval": 2}))


def test_a_run_with_a_critic_and_a_moving_reference(ppo):
    folder, trainer = ppo
    first, second = metric_lines(folder)
    for line in (first, second):
        assert line["critic/critic_loss"] > 0
        assert line["critic/grad_norm"] > 0
        assert line["critic/critic_lr"] == pytest.approx(1e-3)
        assert line["critic/skipped_updates"] == line["policy/skipped_updates"] == 0
        assert 0 <= line["critic/values_clipfrac"] <= 1
        assert "critic/values_mean" in line
        assert line["critic/explained_variance"] <= 1
    assert trainer.watch.recompiles == 0
    counts = optax.tree_utils.tree_get_all_with_path(trainer.state.critic.opt_state, "count")
    assert {int(count) for _, count in counts} == {4}  # 2 steps x 2 passes, the minibatch is all
    # the reference is the policy as it was after the last epoch, here the last step
    assert_bitwise_equal(trainer.state.ref_params, trainer.state.params)
    assert_bitwise_equal(trainer.ref_params, trainer.state.params)
    assert first["policy/policy_kl"] > 0


def test_the_exported_critic_has_the_same_values(ppo):
    folder, trainer = ppo
    path = folder / "exports" / "global_step_2" / "critic"
    assert load_file(path / "model.safetensors")["value_head.weight"].shape == (1, 64)
    settings = trainer.config.trainer
    settings.critic.model.path, settings.critic.model.random_init = str(path), False
    assert critic_model(settings, 1) == trainer.critic.weights.model
    again = trainer.critic.initial()
    assert_bitwise_equal(again.params, trainer.state.critic.params)


def test_a_critic_with_another_tokenizer_is_refused(ppo):
    settings = ppo[1].config.trainer
    with pytest.raises(ValueError, match=r"critic.model.path=.* a vocabulary of \d+ tokens, .*999"):
        critic_model(settings, 999)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_critic_passes_and_moving_reference_resume_bit_for_bit(tmp_path, lora):
    settings = {
        **PPO,
        # epochs of three steps: the reference of step 4 is in the checkpoint, no folder has it
        "data.train_data": ["jaxrl.envs.toys.sort_digits:prompts(size=12, seed=0)"],
        "trainer.epochs": 2,
        "trainer.max_training_steps": 6,
        "trainer.ckpt_interval": 1,
        "trainer.hf_save_interval": -1,
        "trainer.max_ckpts_to_keep": -1,
        "trainer.policy.model.lora.rank": 2 * lora,
        "trainer.critic.model.lora.rank": 4 * lora,
        "trainer.critic.model.lora.dropout": 0.1 * lora,
    }
    whole = train(small(tmp_path / "whole", **settings))
    lines = metric_lines(tmp_path / "whole")
    kl = [line["policy/policy_kl"] for line in lines]
    assert kl[3] < kl[2]  # the reference has caught up
    for step in (2, 3, 5):
        shutil.rmtree(tmp_path / "again", ignore_errors=True)
        path = str(tmp_path / "whole" / "checkpoints" / f"global_step_{step}")
        start = {"trainer.resume_mode": "from_path", "trainer.resume_path": path}
        again = train(small(tmp_path / "again", **settings, **start))
        assert metric_lines(tmp_path / "again") == lines[step:]
        assert_bitwise_equal(again.state, whole.state)


@pytest.mark.slow
def test_a_critic_with_adapters_trains_these_and_its_head_and_exports_the_sum(tmp_path):
    settings = {"trainer.critic.model.lora.rank": 4, "trainer.hf_save_interval": 2}
    trainer = train(small(tmp_path, **PPO, **SHORT, **settings))
    critic, state = trainer.critic, trainer.state.critic
    assert "rank 4" in critic.weights.size()
    first = critic.initial().params
    assert set(state.params) == {"wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down", "value_head"}
    assert np.abs(state.params["w_up"]["b"]).max() > 0
    assert np.abs(state.params["value_head"] - first["value_head"]).max() > 0
    critic.weights.load_base()  # again
    described = critic.weights.describe()
    assert described["base"] == trainer.checkpoint_meta["model"]["critic"]["base"]
    folder = tmp_path / "exports" / "global_step_2" / "critic"
    mesh = make_mesh(devices=jax.devices()[:1])
    shardings = jax.tree.map(lambda _: replicated(mesh), abstract_params(critic.weights.model))
    read = hf.load_or_init(
        folder, critic.weights.model, random_init=False, seed=0, shardings=shardings
    )
    assert_bitwise_equal(read, merge(critic.weights.whole(state.params)))


@pytest.mark.slow
def test_a_critic_on_a_mesh_of_its_own_that_waits_in_host_memory(ppo, tmp_path):
    folder, whole = ppo
    settings = {
        "trainer.hf_save_interval": -1,
        "trainer.critic.mesh": {"fsdp": 4, "tensor": 2},
        "trainer.critic.fsdp_config.cpu_offload": True,
        "trainer.ref.fsdp_config.cpu_offload": True,
        "trainer.use_sample_packing": True,
    }
    moved = train(small(tmp_path, **PPO, **SHORT, **settings))
    embed = moved.state.critic.params["embed"].sharding
    assert (embed.mesh.shape["fsdp"], embed.mesh.shape["tensor"]) == (4, 2)
    assert embed.memory_kind == "pinned_host"
    assert moved.state.ref_params["embed"].sharding.memory_kind == "pinned_host"
    assert moved.watch.recompiles == 0
    for ours, expected in zip(metric_lines(tmp_path), metric_lines(folder), strict=True):
        same = [n for n in ours if n.startswith(("critic", "policy/policy", "generate/min"))]
        assert [ours[n] for n in same] == pytest.approx(
            [expected[n] for n in same], rel=1e-3, abs=1e-5
        )
