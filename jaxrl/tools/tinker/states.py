"""Models as files: what a model is after a call, and the checkpoints that clients name.

A state is all of a `Tenant`; of it, a checkpoint for training has no gradient, one for sampling the
adapters alone.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxrl.files import replaced
from jaxrl.tools.tinker.tenants import Tenant

TRAINING, SAMPLING = ("adapters", "mu", "nu", "count", "scale"), ("adapters", "scale")
WHOLE = ("gradients", *TRAINING)


def write(path: Path, tenant: Tenant, parts: tuple[str, ...], **facts: Any) -> int:
    """Write parts of a model so that the file is there whole or not; return its bytes.

    Args:
        facts: kept beside them, as text.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for part in parts:
        for way, x in jax.tree_util.tree_leaves_with_path(getattr(tenant, part)):
            tensors["/".join([part, *(key.key for key in way)])] = np.asarray(x)
    with replaced(path) as new:
        save_file(tensors, new, metadata={name: str(x) for name, x in facts.items()})
        with open(new, "rb") as file:
            os.fsync(file.fileno())
    return path.stat().st_size


def read(path: Path) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Return the parts of a model that a file holds, and its facts."""
    parts: dict[str, Any] = {}
    with safe_open(path, "np") as file:
        for name in file.keys():  # noqa: SIM118
            part, _, way = name.partition("/")
            leaf, _, side = way.rpartition("/")
            if side:
                parts.setdefault(part, {}).setdefault(leaf, {})[side] = file.get_tensor(name)
            else:
                parts[part] = file.get_tensor(name)
        return parts, dict(file.metadata() or {})


def read_facts(path: Path) -> Mapping[str, str]:
    """Return the facts of a file alone."""
    with safe_open(path, "np") as file:
        return dict(file.metadata() or {})


def missing_space(folder: Path, tenant: Tenant, parts: tuple[str, ...]) -> int:
    """Return how many bytes the disk of a folder lacks for a file with parts of a model."""
    needed = sum(x.nbytes for part in parts for x in jax.tree.leaves(getattr(tenant, part)))
    return max(needed - shutil.disk_usage(folder).free, 0)
