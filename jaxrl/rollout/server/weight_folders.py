"""Which folders and buckets the weights of a server may come from."""

from pathlib import Path

from etils import epath

from jaxrl.models.hf import INDEX_FILE, read_json
from jaxrl.rollout.server.errors import ApiError
from jaxrl.rollout.weights.versions import INDEX


def folder_under(root: str | None, path: str) -> Path | epath.Path:
    """Return the folder that a request names, if it and its files lie under the root.

    A version of `weights.versions` is named by its index, which need not be there: who reads it
    says what is missing.

    Args:
        root: a folder, or an address in a bucket; None = no folder is read.
        path: absolute, or relative to the root; links and ".." are followed first.

    Raises:
        ApiError: 403 outside of the root, 400 if it is no model folder. What is outside is not
            looked at, so that nothing is learnt of it.
    """
    if root is None:
        raise ApiError(403, "no weights are read over HTTP here; start with serve.weights_root")
    if "://" in root:
        return _in_bucket(root.rstrip("/"), path)
    top = Path(root).resolve()
    try:
        folder = (top / path).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a null byte, a loop of links
        raise ApiError(400, f"path={path[:80]!r} is not a path", param="path") from error
    if folder.name == INDEX:
        _check_inside(top, folder.parent.parent, path)  # where the versions before lie, too
        return folder
    _check_inside(top, folder, path)
    if not folder.is_dir():
        raise ApiError(400, f"path={path!r} is not a folder under the root", param="path")
    for file in folder.iterdir():
        _check_inside(top, file.resolve(), f"{path}/{file.name}")
    _check_index(folder)
    return folder


def _in_bucket(root: str, path: str) -> epath.Path:
    """Return the address of a version's index in a bucket; it is not looked at."""
    address = path if "://" in path else f"{root}/{path}"
    below = address.removeprefix(f"{root}/").split("/")
    if not address.startswith(f"{root}/") or {"", ".", ".."} & set(below):
        raise _outside(path)
    if len(below) < 2 or below[-1] != INDEX:
        message = f"path={path[:200]!r} must be a version's {INDEX}: no other weights are read of a"
        raise ApiError(400, f"{message} bucket", param="path")
    return epath.Path(address)


def _outside(path: str) -> ApiError:
    message = f"path={path[:200]!r} is outside of serve.weights_root"
    return ApiError(403, message, param="path")


def _check_inside(top: Path, path: Path, shown: str) -> None:
    if not path.is_relative_to(top):
        raise _outside(shown)


def _check_index(folder: Path) -> None:
    """Check that the shards that an index names are files of the folder."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return
    try:
        names = set(read_json(index)["weight_map"].values())
        outside = [name for name in names if Path(name).name != name]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ApiError(400, f"{INDEX_FILE} is damaged: {error!r}", param="path") from error
    if outside:
        raise ApiError(403, f"{INDEX_FILE} names files elsewhere: {outside[0]!r}", param="path")
