"""Tables of losses and estimators, and how user functions travel."""

import functools
import hashlib
import importlib
import inspect
import os
import re
import subprocess
import sys
import textwrap
import threading
from enum import StrEnum
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.advantages import ESTIMATORS
from jaxrl.config import AlgorithmConfig
from jaxrl.losses import LOSSES
from jaxrl.registry import (
    AdvantageEstimator,
    AdvantageEstimatorRegistry,
    PolicyLossRegistry,
    PolicyLossType,
    accepted_keywords,
    check_hyperparameters,
    load_snapshot,
    register_advantage_estimator,
    register_policy_loss,
    snapshot,
    source_hashes,
    sync_registries,
)
from jaxrl.registry.pickling import pack

ROOT = Path(__file__).parents[2]
has_batch_statistics = PolicyLossRegistry.has_batch_statistics
KINDS = [(PolicyLossRegistry, "policy loss"), (AdvantageEstimatorRegistry, "advantage estimator")]
USER_MODULE = """
    import functools

    import jax
    import jax.numpy as jnp

    SCALE = 3.0
    not_a_function = 1

    def helper(x):
        return SCALE * x

    def my_loss(log_probs, old_log_probs, advantages, config, loss_mask=None, *, beta=1.0):
        return helper(jnp.asarray(log_probs)) * beta, {}

    @jax.jit
    def jitted(log_probs, old_log_probs, advantages, config, loss_mask=None):
        return helper(log_probs), {}

    halved = functools.partial(my_loss, beta=0.5)
"""


@pytest.fixture(autouse=True)
def clean_registries():
    yield
    for registry, _ in KINDS:
        registry.repopulate()


@pytest.fixture(name="user_module")
def user_module_fixture(tmp_path, monkeypatch):
    """A module that only this process can import."""
    (tmp_path / "user_losses_for_test.py").write_text(textwrap.dedent(USER_MODULE))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("user_losses_for_test")
    del sys.modules["user_losses_for_test"]


def loss_one(*arrays, **settings):  # a loss and an estimator
    return -arrays[0], {}


def loss_two(*arrays, **settings):
    return -2 * arrays[0], {}


# ------------------------------------------------------------------ the verbs


@pytest.mark.parametrize(("registry", "kind"), KINDS)
def test_register_get_list_unregister(registry, kind):
    builtin = registry.list_available()
    registry.register("x", loss_one)
    assert registry.get("x") is loss_one
    assert registry.list_available() == [*builtin, "x"]
    registry.unregister("x")
    assert registry.list_available() == builtin


@pytest.mark.parametrize(("registry", "kind"), KINDS)
def test_error_texts(registry, kind):
    registry.register("x", loss_one)
    expected = (
        rf"^{kind} 'x' already registered: .*test_registry:loss_one, .* than .*:loss_two. Choose "
        rf"another name, or call {registry.__name__}.unregister\('x'\) first$"
    )
    with pytest.raises(ValueError, match=expected):
        registry.register("x", loss_two)
    assert registry.get("x") is loss_one
    registry.unregister("x")
    known = re.escape(str(registry.list_available()))
    with pytest.raises(ValueError, match=rf"^Unknown {kind} 'x'. Available: {known}"):
        registry.get("x")
    with pytest.raises(ValueError, match=f"^{kind} 'x' not registered$"):
        registry.unregister("x")
    with pytest.raises(ValueError, match=f"{kind} 'x' must be a function, got 3"):
        registry.register("x", 3)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="Unknown policy loss 'gpso'.*Did you mean 'gspo'"):
        PolicyLossRegistry.get("gpso")


def test_tables_do_not_share_names():
    PolicyLossRegistry.register("x", loss_one)
    assert "x" not in AdvantageEstimatorRegistry.list_available()


def test_registering_does_not_touch_the_builtin_table():
    PolicyLossRegistry.register("x", loss_one)
    assert "x" not in LOSSES


