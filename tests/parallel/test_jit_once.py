"""Equal programs are one: a second trainer of the same shape traces and compiles nothing."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.parallel.jit_once import Bound, jit_once, shapes_once
from jaxrl.train import train
from tests.test_train import small

COMPILING = "/jax/core/compile/"


def scaled(factor, x, *, shift=0.0):
    return factor * x + shift


def test_what_binds_the_same_is_equal():
    assert Bound(scaled, 2.0) == Bound(scaled, 2.0)
    assert hash(Bound(scaled, 2.0, shift=1.0)) == hash(Bound(scaled, 2.0, shift=1.0))
    assert Bound(scaled, 2.0) != Bound(scaled, 3.0)
    assert Bound(scaled, 2.0) != Bound(scaled, 2.0, shift=1.0)
    assert Bound(scaled, 2.0) != functools.partial(scaled, 2.0)
    assert Bound(Bound(scaled, 2.0), shift=1.0) == Bound(scaled, 2.0, shift=1.0)
    assert Bound(scaled, 2.0, shift=1.0)(3.0) == 7.0  # 2 * 3 + 1


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(TypeError, match="unhashable"):
        jit_once(Bound(scaled, [2.0]))


def test_equal_functions_and_options_are_one_program():
    one = jit_once(Bound(scaled, 2.0), donate_argnums=0)
    assert jit_once(Bound(scaled, 2.0), donate_argnums=0) is one
    assert jit_once(Bound(scaled, 3.0), donate_argnums=0) is not one
    assert jit_once(Bound(scaled, 2.0)) is not one
    mesh = jax.make_mesh((8,), ("data",))
    spread, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    placed = jit_once(Bound(scaled, 2.0), out_shardings=spread)
    assert jit_once(Bound(scaled, 2.0), out_shardings=spread) is placed
    assert jit_once(Bound(scaled, 2.0), out_shardings=whole) is not placed
    assert placed(jnp.ones(8)).sharding == spread
    assert shapes_once(Bound(scaled, 2.0), jnp.ones(3)).shape == (3,)


@pytest.fixture
def compiled():
    """What JAX says that it traces, lowers or compiles: (what, of which function)."""
    events = []

    def listen(event, seconds, **details):
        if event.startswith(COMPILING):
            events.append((event.removeprefix(COMPILING), details.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def test_a_second_equal_trainer_traces_and_compiles_nothing(tmp_path, compiled):
    """Of one step, with all that a run does but a second step."""
    kinds = "max_training_steps", "eval_interval", "ckpt_interval", "hf_save_interval"
    once = {f"trainer.{name}": 1 for name in kinds}
    train(small(tmp_path / "first", **once))
    compiled.clear()
    train(small(tmp_path / "second", **once))
    assert compiled == []
    jax.jit(lambda x: x + 1)(1)
    assert compiled  # as it is called now
