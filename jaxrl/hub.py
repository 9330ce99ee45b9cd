"""Find the folder of a model: one of this machine, or the local copy of one of the hub.

Whatever reads a model, be it config, weights or tokenizer, asks here first: what is not there is
said in one way, and no library asks the hub again and again.
"""

import functools
import os
import re
from pathlib import Path

from jaxrl.config_error import fail

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
# What a model folder needs; subfolders and "consolidated" files repeat the weights in other forms.
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
HUB_IGNORED = ["*/*", "consolidated*"]
_POINTER = b"version https://git-lfs.github.com/"


def local_folder(folder: str | os.PathLike[str]) -> Path:
    """Return the folder itself, or the local copy of a hub model, fetched if it is not there yet.

    Raises:
        FileNotFoundError: neither a folder nor a model that the hub gives.
    """
    path = Path(folder)
    if path.is_dir():
        return path
    if not HUB_ID.fullmatch(str(folder)):
        raise FileNotFoundError(
            f"{path} is not a folder; give a local Hugging Face model folder or the id of a hub "
            "model, OWNER/NAME"
        )
    return _downloaded(str(folder))


def check_folder(field: str, folder: str | os.PathLike[str]) -> None:
    """Refuse the value of a config's field that is no model's folder, see `local_folder`.

    Raises:
        ConfigError: names the field.
    """
    try:
        local_folder(folder)
    except FileNotFoundError as error:
        fail(field, str(folder), str(error))


def unfetched(path: Path) -> str:
    """Say of a file that git has not fetched what it is, and the fix; "" of any other."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) != _POINTER:
            return ""
    return "is the pointer of Git LFS, not the file; run `git lfs install`, `git lfs pull` there"


@functools.cache
def _downloaded(hub_id: str) -> Path:
    import huggingface_hub  # a second, which a folder need not wait for
    from huggingface_hub.errors import HFValidationError

    try:
        snapshot = huggingface_hub.snapshot_download(
            hub_id, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED
        )
    except (OSError, HFValidationError) as error:  # the hub's errors are OSErrors
        cause = " ".join(str(error).split()).rstrip(".")
        raise FileNotFoundError(
            f"{hub_id!r} is neither a folder nor a model that the Hugging Face hub gives: {cause}. "
            "Correct the path or the id (how to get a folder that a recipe names, the recipe's "
            "header says); for a gated model log in with `hf auth login`; without a network run "
            f"`hf download {hub_id} --local-dir FOLDER` elsewhere and give FOLDER"
        ) from error
    return Path(snapshot)
