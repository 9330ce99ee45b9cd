"""Functions that travel: what makes two of them the same, and what goes along."""

import functools
import importlib
import runpy
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.functions import origin
from jaxrl.losses import LOSSES
from jaxrl.registry.pickling import fingerprint, has_same_content, is_defined_again, pack, unpack

SCALE = 2.0


def scaled(x):
    return SCALE * x


def through_global(log_probs, *, beta=1.0):
    return beta * scaled(log_probs)


def make(factor):
    def loss(log_probs):
        return factor * log_probs

    return loss


class Callable:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, log_probs):
        return self.factor * log_probs


def custom_gradient(factor):
    @jax.custom_vjp
    def loss(x):
        return x

    loss.defvjp(lambda x: (x, None), lambda _, g: (factor * g,))
    return loss


def test_the_content_of_a_function_decides():
    same = fingerprint(make(2.0))
    assert fingerprint(make(2.0)) == same
    assert fingerprint(make(2.5)) != same
    assert fingerprint(jax.jit(make(2.0))) == fingerprint(jax.jit(make(2.0)))
    assert fingerprint(jax.jit(make(2.0))) != fingerprint(jax.jit(make(2.5)))
    assert fingerprint(functools.partial(make(2.0), x=1)) != fingerprint(make(2.0))
    assert fingerprint(custom_gradient(1.0)) != fingerprint(custom_gradient(2.0))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.arange(3), np.arange(3) + 1),
        (jnp.zeros(3), jnp.zeros(3, jnp.int32)),
        (jax.random.key(0), jax.random.key(1)),
        ({"a": 1}, {"a": 2}),
        (frozenset("ab"), frozenset("ac")),
        (Callable(1.0), Callable(2.0)),
    ],
)
def test_captured_values_decide(one, other):
    assert fingerprint(make(one)) == fingerprint(make(one)) != fingerprint(make(other))


def test_globals_decide_also_those_of_helpers(monkeypatch):
    before = fingerprint(through_global)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert fingerprint(through_global) != before
    monkeypatch.undo()
    assert fingerprint(through_global) == before


def test_globals_of_a_function_within_decide_too(monkeypatch):
    def outer(x):
        return [SCALE * y for y in (x, x)]  # a function of its own in Python 3.11

    before = fingerprint(outer)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert fingerprint(outer) != before


def test_an_attribute_is_not_the_global_of_its_name(monkeypatch):
    def loss(config):
        return config.trainer

    before = fingerprint(loss)
    monkeypatch.setitem(globals(), "trainer", threading.Lock())  # which has no content to compare
    assert fingerprint(loss) == before


def test_lambdas_on_one_line_are_told_apart():
    one, other = (lambda x: x), (lambda x: 2 * x)
    assert not has_same_content(one, other)
    assert not is_defined_again(one, other)


def test_defaults_decide(monkeypatch):
    before = fingerprint(through_global)
    monkeypatch.setattr(through_global, "__kwdefaults__", {"beta": 2.0})
    assert fingerprint(through_global) != before


def test_module_names_and_line_numbers_do_not(tmp_path, monkeypatch):
    code = "def loss(x):\n    return 2 * x\n"
    (tmp_path / "user_first.py").write_text(code)
    (tmp_path / "user_second.py").write_text(f"import os\n\n\n{code}")
    monkeypatch.syspath_prepend(tmp_path)
    first, second = (importlib.import_module(name) for name in ("user_first", "user_second"))
    assert fingerprint(first.loss) == fingerprint(second.loss)
    assert origin(first.loss) == "user_first:loss"


def test_a_definition_that_ran_twice_is_recognised_whatever_its_globals(tmp_path, monkeypatch):
    code = "SEEN = {}\ndef loss(x, b=1):\n    return SEEN\nhalf = lambda x: x / 2\n"
    for name in ("user_one", "user_two"):
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    one, two = (importlib.import_module(name) for name in ("user_one", "user_two"))
    again = runpy.run_path(tmp_path / "user_one.py")["loss"]  # as of a script: another module name
    one.SEEN["step"] = 1
    assert not has_same_content(one.loss, again)
    assert is_defined_again(one.loss, again)
    assert not is_defined_again(one.loss, two.loss)
    assert not is_defined_again(one.loss, one.half)
    assert not is_defined_again(make(1.0), make(2.0))
    assert is_defined_again(jax.jit(make(1.0)), make(1.0))
    lock = threading.Lock()
    assert has_same_content(make(lock), make(threading.Lock())) is False
    assert is_defined_again(make(lock), make(lock)) is False
    # The primal function alone does not tell them apart.
    assert not is_defined_again(custom_gradient(1.0), custom_gradient(2.0))


