"""`ls jaxrl` is the architecture: which rooms there are, and which way imports point."""

import ast
import functools
import re
from pathlib import Path

import pytest

import jaxrl

pytestmark = pytest.mark.check
ROOT = Path(jaxrl.__file__).parent
# What a room may import beside itself: all rooms of lower layers, and of its own what stands here.
LAYERS = {
    "pytrees": -1,  # what types are made of
    "types": 0,
    "redaction": -1,  # what errors of configs are shown by
    "config_error": 0,
    "child_environment": 0,
    "array_ops": 0,
    "files": 0,
    "functions": 0,
    "activity": 0,
    "signals": 0,
    "cli": 0,
    "losses": 1,
    "advantages": 1,
    "registry": 2,
    "hub": 2,
    "parallel": 3,
    "models": 4,
    "data": 4,
    "envs": 4,
    "config": 5,
    "rollout": 6,
    "training": 6,
    "records": 6,
    "trainer": 7,
    "train": 7,
    "train_async": 7,
    "sft": 7,
    "serve": 7,
    "tools": 8,
    "__main__": 8,
    "evaluate": 8,
    "plan": 8,
    "doctor": 8,
    "prove": 8,
    "audit": 8,
    "replay": 8,
    "compare": 8,
    "sweep": 8,
    "report": 8,
    "tinker": 8,
    "new": 8,
    "recipes": 8,
    "completion": 8,
    "cluster": 9,
}
ROOMS = 13  # folders of jaxrl
NOT_EACH_OTHER = 0, 1, 4, 6  # layers whose rooms are siblings
# The optimizers, environments and objectives of a run are not what its config is made of.
NOT_FOR_CONFIG = "envs", "rollout", "training", "records"
# In a process where Ray is initialised, a registry asks the actor that shares it, and rollout
# workers are actors. A run whose config asks for environments in Ray actors gets them there.
UPWARD = {
    ("registry/table.py", "jaxrl.cluster.registry_sync"),
    ("rollout/build_remote.py", "jaxrl.cluster.rollout_worker"),
    ("train.py", "jaxrl.cluster.environment_workers"),
}
# The maths knows no framework but these, and what types are written with.
MATHS_PACKAGES = {"jax", "chex", "jaxrl", "collections", "typing"}

PATHS = {
    ".".join(["jaxrl", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(
        ".__init__"
    ): path
    for path in sorted(ROOT.rglob("*.py"))
}


def read(path: Path) -> tuple[set[tuple[str, bool]], list[ast.arg]]:
    """Every import of a file, in functions and for type checkers too: (name, at its top).

    And every argument with an annotation.
    """
    tree = ast.parse(path.read_text())
    at_top, found, arguments = set(tree.body), set(), []
    for node in ast.walk(tree):
        top = node in at_top
        if isinstance(node, ast.Import):
            found |= {(alias.name, top) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add((full if full in PATHS else node.module, top))
        elif isinstance(node, ast.arg) and node.annotation is not None:
            arguments.append(node)
    return found, arguments


@functools.cache  # 2.7 s, which each process would spend on collecting the tests
def every_file() -> dict[str, tuple[set[tuple[str, bool]], list[ast.arg]]]:
    return {name: read(path) for name, path in PATHS.items()}


@functools.cache
def edges() -> set[tuple[str, str, bool]]:
    return {
        (name, target, top)
        for name, (imports, _) in every_file().items()
        for target, top in imports
        if target in PATHS and target != name
    }


def room(name: str) -> str:
    return name.split(".")[1]


def place(name: str) -> str:
    return str(PATHS[name].relative_to(ROOT))


def packages(name: str) -> set[str]:
    """The packages that a file imports from."""
    return {target.split(".")[0] for target, _ in every_file()[name][0]}


def test_every_entry_of_the_package_has_a_layer():
    names = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert names - {"__init__", "__pycache__"} == set(LAYERS)
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert len(folders) == ROOMS


def test_imports_point_down():
    upward, wrong = set(), []
    for name, target, top in sorted(edges()):
        if "jaxrl" in (name, target) or room(name) == room(target):
            continue
        here, there = LAYERS[room(name)], LAYERS[room(target)]
        if (place(name), target) in UPWARD and not top:
            upward.add((place(name), target))
        elif there > here or (there == here and here in NOT_EACH_OTHER):
            wrong.append(f"{place(name)} (layer {here}) imports {target} (layer {there})")
    assert not wrong, "\n".join(wrong)
    assert upward == UPWARD


def test_no_file_imports_itself_by_way_of_others():
    """Kahn's algorithm: files whose imports are all done leave; what stays is on a circle."""
    waiting = {name: {t for n, t, _ in edges() if n == name} for name in PATHS}
    while done := {name for name, targets in waiting.items() if not targets & set(waiting)}:
        waiting = {name: targets for name, targets in waiting.items() if name not in done}
    assert not waiting


def test_the_config_is_made_of_names_and_signatures():
    wrong = [
        f"{place(name)} imports {target}"
        for name, target, top in sorted(edges())
        if name.startswith("jaxrl.config") and top and room(target) in NOT_FOR_CONFIG
    ]
    assert not wrong, "\n".join(wrong)


def test_the_maths_imports_only_jax():
    maths = [name for name in PATHS if name != "jaxrl" and LAYERS[room(name)] == 1]
    others = {place(name): packages(name) - MATHS_PACKAGES for name in maths}
    wrong = [f"{file} imports {sorted(found)}" for file, found in others.items() if found]
    assert not wrong, "\n".join(wrong)


def test_ray_stays_in_cluster():
    elsewhere = [name for name in PATHS if not name.startswith("jaxrl.cluster")]
    wrong = [place(name) for name in elsewhere if "ray" in packages(name)]
    assert not wrong, "\n".join(wrong)


def test_nobody_but_callbacks_is_handed_a_trainer():
    """`tools` build one of their own, and pass on its parts. Layer 7 is what makes and runs it."""
    wrong = []
    for name, (_, arguments) in every_file().items():
        if name in ("jaxrl", "jaxrl.records.callbacks") or LAYERS[room(name)] == LAYERS["trainer"]:
            continue
        for node in arguments:
            kind = ast.unparse(node.annotation)
            if (node.arg == "trainer" and kind == "Any") or re.search(r"\bTrainer\b", kind):
                wrong.append(f"{place(name)}:{node.lineno} takes {node.arg}: {kind}")
    assert not wrong, "\n".join(wrong)
