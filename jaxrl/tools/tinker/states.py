"""Models as files: what a model is after a call, and the checkpoints that clients name.

A state is all of a `Tenant`; of it, a checkpoint for training has no gradient, one for sampling the
adapters alone. Facts and tensors have a checksum each: a bit of a file is not another model.
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrl.files import DamagedFile, replaced, sealed, unsealed
from jaxrl.tools.tinker.tenants import Tenant

TRAINING, SAMPLING = ("adapters", "mu", "nu", "count", "scale"), ("adapters", "scale")
WHOLE = ("gradients", *TRAINING)
_DIGEST = "tensors"  # fact of a file: what its tensors are


def write(path: Path, tenant: Tenant, parts: tuple[str, ...], **facts: Any) -> int:
    """Write parts of a model so that the file is there whole or not; return its bytes.

    Args:
        facts: kept beside them, as text.

    Raises:
        FolderError: it cannot be written, as on a full disk.
    """
    tensors = {}
    for part in parts:
        for way, x in jax.tree_util.tree_leaves_with_path(getattr(tenant, part)):
            tensors["/".join([part, *(key.key for key in way)])] = np.asarray(x)
    plain = {name: str(x) for name, x in facts.items()}
    with replaced(path) as new:
        try:
            save_file(tensors, new, metadata=sealed({**plain, _DIGEST: _digest(tensors)}))
        except SafetensorError as error:  # so it says what the system says
            raise OSError(str(error)) from error
    return path.stat().st_size


def read(path: Path) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Return the parts of a model that a file holds, and its facts.

    Raises:
        DamagedFile: it is not what was written; files of earlier versions cannot tell.
    """
    facts = read_facts(path)
    with _named(path), safe_open(path, "np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if _DIGEST in facts and facts[_DIGEST] != _digest(tensors):
            raise DamagedFile("the checksum of its tensors is that of others")
    parts: dict[str, Any] = {}
    for name, tensor in tensors.items():
        part, _, way = name.partition("/")
        leaf, _, side = way.rpartition("/")
        if side:
            parts.setdefault(part, {}).setdefault(leaf, {})[side] = tensor
        else:
            parts[part] = tensor
    return parts, facts


def read_facts(path: Path) -> Mapping[str, str]:
    """Return the facts of a file alone.

    Raises:
        DamagedFile: they are not what was written.
    """
    with _named(path), safe_open(path, "np") as file:
        facts, checked = unsealed(json.dumps(file.metadata() or {}))
        if _DIGEST in facts and not checked:  # earlier versions wrote neither
            raise DamagedFile("its checksum is gone")
        return facts


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name a file that the block finds damaged, and what to do."""
    try:
        yield
    except (SafetensorError, DamagedFile) as error:
        raise DamagedFile(
            f"{path} is damaged ({error}): put a copy in its place and begin the service again, or "
            "go on from a checkpoint that is whole, in a new model"
        ) from error


def _digest(tensors: Mapping[str, np.ndarray]) -> str:
    whole = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        x = tensors[name]
        whole.update(ascii((name, x.dtype.str, x.shape)).encode())
        whole.update(x.tobytes())
    return whole.hexdigest()


def missing_space(folder: Path, tenant: Tenant, parts: tuple[str, ...]) -> int:
    """Return how many bytes the disk of a folder lacks for a file with parts of a model."""
    needed = sum(x.nbytes for part in parts for x in jax.tree.leaves(getattr(tenant, part)))
    return max(needed - shutil.disk_usage(folder).free, 0)
