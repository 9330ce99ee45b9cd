"""What starts at once imports nothing that takes seconds; what it defines is known to JAX later."""

import json
import subprocess
import sys

import pytest

import jaxrl

# Each takes 0.1 to 2 s, and a config, an audit or a report needs none.
HEAVY = "aiohttp chex flax jax matplotlib optax orbax pyarrow scipy tokenizers torch transformers"
LIGHT = ["jaxrl", "jaxrl.config", "jaxrl.audit", "jaxrl.report"]
FIRST = ["import jax", "import jax.numpy", "from jax import tree_util"]
WRONG = ["--config=configs/quickstart.py", "--config.trainer.sed=1"]
DOUBLE = """
import jax
from dataclasses import dataclass
from jaxrl.config import BaseConfig
from jaxrl.types import CriticState

@dataclass
class Mine(BaseConfig):
    size: int = 3

state = CriticState(params={'w': 1.0}, opt_state=2.0, skipped_updates=3)
doubled = str(jax.tree.map(lambda x: 2 * x, (state, Mine())))
path = str(jax.tree_util.tree_leaves_with_path(state)[0][0])
"""
# One process has no JAX until its copies import it, each in its own way, and then it itself.
PROCESS = f"""
import json, os, sys
said = {{}}
for module in {LIGHT}:
    __import__(module)
    said[module] = sorted(set('{HEAVY}'.split()) & set(sys.modules))
    said.setdefault('lightest', sorted({{'numpy', 'ml_collections'}} & set(sys.modules)))
from jaxrl import config as cfg, types
try: cfg.read_command_line({WRONG})
except ValueError as error: said['refused'] = str(error)
said['jax'] = 'jax' in sys.modules
for first in {FIRST}:
    reads, writes = os.pipe()
    if not os.fork():
        try:
            exec(first + {DOUBLE!r})
            found = [doubled, path]
        except Exception as error: found = repr(error)
        os.write(writes, json.dumps(found).encode())
        os._exit(0)
    os.close(writes)
    said[first] = json.load(open(reads))
    os.wait()
said['jax of copies'] = 'jax' in sys.modules
said['offered'] = all(getattr(cfg, name) for name in cfg.__all__)
import jaxrl
said['callable'] = [callable(jaxrl.fit), jaxrl.__version__]
import jaxrl.registry, jaxrl.train
said['callable'].append(callable(jaxrl.train.train))
said['ray'] = 'ray' in sys.modules
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said():
    """What the process found."""
    command = [sys.executable, "-c", PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", LIGHT)
def test_it_starts_at_once(said, module):
    assert said[module] == []


def test_a_recipe_and_its_overrides_are_read_without_jax(said):
    wrong = "unknown config field 'trainer.sed'. Did you mean 'trainer.seed'?"
    assert said["refused"].startswith(wrong)
    assert not said["jax"]


@pytest.mark.parametrize("first", [*FIRST, "before"])
def test_jax_knows_batches_and_configs_whenever_it_is_imported(said, first):
    """`before`: here, where conftest.py has it first; each of the three ways imports it whole."""
    assert not said["jax of copies"]
    found = said.get(first)
    if first == "before":
        names = list(sys.modules)
        assert names.index("jax") < names.index("jaxrl")
        here = {}
        exec(DOUBLE, here)
        found = [here["doubled"], here["path"]]
    doubled = "CriticState(params={'w': 2.0}, opt_state=4.0, skipped_updates=6), Mine(size=3)"
    assert found == [f"({doubled})", "(GetAttrKey(name='params'), DictKey(key='w'))"]


def test_the_package_is_light_and_its_modules_are_not_hidden(said):
    assert said["lightest"] == []  # nor what is heavy, above
    assert said["callable"] == [True, jaxrl.__version__, True]
    assert "fit" in dir(jaxrl)
    with pytest.raises(AttributeError, match="^module 'jaxrl' has no attribute 'fitt'$"):
        _ = jaxrl.fitt


def test_neither_a_run_nor_the_registry_imports_ray(said):
    assert not said["ray"]


def test_what_needs_jax_is_offered_by_the_config_all_the_same(said):
    assert said["offered"]
    with pytest.raises(ImportError, match=r"cannot import name 'validat' from 'jaxrl\.config'"):
        from jaxrl.config import validat  # noqa: F401
