"""Wheel and sdist build, hold what they must, and install with each extra in an empty environment.

Extras of accelerators hold gigabytes of their maker's libraries: they are resolved, not installed.
"""

import email
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
ACCELERATORS = ("tpu", "gpu")
# extra -> what it is for
IMPORTS = {
    "gcs": "google.cloud.storage",
    "ray": "jaxrl.cluster",
    "envs": "jaxrl.envs.adapters.reasoning_gym, bm25s, skyrl_gym",
    "gymnasium": "gymnasium",
    "verifiers": "verifiers.envs.environment",
    "openenv": "openenv.core",
    "serve": "jaxrl.rollout.server.app",
    "wandb": "jaxrl.records.loggers, wandb",
    "mlflow": "jaxrl.records.loggers, mlflow",
    "jetstream": "jaxrl.rollout.jetstream.engine",
    "docs": "mkdocs, material, mkdocstrings",
    "notebooks": "nbclient, ipykernel, nbformat, ipywidgets",
}

pytestmark = pytest.mark.slow


def run(*words, cwd=ROOT):
    done = subprocess.run(
        [str(w) for w in words], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what git tracks, so that nothing lying about gets in."""
    folder = tmp_path_factory.mktemp("source")
    archive = folder / "all.tar"
    with tarfile.open(archive, "w") as tar:
        for name in run("git", "ls-files").splitlines():
            tar.add(ROOT / name, name)
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "jaxrl", filter="data")
    return folder / "jaxrl"


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder, source)
    (found,) = folder.glob("jaxrl-*.whl")
    return found


@pytest.fixture(scope="module")
def sdist(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    run(sys.executable, "-c", build, cwd=source)
    (found,) = folder.glob("jaxrl-*.tar.gz")
    return found


@pytest.fixture(scope="module")
def base(wheel, tmp_path_factory):
    """An environment with the wheel and what it needs, and nothing else."""
    return environment(tmp_path_factory.mktemp("base"), wheel, "")


def environment(folder, wheel, extra):
    run(sys.executable, "-m", "venv", folder)
    name = f"{wheel}[{extra}]" if extra else str(wheel)
    run(folder / "bin/pip", "install", "--quiet", name, cwd=folder)
    return folder / "bin/python"


def test_the_wheel_holds_every_module_and_data_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = run("git", "ls-files", "jaxrl").splitlines()
    assert {name for name in tracked if not name.endswith(".pyi")} <= names
    outside = {name.split("/")[0].rpartition(".")[2] for name in names} - {"jaxrl"}
    assert outside == {"dist-info", "data"}
    recipes = {name.partition("/data/share/jaxrl/")[2] for name in names} - {""}
    assert recipes == set(run("git", "ls-files", "configs").splitlines())


def test_the_metadata_says_what_the_project_does(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [n for n in archive.namelist() if n.endswith("/METADATA")]
    metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Name"] == "jaxrl"
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert set(metadata.get_all("Provides-Extra")) == set(EXTRAS)
    plain = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
    assert len(plain) == len(PROJECT["dependencies"])


def test_the_sdist_builds_the_same_wheel(sdist, wheel, tmp_path):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "configs/quickstart.py"} <= names
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", tmp_path, sdist)
    (again,) = tmp_path.glob("jaxrl-*.whl")
    assert set(zipfile.ZipFile(again).namelist()) == set(zipfile.ZipFile(wheel).namelist())


def test_it_works_without_extras(base, tmp_path):
    listed = run(base, "-m", "jaxrl", cwd=tmp_path)
    assert "python -m jaxrl.train " in listed
    where = run(base, "-c", "import jaxrl; print(jaxrl.__file__)", cwd=tmp_path)
    assert "site-packages" in where
    for line in listed.splitlines():
        if line.startswith("  python -m "):
            run(base, "-m", line.split()[2], "--help", cwd=tmp_path)
    recipe = tmp_path / "recipe.py"
    words = ["--output", recipe, "trainer.epochs=2"]
    run(base, "-m", "jaxrl.config.from_skyrl", *words, cwd=tmp_path)
    assert "trainer.epochs = 2" in recipe.read_text()


def test_it_trains_without_extras_and_without_a_clone(base, tmp_path):
    words = ["--config=configs/quickstart.py", "--config.trainer.max_training_steps=2"]
    words += ["--config.trainer.eval_before_train=false", "--config.trainer.hf_save_interval=-1"]
    run(base, "-m", "jaxrl.train", *words, cwd=tmp_path)
    assert len((tmp_path / "runs/quickstart/metrics.jsonl").read_text().splitlines()) == 2


def test_every_extra_is_tried():
    assert set(IMPORTS) | set(ACCELERATORS) | {"dev"} == set(EXTRAS)


@pytest.mark.parametrize("extra", IMPORTS)
def test_the_wheel_installs_with_an_extra(wheel, tmp_path, extra):
    python = environment(tmp_path / "env", wheel, extra)
    run(python, "-c", f"import {IMPORTS[extra]}", cwd=tmp_path)
    assert "python -m jaxrl.train " in run(python, "-m", "jaxrl", cwd=tmp_path)


@pytest.mark.parametrize("extra", ACCELERATORS)
def test_the_accelerator_extras_resolve(wheel, base, extra):
    words = ["install", "--dry-run", "--quiet", "--report", "-", f"{wheel}[{extra}]"]
    report = run(base.parent / "pip", *words)
    assert {"tpu": '"name": "libtpu"', "gpu": '"name": "jax-cuda13-plugin"'}[extra] in report