def test_names_may_be_str_enums():
    class Mine(StrEnum):
        LOSS = "enum_loss"

    PolicyLossRegistry.register(Mine.LOSS, loss_one)
    assert PolicyLossRegistry.get("enum_loss") is PolicyLossRegistry.get(Mine.LOSS) is loss_one
    assert type(PolicyLossRegistry.list_available()[-1]) is str
    PolicyLossRegistry.unregister(Mine.LOSS)
    assert PolicyLossRegistry.get(PolicyLossType.GSPO) is LOSSES["gspo"]


def test_decorators_register_and_return_the_function():
    assert register_policy_loss("a")(loss_one) is loss_one
    assert register_advantage_estimator("b")(loss_two) is loss_two
    assert PolicyLossRegistry.get("a") is loss_one
    assert AdvantageEstimatorRegistry.get("b") is loss_two


@pytest.mark.parametrize("decorator", [register_policy_loss, register_advantage_estimator])
def test_decorators_without_parentheses_are_refused(decorator):
    spelling = f"@{decorator.__name__}"
    expected = re.escape(f'{spelling} needs a name: {spelling}("loss_one")')
    with pytest.raises(ValueError, match=expected):
        decorator(loss_one)


def test_losses_that_look_at_the_whole_minibatch_are_marked():
    register_policy_loss("quantile", batch_statistics=True)(loss_one)
    PolicyLossRegistry.register("rows", loss_two)
    marked = [n for n in PolicyLossRegistry.list_available() if has_batch_statistics(n)]
    assert marked == ["clip_cov", "kl_cov", "m2po", "bapo", "chord", "quantile"]
    data = snapshot()
    PolicyLossRegistry.repopulate()
    load_snapshot(data)
    assert has_batch_statistics("quantile")
    assert not has_batch_statistics("rows")


def test_a_received_function_may_be_registered_again_by_its_module():
    register_policy_loss("x")(loss_one)
    data = snapshot()
    PolicyLossRegistry.repopulate()
    load_snapshot(data)
    with pytest.raises(ValueError, match="^policy loss 'x' already registered"):
        PolicyLossRegistry.register("x", loss_two)
    PolicyLossRegistry.register("x", loss_one)
    assert PolicyLossRegistry.get("x") is loss_one


def test_a_received_function_stays_where_its_module_computes_otherwise(user_module):
    register_policy_loss("x")(user_module.my_loss)
    data = snapshot()
    PolicyLossRegistry.repopulate()
    load_snapshot(data)
    user_module.SCALE = 5.0
    register_policy_loss("x")(user_module.my_loss)
    assert PolicyLossRegistry.get("x")(2.0, None, None, None)[0] == 3 * 2  # SCALE of the sender


def test_code_of_a_script_that_runs_again_registers_again(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "script.py", raising=False)
    cell = "def loss(log_probs, *rest, beta={}):\n    return beta * log_probs, {{}}\n"
    for beta in (1.0, 1.0):
        scope = {"__name__": "__main__"}
        exec(cell.format(beta), scope)
        register_policy_loss("x", batch_statistics=True)(scope["loss"])
        assert PolicyLossRegistry.get("x") is scope["loss"]
    assert has_batch_statistics("x")
    with pytest.raises(ValueError, match="'x' already registered: __main__:loss"):
        register_policy_loss("x")(scope["loss"])  # another mark
    exec(cell.format(2.0), scope)
    with pytest.raises(ValueError, match="'x' already registered: __main__:loss"):
        register_policy_loss("x", batch_statistics=True)(scope["loss"])


