"""What starts at once imports nothing that takes seconds; what it defines is known to JAX later."""

import subprocess
import sys

import pytest

# Each takes 0.1 to 2 s, and a config, an audit or a report needs none.
HEAVY = "aiohttp chex flax jax matplotlib optax orbax pyarrow scipy tokenizers torch transformers"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", ["jaxrl", "jaxrl.config", "jaxrl.audit", "jaxrl.report"])
def test_it_starts_at_once(module):
    code = f"import sys, {module}; print(sorted(set('{HEAVY}'.split()) & set(sys.modules)))"
    assert run(code) == "[]\n"


def test_a_recipe_and_its_overrides_are_read_without_jax():
    words = ["--config=configs/quickstart.py", "--config.trainer.sed=1"]
    code = (
        "import sys\nfrom jaxrl.config import read_command_line\n"
        f"try: read_command_line({words})\nexcept ValueError as error: print(error)\n"
        "print('jax' in sys.modules)"
    )
    lines = run(code).splitlines()
    assert lines[0].startswith("unknown config field 'trainer.sed'. Did you mean 'trainer.seed'?")
    assert lines[1:] == ["False"]


@pytest.mark.parametrize("first", ["import jax", "import jax.numpy", "from jax import tree_util"])
@pytest.mark.parametrize("jax_comes", ["before", "after"])
def test_jax_knows_batches_and_configs_whenever_it_is_imported(first, jax_comes):
    imports = ["from jaxrl.config import BaseConfig\nfrom jaxrl.types import CriticState", first]
    if jax_comes == "before":
        imports.reverse()
    code = "\n".join(imports) + (
        "\nimport jax"
        "\nfrom dataclasses import dataclass"
        "\n@dataclass"
        "\nclass Mine(BaseConfig):"
        "\n    size: int = 3"
        "\nstate = CriticState(params={'w': 1.0}, opt_state=2.0, skipped_updates=3)"
        "\nprint(jax.tree.map(lambda x: 2 * x, (state, Mine())))"
        "\nprint(jax.tree_util.tree_leaves_with_path(state)[0][0])"
    )
    doubled = "CriticState(params={'w': 2.0}, opt_state=4.0, skipped_updates=6), Mine(size=3)"
    assert run(code) == f"({doubled})\n(GetAttrKey(name='params'), DictKey(key='w'))\n"


def test_what_needs_jax_is_offered_by_the_config_all_the_same():
    code = "from jaxrl import config as cfg\nprint(all(getattr(cfg, n) for n in cfg.__all__))"
    assert run(code) == "True\n"
    code = "from jaxrl.config import validat"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "cannot import name 'validat' from 'jaxrl.config'" in done.stderr
