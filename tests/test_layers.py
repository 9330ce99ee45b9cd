"""Imports point one way: L0 <- L1 <- registry; L0 <- parallel <- L2; all of them <- L3 <- L4 <- L5.

Of the packages of L2 only `parallel` is known to others: models place their arrays.
"""

import ast
from pathlib import Path

import jaxrl

ROOT = Path(jaxrl.__file__).parent

LAYER_OF = {
    "types": "L0",
    "array_ops": "L0",
    "function_contracts": "L0",
    "function_calls": "L0",
    "losses": "L1",
    "advantages": "L1",
    "user_functions": "L0",
    "function_registry": "registry",
    "registry": "registry",
    "parallel": "placement",
    "models": "L2",
    "data": "L2",
    "envs": "L2",
    "config": "L3",
    "rollout": "L3",
    "optim": "L3",
    "forward": "L3",
    "objective": "L3",
    "rewards": "L3",
    "update": "L3",
    "scorer": "L3",
    "offload": "L0",
    "checkpoint": "L3",
    "checkpoint_items": "L3",
    "checksums": "L3",
    "same_run": "L3",
    "ledger": "L3",
    "compilation": "L3",
    "metrics": "L3",
    "watching": "L3",
    "files": "L0",
    "lease": "L0",
    "run_folders": "L3",
    "policy": "L4",
    "critic": "L4",
    "run_state": "L4",
    "recorded_run": "L4",
    "replay": "L4",
    "loss_choices": "L4",
    "loss_comparison": "L4",
    "compare": "L4",
    "anchors": "L4",
    "staleness": "L3",
    "weight_sync": "L3",
    "shared_folder": "L3",
    "assemble": "L4",
    "resident_memory": "L4",
    "assemble_remote": "L4",
    "assemble_workers": "L4",
    "rollout_worker": "L4",
    "batch_file": "L3",
    "eval_metrics": "L3",
    "evaluation": "L3",
    "eval_subject": "L4",
    "evaluate": "L4",
    "trainer": "L4",
    "warm_up": "L4",
    "engines": "L4",
    "serving": "L4",
    "serve": "L4",
    "sft": "L4",
    "train": "L4",
    "train_async": "L4",
    "jetstream_backend": "L4",
    "lineage": "L4",
    "lineage_checks": "L4",
    "audit": "L4",
    "report": "L4",
    "reporting": "L4",
    "plan": "L4",
    "platform_defaults": "L4",
    "planning": "L4",
    "doctor": "L4",
    "examination": "L4",
    "chips": "L0",
    "__main__": "L4",
    "cluster": "L5",
}
MAY_IMPORT = {
    "L0": {"L0"},
    "L1": {"L0"},
    "registry": {"L0", "L1", "registry"},
    "placement": {"L0"},
    "L2": {"L0", "placement"},
    "L3": {"L0", "L1", "registry", "placement", "L2", "L3"},
    "L4": {"L0", "L1", "registry", "placement", "L2", "L3", "L4"},
    "L5": {"L0", "L1", "registry", "placement", "L2", "L3", "L4", "L5"},
}
# In a process where Ray is initialised, a registry asks the actor that shares it, and rollout
# workers are actors. A run whose config asks for environments in Ray actors gets them there.
UPWARD = {
    ("function_registry", "jaxrl.cluster.registry_sync"),
    ("train", "jaxrl.cluster.environment_workers"),
    ("assemble_workers", "jaxrl.cluster.rollout_worker.ray_workers"),
}
# The maths knows no framework but these.
L1_PACKAGES = {"jax", "chex", "jaxrl", "typing"}


def imported_modules(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def part_of(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def modules():
    return [p for p in sorted(ROOT.rglob("*.py")) if p != ROOT / "__init__.py"]


def test_every_module_has_a_layer():
    assert {part_of(p) for p in modules()} <= set(LAYER_OF)


def test_imports_point_one_way():
    wrong = []
    for path in modules():
        part = part_of(path)
        for name in imported_modules(path):
            pieces = name.split(".")
            if pieces[0] != "jaxrl" or len(pieces) == 1 or pieces[1] == part:
                continue
            layer, target = LAYER_OF[part], LAYER_OF.get(pieces[1])
            same_l2 = layer == target == "L2"  # packages of L2 do not know each other
            upward = (part, name) in UPWARD
            if (target not in MAY_IMPORT[layer] and not upward) or same_l2:
                wrong.append(f"{path.relative_to(ROOT)} ({layer}) imports {name} ({target})")
    assert not wrong


def test_the_maths_imports_only_jax():
    for path in modules():
        if LAYER_OF[part_of(path)] == "L1":
            packages = {name.split(".")[0] for name in imported_modules(path)}
            assert packages <= L1_PACKAGES, path


def test_ray_stays_in_cluster():
    for path in modules():
        if part_of(path) != "cluster":
            assert not any(n.split(".")[0] == "ray" for n in imported_modules(path)), path
