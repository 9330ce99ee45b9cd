"""Name the folders of checkpoints, `global_step_<N>`, find them, and read what they say."""

from typing import Any

from etils import epath

from jaxrl.files import DamagedFile, unsealed

PREFIX = "global_step"


def checkpoint_steps(folder: epath.Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, in order."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    numbers = [n.removeprefix(f"{PREFIX}_") for n in names if n.startswith(f"{PREFIX}_")]
    return sorted(int(number) for number in numbers if number.isdigit())


def read_metadata(checkpoint: epath.Path) -> tuple[dict[str, Any], bool]:
    """Return the JSON of a checkpoint, and whether it has a checksum; see `files.unsealed`.

    Raises:
        OSError: it is not there, or cannot be read now.
        DamagedFile: it is not what was written.
    """
    try:
        return unsealed((checkpoint / "meta" / "metadata").read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedFile(f"meta/metadata: {error}") from error


def newest_config(folder: epath.Path) -> tuple[dict[str, Any], epath.Path] | None:
    """Return the config of the run that saved the newest checkpoint with whole JSON, and where.

    None where there is none.
    """
    for step in reversed(checkpoint_steps(folder)):
        path = folder / f"{PREFIX}_{step}"
        try:
            return dict(read_metadata(path)[0]["config"]), path
        except (OSError, ValueError, LookupError, TypeError):  # restoring it says what is wrong
            continue
    return None
