"""Starting Ray for a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from jaxrl.cluster import initialize_ray
from jaxrl.cluster.initialize import worker_environment
from jaxrl.config import load_config_file, resolve

ROOT = Path(__file__).parents[2]
RECIPE = """
from dataclasses import dataclass

from jaxrl.config import AlgorithmConfig, make_config


@dataclass
class MyAlgorithmConfig(AlgorithmConfig):
    my_param: int = 42


def get_config():
    return make_config(algorithm_cls=MyAlgorithmConfig)()
"""


def test_workers_have_the_settings_of_the_driver(cluster):
    def settings():
        return {name: os.environ.get(name) for name in ("JAX_PLATFORMS", "XLA_FLAGS")}

    assert cluster(0, settings) == settings()
    assert settings()["JAX_PLATFORMS"] == "cpu"


def test_what_belongs_to_one_process_stays_there(monkeypatch):
    monkeypatch.setenv("JAX_PROCESS_ID", "3")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    environment = worker_environment()
    assert environment["XLA_FLAGS"] == "--xla_dump_to=x"
    assert not {"JAX_PROCESS_ID", "HF_TOKEN"} & set(environment)


@pytest.mark.slow
def test_a_config_class_of_a_recipe_travels(cluster, tmp_path):
    (tmp_path / "recipe.py").write_text(RECIPE)
    config = load_config_file(str(tmp_path / "recipe.py"))
    initialize_ray(config)
    config.trainer.algorithm.my_param = 7

    def read(config):
        return resolve(config).trainer.algorithm.my_param

    assert cluster(0, read, config) == 7
    assert ray.get(ray.remote(num_cpus=0)(read).remote(config)) == 7


@pytest.mark.parametrize(
    "needs", ["from jaxrl.cluster import initialize_ray", "import jaxrl.cluster.registry_sync"]
)
def test_without_ray_the_extra_is_named(needs):
    code = f"import sys; sys.modules['ray'] = None; import jaxrl.registry; {needs}"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=ROOT
    )
    assert "ModuleNotFoundError: jaxrl.cluster needs Ray: pip install 'jaxrl[ray]'" in done.stderr