def test_an_edited_module_that_is_loaded_again_clashes(tmp_path, monkeypatch):
    file = tmp_path / "user_reloaded.py"
    code = "def loss(log_probs, *rest):\n    return {} * log_probs, {{}}\n"
    file.write_text(code.format(1))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("user_reloaded")
    register_policy_loss("x")(module.loss)
    register_policy_loss("x")(importlib.reload(module).loss)
    file.write_text(code.format(23))
    with pytest.raises(ValueError, match="'x' already registered: user_reloaded:loss"):
        register_policy_loss("x")(importlib.reload(module).loss)


def test_an_edited_cell_of_a_notebook_replaces_its_own_function(monkeypatch):
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)  # as in a notebook
    cell = "def {}(log_probs, *rest, beta={}):\n    return beta * log_probs, {{}}\n"
    scope = {"__name__": "__main__"}
    for beta, marks in ((1.0, False), (2.0, False), (3.0, True)):
        exec(cell.format("loss", beta), scope)
        register_policy_loss("x", batch_statistics=marks)(scope["loss"])
        assert PolicyLossRegistry.get("x")(1.0)[0] == beta
        assert has_batch_statistics("x") == marks
    exec(cell.format("another", 1.0), scope)
    with pytest.raises(ValueError, match="'x' already registered: __main__:loss"):
        register_policy_loss("x")(scope["another"])
    with pytest.raises(ValueError, match="'regular' already registered"):
        register_policy_loss("regular")(scope["loss"])


def test_synchronising_without_ray_is_refused():
    with pytest.raises(ValueError, match="^Ray is not initialized, cannot sync with actor. Call"):
        sync_registries()


def test_enums_name_exactly_the_builtins():
    assert [e.value for e in PolicyLossType] == list(LOSSES)
    assert [e.value for e in AdvantageEstimator] == list(ESTIMATORS)


def test_repopulate_drops_user_functions_and_repopulate_registry_keeps_them():
    PolicyLossRegistry.reset()
    assert PolicyLossRegistry.list_available() == []
    PolicyLossRegistry.register("x", loss_one)
    PolicyLossRegistry.register("regular", loss_two)
    PolicyLossRegistry.repopulate_registry()
    assert set(PolicyLossRegistry.list_available()) == {*LOSSES, "x"}
    assert PolicyLossRegistry.get("regular") is loss_two
    assert PolicyLossRegistry.user_functions() == {"x": loss_one, "regular": loss_two}
    PolicyLossRegistry.repopulate()
    assert PolicyLossRegistry.list_available() == list(LOSSES)
    assert PolicyLossRegistry.get("regular") is LOSSES["regular"]
    assert PolicyLossRegistry.user_functions() == {}


# ------------------------------------------------------------------ module:function


def test_resolve_imports_module_and_function(user_module):
    assert PolicyLossRegistry.resolve("user_losses_for_test:my_loss") is user_module.my_loss
    assert PolicyLossRegistry.resolve("regular") is LOSSES["regular"]
    assert "user_losses_for_test:my_loss" not in PolicyLossRegistry.list_available()


def test_resolve_errors_name_what_is_missing(user_module):
    with pytest.raises(ValueError, match="policy loss 'no_such.mod:f': cannot import.*'no_such.mo"):
        PolicyLossRegistry.resolve("no_such.mod:f")
    with pytest.raises(ValueError, match="has no function 'your_loss'; it has .*'my_loss'"):
        PolicyLossRegistry.resolve("user_losses_for_test:your_loss")
    with pytest.raises(ValueError, match="has no function 'not_a_function'"):
        PolicyLossRegistry.resolve("user_losses_for_test:not_a_function")
    with pytest.raises(ValueError, match="Unknown policy loss 'no_colon'"):
        PolicyLossRegistry.resolve("no_colon")


# ------------------------------------------------------------------ snapshots