def test_recursive_functions_have_one():
    def count(n):
        return 0 if n == 0 else 1 + count(n - 1)

    assert fingerprint(count) == fingerprint(count)


@pytest.mark.parametrize("func", [through_global, make(2.0), jax.jit(make(2.0)), Callable(2.0)])
def test_a_function_is_the_same_after_the_journey(func):
    packed = pack(func, "loss 'x'", {"batch_statistics": True})
    loaded, marks = unpack(packed, "loss 'x'")
    assert marks == {"batch_statistics": True}
    assert loaded(3.0) == func(3.0) == 6.0
    assert packed.fingerprint == fingerprint((loaded, marks))
    assert packed.fingerprint != fingerprint((loaded, {"batch_statistics": False}))
    assert has_same_content(loaded, func)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def straight_through(x, factor):
    return 0 * x


def straight_through_backward(factor, residuals, cotangent):
    assert straight_through is not None  # a cycle: it reads what it is part of
    return (factor * SCALE * cotangent,)


straight_through.defvjp(lambda x, factor: (x, None), straight_through_backward)


def test_a_custom_gradient_of_a_module_travels():
    def loss(x):
        return straight_through(x, 3.0)

    loaded, _ = unpack(pack(loss, "loss 'x'", {}), "loss 'x'")
    assert jax.grad(loaded)(1.0) == jax.grad(loss)(1.0) == 3 * 2  # factor * SCALE


class CannotBeLoaded:
    def __reduce__(self):
        return int, ("no number",)


def test_what_cannot_be_loaded_fails_where_it_is_packed():
    with pytest.raises(ValueError, match=r"loss 'x' cannot be pickled.*captures \['factor'\]"):
        pack(make(CannotBeLoaded()), "loss 'x'", {})


class CannotBeToldApart:
    def __array__(self):
        raise TypeError("no numbers")


def test_what_cannot_be_told_apart_is_named_too():
    with pytest.raises(ValueError, match=r"loss 'x' cannot .*no numbers.*captures \['factor'\]"):
        pack(make(CannotBeToldApart()), "loss 'x'", {})


def test_packing_leaves_the_classes_of_this_process_alone():
    class Local:
        def method(self):
            return self

    method = Local.method
    pack(make(Local()), "loss 'x'", {})
    assert Local.method is method


def test_functions_of_the_library_go_by_name():
    packed = pack(LOSSES["gspo"], "policy loss 'x'", {})
    assert len(packed.data) < 100
    assert unpack(packed, "policy loss 'x'")[0] is LOSSES["gspo"]


def test_modules_of_modules_go_along(tmp_path, monkeypatch):
    """A package of several files; the process that unpickles has none of them."""
    package = tmp_path / "user_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "numbers.py").write_text("TWO = 2.0\n")
    (package / "maths.py").write_text(
        "from user_package import numbers\n\ndef double(x):\n    return numbers.TWO * x\n"
    )
    (package / "losses.py").write_text(
        "import user_package.maths\n\ndef loss(x):\n    return user_package.maths.double(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    packed = pack(importlib.import_module("user_package.losses").loss, "loss 'x'", {})
    for name in [name for name in sys.modules if name.startswith("user_package")]:
        del sys.modules[name]
    monkeypatch.undo()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("user_package")
    assert unpack(packed, "loss 'x'")[0](3.0) == 2 * 3.0


def test_what_is_missing_is_named():
    broken = pack(make(2.0), "loss 'x'", {})._replace(data=b"cno_such_package\nf\n.")
    with pytest.raises(
        ValueError, match="loss 'x' .*:make.<locals>.loss.* cannot be loaded here .*'no_s"
    ):
        unpack(broken, "loss 'x'")
