"""A loss and an estimator before the run: not finite, or without any gradient."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.advantages import ESTIMATORS
from jaxrl.array_ops import masked_mean
from jaxrl.config import AlgorithmConfig
from jaxrl.losses import LOSSES
from jaxrl.registry import PolicyLossRegistry, stateful, trial
from jaxrl.registry.trial import try_functions

HERE = __name__


def of_the_old(log_probs, old_log_probs, advantages, config):
    return -old_log_probs * advantages, {}


def stopped(log_probs, old_log_probs, advantages, config):
    return -jax.lax.stop_gradient(log_probs) * advantages, {}


def of_entropy(log_probs, old_log_probs, advantages, config, entropy):
    return -entropy, {}


def log_of_zero(log_probs, old_log_probs, advantages, config, loss_mask):
    return -log_probs * jnp.log(jnp.maximum(advantages, 0)), {}


def whole(log_probs, old_log_probs, advantages, config, loss_mask):
    return -(log_probs * advantages * loss_mask).sum() / loss_mask.sum(), 0.0


def whitened(log_probs, old_log_probs, advantages, config):
    ratio = jnp.exp(log_probs - old_log_probs)
    return -ratio * (advantages - advantages.mean()) / advantages.std(), {}


def per_row(log_probs, old_log_probs, advantages, config):
    return -log_probs * advantages / len(log_probs), {}


def of_all_places(log_probs, old_log_probs, advantages, config):
    ratio = jnp.exp((log_probs - old_log_probs).mean(-1, keepdims=True))
    return -ratio * advantages, {}


def of_the_row(log_probs, old_log_probs, advantages, config, loss_mask, row_ids, key):
    """A ratio of the sequence, on half of the tokens: drawn as docs/custom_algorithms.md says."""
    ratio = jnp.exp(masked_mean(log_probs - old_log_probs, loss_mask, -1))[:, None]
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, row_ids)
    taken = jax.vmap(lambda one: jax.random.bernoulli(one, 0.5, log_probs.shape[1:]))(keys)
    return -ratio * advantages * taken, {}


def undefined(log_probs, old_log_probs, advantages, config):
    return no_such_name * advantages, {}  # noqa: F821


def branches(log_probs, old_log_probs, advantages, config):
    return (-log_probs if advantages[0, 0] > 0 else log_probs), {}


def torch_exp(log_probs, old_log_probs, advantages, config):
    return -(log_probs - old_log_probs).exp() * advantages, {}


def torch_dim(log_probs, old_log_probs, advantages, config):
    return -log_probs.sum(dim=-1, keepdims=True) * advantages, {}


def torch_clamp(log_probs, old_log_probs, advantages, config, loss_mask):
    return -(log_probs * advantages).sum() / loss_mask.sum().clamp(min=1), {}


def no_epsilon(token_level_rewards, response_mask, index):
    scores = token_level_rewards.sum(-1)
    same = index[:, None] == index[None, :]
    mean = (same * scores).sum(-1) / same.sum(-1)
    deviation = jnp.sqrt((same * (scores - mean[:, None]) ** 2).sum(-1) / same.sum(-1))
    advantages = ((scores - mean) / deviation)[:, None] * response_mask
    return advantages, advantages


def with_epsilon(token_level_rewards, response_mask, index):
    scores = token_level_rewards.sum(-1)
    advantages = (scores - scores.mean())[:, None] / (scores.std() + 1e-6) * response_mask
    return advantages, advantages


def in_numpy(token_level_rewards, response_mask):
    return np.asarray(token_level_rewards), response_mask


def place(function, line=0):
    return f" ({__file__}:{inspect.getsourcelines(function)[1] + line})"


def tried(algorithm, prompts=4, samples=4, tokens=12):
    try_functions(
        algorithm, prompts=prompts, minibatch_prompts=prompts, samples=samples, tokens=tokens
    )


def attempt(function, field="policy_loss_type"):
    tried(AlgorithmConfig(**{field: f"{HERE}:{function.__name__}"}))


@pytest.mark.parametrize("function", [of_the_old, stopped])
def test_a_loss_without_a_gradient_is_refused(function):
    message = f"policy loss '{HERE}:{function.__name__}' has no gradient: nothing would be learnt"
    with pytest.raises(ValueError) as raised:
        attempt(function)
    assert str(raised.value).startswith(message)
    assert str(raised.value).endswith(place(function))


@pytest.mark.parametrize("function", [of_entropy, whole, of_the_row])
def test_other_losses_pass(function):
    attempt(function)


@pytest.mark.parametrize("samples", [4, 1])
@pytest.mark.parametrize("function", [whitened, per_row])
def test_a_loss_that_depends_on_its_microbatch_is_refused(function, samples):
    path = f"{HERE}:{function.__name__}"
    with pytest.raises(ValueError) as raised:
        tried(AlgorithmConfig(policy_loss_type=path), prompts=3, samples=samples)
    assert str(raised.value) == (
        f"policy loss '{path}': the loss of a token depends on the other rows of its microbatch, "
        "as with a mean over them: return the loss of each token [B, T] and leave means to "
        "trainer.algorithm.loss_reduction, or register it with batch_statistics=True, so that it "
        "sees the whole minibatch (random draws: by row_ids). See `jaxrl doctor "
        f"--only=mask,gradients`{place(function)}"
    )


def test_a_loss_that_is_registered_for_the_whole_minibatch_may_depend_on_it():
    PolicyLossRegistry.register("whitened", whitened, batch_statistics=True)
    try:
        tried(AlgorithmConfig(policy_loss_type="whitened"))
    finally:
        PolicyLossRegistry.unregister("whitened")


def test_a_minibatch_of_one_row_is_not_cut():
    tried(AlgorithmConfig(policy_loss_type=f"{HERE}:per_row"), prompts=1, samples=1)


def test_a_loss_that_reads_numbers_outside_its_mask_is_refused():
    with pytest.raises(ValueError, match="of_all_places' reads numbers of tokens outside loss_ma"):
        attempt(of_all_places)


@pytest.mark.parametrize(
    ("function", "message", "line"),
    [
        (log_of_zero, "gives the loss -inf, and a gradient that is not finite everywhere", 0),
        (undefined, "raised NameError: name 'no_such_name' is not defined", 1),
        (branches, "raised TracerBoolConversionError: .*traced by jax.jit.*", 1),
        (torch_exp, r"no attribute exp: what PyTorch has as a method .* jnp.exp\(x\)", 1),
        (torch_dim, "argument 'dim': write axis= for dim=, keepdims= for keepdim=", 1),
        (torch_clamp, r"no attribute clamp: .* jnp.maximum\(x, 1\)", 1),
    ],
)
def test_a_loss_that_cannot_be_used_is_named_with_its_line(function, message, line):
    with pytest.raises(ValueError, match=message) as raised:
        attempt(function)
    assert str(raised.value).endswith(place(function, line))
    assert "\n" not in str(raised.value)


def test_an_estimator_that_divides_by_zero_is_refused():
    with pytest.raises(ValueError) as raised:
        attempt(no_epsilon, "advantage_estimator")
    assert str(raised.value) == (
        f"advantage estimator '{HERE}:no_epsilon' gives the advantage nan to a sample of a prompt "
        "whose samples earned [1.0, 1.0, 1.0, 1.0]; divide by their deviation + 1e-6, which is 0 "
        f"here{place(no_epsilon)}"
    )
    attempt(with_epsilon, "advantage_estimator")


@stateful(baseline=0.0)
def above_its_baseline(state, batch):
    scores = (batch.token_level_rewards * batch.response_mask).sum(-1, keepdims=True)
    advantages = (scores / state["baseline"]) * batch.response_mask
    return {"baseline": scores.mean()}, advantages, advantages


def test_an_estimator_with_memory_is_tried_with_its_first_values():
    """The baseline begins at 0, and it divides by it: 1 / 0."""
    with pytest.raises(ValueError, match="above_its_baseline' gives the advantage inf"):
        tried(AlgorithmConfig(advantage_estimator=f"{HERE}:above_its_baseline"))


def of_odds(log_probs, old_log_probs, advantages, config, loss_mask):
    """log(p / (1 - p)), which a log-prob above 0 has not."""
    safe = jnp.where(loss_mask > 0, log_probs, -1.0)
    return -(safe - jnp.log1p(-jnp.exp(safe))) * advantages, {}


def of_sixes(token_level_rewards, response_mask):
    scores = token_level_rewards.sum(-1).reshape(-1, 6)
    advantages = (scores - scores.mean(-1, keepdims=True)).reshape(-1, 1) * response_mask
    return advantages, advantages


def of_sixteen_tokens(token_level_rewards, response_mask, old_log_probs):
    top, _ = jax.lax.top_k(-old_log_probs, 16)
    advantages = top.mean(-1, keepdims=True) * response_mask
    return advantages, advantages


def test_the_numbers_are_as_of_the_run():
    """Log-probs below 0, samples by the prompt, rows as long as the run's."""
    attempt(of_odds)
    for function in (of_sixes, of_sixteen_tokens):
        algorithm = AlgorithmConfig(advantage_estimator=f"{HERE}:{function.__name__}")
        tried(algorithm, prompts=2, samples=6, tokens=40)


def test_an_estimator_in_numpy_is_refused_with_its_line():
    with pytest.raises(
        ValueError, match="raised TracerArrayConversionError: .*jnp.where"
    ) as raised:
        attempt(in_numpy, "advantage_estimator")
    assert str(raised.value).endswith(place(in_numpy, 1))


@pytest.mark.parametrize("name", LOSSES)
def test_no_loss_of_ours_would_be_refused(name, monkeypatch):
    """The numbers of the batch are such that a loss which learns has a gradient there."""
    monkeypatch.setattr(trial.PolicyLossRegistry, "_builtin", {})
    required = {"beta": 0.1} if name == "dro" else {}
    tried(AlgorithmConfig(policy_loss_type=name, policy_loss_kwargs=required))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_estimator_of_ours_would_be_refused(name, monkeypatch):
    monkeypatch.setattr(trial.AdvantageEstimatorRegistry, "_builtin", {})
    tried(AlgorithmConfig(advantage_estimator=name))