def in_another_process(data, folder, code):
    """Run code there after `load_snapshot`; the user's module cannot be imported."""
    path = folder / "snapshot.pickle"
    path.write_bytes(data)
    script = f"""
import importlib.util
from jaxrl.registry import PolicyLossRegistry, load_snapshot
assert importlib.util.find_spec("user_losses_for_test") is None
load_snapshot(open({str(path)!r}, "rb").read())
{code}
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_snapshot_carries_user_functions_to_a_process_without_their_module(user_module, tmp_path):
    PolicyLossRegistry.register("mine", user_module.my_loss)
    PolicyLossRegistry.register("mine_jitted", user_module.jitted)
    PolicyLossRegistry.register("mine_halved", user_module.halved)
    other = tmp_path / "other"
    other.mkdir()
    # SCALE * 2 * beta: 6, 6, 3; the helper and the constant of the module came along
    code = """
for name in ("mine", "mine_jitted", "mine_halved"):
    print(float(PolicyLossRegistry.get(name)(2.0, None, None, None)[0]))
print(len(PolicyLossRegistry.list_available()))
"""
    printed = in_another_process(snapshot(), other, code)
    assert printed == ["6.0", "6.0", "3.0", str(len(LOSSES) + 3)]


def test_a_snapshot_does_not_change_how_the_module_is_pickled_afterwards(user_module):
    PolicyLossRegistry.register("mine", user_module.my_loss)
    snapshot()
    import cloudpickle

    assert cloudpickle.loads(cloudpickle.dumps(user_module.my_loss)) is user_module.my_loss


def test_loading_keeps_what_is_registered_here():
    PolicyLossRegistry.register("x", loss_one)
    AdvantageEstimatorRegistry.register("y", loss_one)
    data = snapshot()
    PolicyLossRegistry.repopulate()
    AdvantageEstimatorRegistry.repopulate()
    PolicyLossRegistry.register("x", loss_two)
    load_snapshot(data)
    assert PolicyLossRegistry.get("x") is loss_two
    assert AdvantageEstimatorRegistry.get("y")(2.0, None, None, None)[0] == -2.0


def test_a_function_that_cannot_be_loaded_does_not_keep_the_others_away():
    good = pack(loss_one, "good", {"batch_statistics": False})
    bad = good._replace(data=b"cno_such_package\nf\n.")
    with pytest.raises(ValueError, match=r"'bad' \(.*:loss_one\) of .* cannot be loaded here"):
        PolicyLossRegistry._receive({"bad": bad, "good": good})
    assert PolicyLossRegistry.get("good")(2.0, None, None, None)[0] == -2.0


def test_builtins_are_never_sent():
    empty = len(snapshot())
    PolicyLossRegistry.register("x", loss_one)
    assert empty < 200 < len(snapshot())


def unpicklable_loss():
    lock = threading.Lock()

    def locked(log_probs, old_log_probs, advantages, config, loss_mask=None):
        with lock:
            return -log_probs, {}

    return locked


class LockedLoss:
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, log_probs, old_log_probs, advantages, config, loss_mask=None):
        return -log_probs, {}


def test_a_closure_that_cannot_be_pickled_is_named_with_what_it_captures():
    PolicyLossRegistry.register("x", unpicklable_loss())
    with pytest.raises(ValueError, match=r"policy loss 'x' cannot be pickled.*captures \['lock'\]"):
        snapshot()


@pytest.mark.parametrize(
    "make", [lambda: jax.jit(unpicklable_loss()), lambda: functools.partial(unpicklable_loss())]
)
def test_a_wrapped_closure_that_cannot_be_pickled_is_named_too(make):
    PolicyLossRegistry.register("x", make())
    with pytest.raises(ValueError, match=r"policy loss 'x' cannot be pickled.*captures \['lock'\]"):
        snapshot()


def test_an_object_that_cannot_be_pickled_is_named_too():
    PolicyLossRegistry.register("x", LockedLoss())
    with pytest.raises(ValueError, match="policy loss 'x' cannot be pickled"):
        snapshot()


# ------------------------------------------------------------------ signatures


def test_accepted_keywords_are_those_of_the_signature():
    offered = {"loss_mask": 1, "key": 2, "entropy": 3}

    def names_key(log_probs, *, key):
        pass

    def takes_all(log_probs, **kwargs):
        pass

    def positional_only(key, /, entropy):
        pass

    assert accepted_keywords(names_key, offered) == {"key": 2}
    assert accepted_keywords(takes_all, offered) == offered
    assert accepted_keywords(positional_only, offered) == {"entropy": 3}
    assert accepted_keywords(jax.jit(names_key), offered) == {"key": 2}
    assert accepted_keywords(functools.partial(names_key), offered) == {"key": 2}


def test_check_hyperparameters_accepts_keyword_only_parameters():
    def loss(log_probs, old, advantages, config, loss_mask=None, *, beta=1.0, tau=0.5):
        pass

    check_hyperparameters(loss, {"beta": 2.0, "tau": 1.0}, "f")
    check_hyperparameters(lambda x, **kwargs: x, {"anything": 1}, "f")
    with pytest.raises(ValueError, match=r"f.bta=2.0: 'loss' takes no such.*\['beta', 'tau'\]"):
        check_hyperparameters(loss, {"bta": 2.0}, "f")
    with pytest.raises(ValueError, match="f.loss_mask=1"):
        check_hyperparameters(loss, {"loss_mask": 1}, "f")


def test_a_hyperparameter_that_is_not_keyword_only_is_told_how_to_become_one():
    def clip_higher(log_probs, old_log_probs, advantages, config, loss_mask=None, high=0.28):
        pass

    with pytest.raises(ValueError) as raised:
        check_hyperparameters(clip_higher, {"high": 0.3}, "f", ("loss_mask",))
    assert str(raised.value) == (
        "f.high=0.3: 'high' of 'clip_higher' is not keyword-only: write *, before it"
    )
    check_hyperparameters(lambda x, high=0.28, **kwargs: x, {"high": 0.3}, "f")


def test_a_jitted_user_function_is_called_with_the_config():
    @register_policy_loss("jitted")
    @jax.jit
    def loss(log_probs, old_log_probs, advantages, config, loss_mask=None):
        return log_probs * config.eps_clip_high, {}

    func, config = PolicyLossRegistry.get("jitted"), AlgorithmConfig(eps_clip_high=0.25)
    inputs = {"log_probs": jnp.full((1, 2), 4.0), "old_log_probs": None, "advantages": None}
    value, _ = func(**inputs, config=config, **accepted_keywords(func, {"loss_mask": None, "z": 1}))
    np.testing.assert_array_equal(value, [[1.0, 1.0]])  # 4 * 0.25


@pytest.mark.parametrize(
    ("func", "message"),
    [
        (
            lambda log_probs, advantages, old_log_probs, config: None,
            "parameter 2 is 'advantages'; the first four parameters must be log_probs, "
            "old_log_probs, advantages, config, in this order",
        ),
        (
            lambda logp, old, advantages, loss_mask, config: None,
            "parameter 4 is 'loss_mask'; the first four",
        ),
        (
            lambda log_probs, old_log_probs, advantages, mask: None,
            "parameter 4 is 'mask'; .* in this order; a parameter named loss_mask gets the mask$",
        ),
        (
            lambda log_probs, old_log_probs, advantages, *, config: None,
            r"takes \['log_probs', 'old_log_probs', 'advantages'\] by position; the first four",
        ),
        (lambda log_probs, advantages: None, "parameter 2 is 'advantages'; the first four"),
        (lambda **kwargs: None, r"takes \[\] by position; the first four"),
        (
            lambda log_probs, old_log_probs, advantages, config, tau: None,
            "nobody supplies its parameter 'tau'. Supplied by keyword are loss_mask, .* keyword-on",
        ),
    ],
)
def test_a_loss_of_other_parameters_is_refused_when_it_is_registered(func, message):
    with pytest.raises(ValueError, match=f"^policy loss 'x':? {message}"):
        PolicyLossRegistry.register("x", func)
    assert "x" not in PolicyLossRegistry.list_available()


@pytest.mark.parametrize(
    "func",
    [
        lambda logp, old, adv, cfg, loss_mask, rollout_logprobs=None, *, tau: None,
        lambda log_probs, *rest, **kwargs: None,
        jax.jit(lambda log_probs, old, advantages, config, loss_mask: None),
        functools.partial(lambda log_probs, old, adv, config, tau: None, tau=1.0),
        print,
    ],
)
def test_a_loss_that_can_be_called_is_registered(func):
    PolicyLossRegistry.register("x", func)


def test_an_estimator_is_refused_when_it_is_registered():
    with pytest.raises(ValueError, match="^advantage estimator 'x': nobody supplies.*'scores'"):
        AdvantageEstimatorRegistry.register("x", lambda scores, **kwargs: None)
    with pytest.raises(ValueError, match="^advantage estimator 'x': nobody supplies.*'index'"):
        AdvantageEstimatorRegistry.register("x", lambda index, /: None)
    for func in (lambda **kwargs: None, lambda index, gamma, *, scale: None):
        AdvantageEstimatorRegistry.register("x", func)
        AdvantageEstimatorRegistry.unregister("x")


# ------------------------------------------------------------------ the built-ins


BUILTINS = [("losses", name, f) for name, f in LOSSES.items()]
BUILTINS += [("advantages", name, f) for name, f in ESTIMATORS.items()]


def check_builtin(folder, name, func):
    file = name.replace("++", "_plus_plus")
    assert inspect.getsourcefile(func) == str(ROOT / "jaxrl" / folder / f"{file}.py")
    assert (ROOT / "tests" / folder / f"test_{file}.py").is_file()
    assert func.__name__ == file
    doc = inspect.getdoc(func)
    assert re.search(r"^ {4}\S.* = .*$", doc, re.MULTILINE), "no indented formula"
    if name != "cross_entropy":
        assert re.search(r"https?://\S+|arXiv:\d{4}\.\d{5}", doc), "no paper"


def test_every_builtin_has_its_file_its_tests_its_formula_and_its_paper():
    wrong = []
    for folder, name, func in BUILTINS:
        try:
            check_builtin(folder, name, func)
        except Exception as error:
            wrong.append(f"{folder}/{name}: {error!r}")
    assert not wrong, "\n".join(wrong)


def own_loss(log_probs, old_log_probs, advantages, config):
    return -log_probs * advantages, {}


def test_source_hashes_of_user_functions_alone():
    name = "tests.registry.test_registry:own_loss"
    algorithm = AlgorithmConfig(policy_loss_type=name, advantage_estimator="grpo")
    source = (
        "def own_loss(log_probs, old_log_probs, advantages, config):\n"
        "    return -log_probs * advantages, {}\n"
    )
    expected = hashlib.sha256(source.encode()).hexdigest()
    assert source_hashes(algorithm) == {f"policy loss '{name}'": expected}
    assert source_hashes(AlgorithmConfig(policy_loss_type="regular")) == {}


def test_the_source_hash_sees_through_jit_and_partial(clean_registries):
    register_policy_loss("plain")(own_loss)
    register_policy_loss("wrapped")(functools.partial(jax.jit(own_loss)))
    plain, wrapped = (
        list(source_hashes(AlgorithmConfig(policy_loss_type=name)).values())
        for name in ("plain", "wrapped")
    )
    assert plain == wrapped


def test_a_function_without_source_is_of_unknown_source(clean_registries):
    scope = {}
    exec("def typed(log_probs, *rest): return log_probs, {}", scope)
    register_policy_loss("typed")(scope["typed"])
    hashes = source_hashes(AlgorithmConfig(policy_loss_type="typed"))
    assert hashes == {"policy loss 'typed'": "unknown"}
