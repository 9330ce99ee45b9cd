"""What estimators keep between steps: declared, or found and refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config import AlgorithmConfig
from jaxrl.registry import AdvantageEstimatorRegistry, PolicyLossRegistry, bind_estimator, stateful
from jaxrl.registry.bind import check_pure_functions
from jaxrl.registry.memory import first_algorithm_state, renewed
from jaxrl.registry.pickling import pack, unpack
from tests.remembering import running_baseline

ONES = np.ones((2, 2), np.float32)
STEP = {"response_mask": ONES, "loss_mask": ONES, "index": np.zeros(2, np.int32)}
CALLS, SEEN = [0], {}


@pytest.fixture(autouse=True)
def clean_registries():
    yield
    AdvantageEstimatorRegistry.repopulate()
    PolicyLossRegistry.repopulate()


def algorithm_of(estimator, **settings):
    AdvantageEstimatorRegistry.register("mine", estimator)
    return AlgorithmConfig(advantage_estimator="mine", **settings)


def test_a_running_baseline_over_three_steps():
    estimate = jax.jit(bind_estimator(algorithm_of(running_baseline)))
    state = first_algorithm_state(running_baseline, ())["advantage_estimator"]
    found = []
    for rewards in ([1.0, 3.0], [2.0, 4.0], [0.0, 8.0]):  # means 2, 3, 4
        given = np.array([[0.0, r] for r in rewards], np.float32)
        state, advantages, returns = estimate(state, token_level_rewards=given, **STEP)
        np.testing.assert_array_equal(advantages, returns)
        found.append(advantages[:, 0].tolist())
    # baselines 0, 0 / 2 + 2 / 2 = 1, 1 / 2 + 3 / 2 = 2; then 2 / 2 + 4 / 2 = 3
    assert found == [[1.0, 3.0], [1.0, 3.0], [-2.0, 6.0]]
    assert jax.device_get(state) == {"baseline": 3.0, "steps": 3}
    assert (state["baseline"].dtype, state["steps"].dtype) == (jnp.float32, jnp.int32)


def test_a_setting_of_an_estimator_with_memory():
    algorithm = algorithm_of(running_baseline, advantage_kwargs={"decay": 0.75})
    state = {"baseline": np.float32(4), "steps": np.int32(0)}
    state, *_ = bind_estimator(algorithm)(state, token_level_rewards=ONES, **STEP)
    assert state["baseline"] == 3.5  # 0.75 x 4 + 0.25 x 2
    with pytest.raises(
        ValueError, match="'running_baseline' takes no such parameter, only .'decay'.*mean 'decay'"
    ):
        bind_estimator(algorithm_of(running_baseline, advantage_kwargs={"decays": 1}))


def test_memory_travels_to_other_processes():
    func, _ = unpack(pack(running_baseline, "it", {}), "it")
    assert func.initial_state == {"baseline": 0.0, "steps": 0}
    algorithm_of(running_baseline)
    other = stateful(baseline=1.0, steps=0)(lambda state, batch: None)
    with pytest.raises(ValueError, match="'mine' already registered"):
        AdvantageEstimatorRegistry.register("mine", other)


# ---------------------------------------------------------------- what is refused


def without_mark(state, batch):
    return state, batch.values, batch.values


@stateful(baseline=0.0)
def without_batch(token_level_rewards, **kwargs):
    return None


@stateful(baseline=0.0)
def grows(state, batch):
    rewards = batch.token_level_rewards
    return {"baseline": rewards.sum(axis=-1)}, rewards, rewards


@stateful(steps=0)
def becomes_float(state, batch):
    return {"steps": state["steps"] + 1.0}, batch.response_mask, batch.response_mask


@stateful(baseline=0.0)
def forgets(state, batch):
    return batch.response_mask, batch.response_mask


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (without_mark, r"written `@stateful.* it has no @stateful$"),
        (without_batch, "it has other first parameters than these two$"),
    ],
)
def test_what_is_half_declared_is_refused_when_it_is_registered(estimator, message):
    with pytest.raises(ValueError, match=message):
        algorithm_of(estimator)


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (grows, r"gave the state {'baseline': 'float32\[8\]'}; it began as .* 'float32\[\]'}"),
        (becomes_float, r"gave the state {'steps': 'float32\[\]'}; it began as .* 'int32\[\]'}"),
        (forgets, r"must return \(state, advantages, returns\), got tuple of 2"),
    ],
)
def test_a_state_of_another_form_is_refused_before_the_run(estimator, message):
    with pytest.raises(ValueError, match=f"^advantage estimator 'mine' {message}"):
        check(algorithm_of(estimator))


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda: stateful(running_baseline), r"needs the first values by name: @stateful\(base"),
        (stateful, "needs the first values by name"),
        (lambda: stateful(mode="easy"), r"\['mode'\] is 'easy'; it must be a number or an array"),
        (lambda: stateful(best=None), r"\['best'\] is None; it must be a number"),
    ],
)
def test_first_values_that_are_none(misuse, message):
    with pytest.raises(ValueError, match=message):
        misuse()


class Keeps:
    def __init__(self, **initial_state):
        self.initial_state = initial_state


def test_one_name_has_one_owner():
    assert first_algorithm_state(without_mark, [Keeps(), object()]) is None
    found = first_algorithm_state(running_baseline, [Keeps(level=1), Keeps(best=[0.0, 1.0])])
    assert list(found) == ["advantage_estimator", "level", "best"]
    for owners in ([Keeps(level=1), Keeps(level=2)], [Keeps(best={"a": 1})]):
        with pytest.raises(ValueError, match=r"Keeps.initial_state\['(level|best)'\]"):
            first_algorithm_state(without_mark, owners)


def test_values_are_remembered_in_the_form_that_was_declared():
    state = {"level": np.int32(1), "scale": np.float32(1)}
    new = renewed(state, {"scale": 0.5, "level": np.int64(2)})
    assert {name: (x.dtype, x.item()) for name, x in new.items()} == {
        "level": (np.int32, 2),
        "scale": (np.float32, 0.5),
    }
    with pytest.raises(ValueError, match=r"nobody declares 'scales', only \['level', 'scale'\]"):
        renewed(state, {"scales": 1.0})
    with pytest.raises(ValueError, match=r"remember\(level=1.5\) is float64 .* as int32 of shape"):
        renewed(state, {"level": 1.5})
    with pytest.raises(ValueError, match=r"of shape \(2,\); it was declared as float32 of shape"):
        renewed(state, {"scale": [1.0, 2.0]})


# ---------------------------------------------------------------- memory in other places


def check(algorithm):
    check_pure_functions(algorithm, rows=8, minibatch_rows=4, tokens=20, has_values=False)


def of_rewards(rewards, mask, baseline):
    advantages = (rewards.sum(-1, keepdims=True) - baseline) * mask
    return advantages, advantages


def counts(token_level_rewards, response_mask, **_):
    CALLS[0] += 1
    return of_rewards(token_level_rewards, response_mask, 0.9 ** CALLS[0])


def keeping_an_array():
    total = jnp.float32(0)

    def estimator(token_level_rewards, response_mask, **_):
        nonlocal total
        found = of_rewards(token_level_rewards, response_mask, total)
        total = 0.9 * total + token_level_rewards.mean()
        return found

    return estimator


def draws(token_level_rewards, response_mask, **_):
    return of_rewards(token_level_rewards, response_mask, np.random.default_rng().normal())


def on_itself(token_level_rewards, response_mask, **_):
    on_itself.calls = getattr(on_itself, "calls", 0) + 1
    return of_rewards(token_level_rewards, response_mask, on_itself.calls)


class Attribute:
    calls = 0

    def __call__(self, token_level_rewards, response_mask, **_):
        self.calls += 1
        return of_rewards(token_level_rewards, response_mask, self.calls)


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (counts, "changes 'CALLS' when it is called"),
        (jax.jit(counts), "changes 'CALLS' when it is called"),
        (functools.partial(counts), "changes 'CALLS' when it is called"),
        (keeping_an_array(), "changes 'total' when it is called"),
        (draws, "does something else each time it is called with the same"),
        (on_itself, "changes 'calls' when it is called"),
        (Attribute(), "changes 'calls' when it is called"),
    ],
)
def test_an_estimator_that_keeps_something_elsewhere_is_refused(estimator, message):
    with pytest.raises(ValueError, match=f"^advantage estimator 'mine' {message}: .*#memory-betw"):
        check(algorithm_of(estimator))


def test_a_loss_that_keeps_something_is_refused():
    def loss(log_probs, old_log_probs, advantages, config):
        CALLS[0] += 1
        return -log_probs * advantages * 0.9 ** CALLS[0], {}

    PolicyLossRegistry.register("mine", loss)
    with pytest.raises(ValueError, match=r"^policy loss 'mine' changes 'CALLS' when it is called"):
        check(AlgorithmConfig(policy_loss_type="mine"))


def test_what_is_filled_in_once_is_no_memory():
    def cached(token_level_rewards, response_mask, **_):
        table = SEEN.setdefault(response_mask.shape[1], np.arange(response_mask.shape[1]))
        return of_rewards(token_level_rewards, response_mask, table)

    check(algorithm_of(cached))
    check(AlgorithmConfig())


def test_a_count_of_traces_is_no_memory():
    """It changes nothing of what is computed."""
    seen = []

    def counting(token_level_rewards, response_mask, **_):
        seen.append(token_level_rewards.shape)
        return of_rewards(token_level_rewards, response_mask, 0.5)

    check(algorithm_of(counting))
    assert seen == [(8, 20), (8, 20)]


def test_declared_memory_is_no_hidden_one():
    check(algorithm_of(running_baseline))


def test_an_array_of_an_earlier_call_is_named_without_jax_words():
    def reads(token_level_rewards, response_mask, **_):
        return of_rewards(token_level_rewards, response_mask, leaked[0])

    leaked = []
    jax.make_jaxpr(lambda x: leaked.append(x * 2))(1.0)
    with pytest.raises(ValueError, match="mine' changes 'leaked' when it is called"):
        check(algorithm_of(reads))
