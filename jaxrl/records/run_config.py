"""`config.yaml` of a run folder: what the run was asked to do, resolved, with its checksum."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from jaxrl.files import DamagedFile, replace_text, sealed_text, unsealed_text

CONFIG = "config.yaml"


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the config of a run, JSON, into its folder.

    Raises:
        FolderError: it could not be written.
    """
    replace_text(folder / CONFIG, sealed_text(yaml.safe_dump(dict(config), sort_keys=False)))


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config that a run wrote into its folder.

    Raises:
        OSError: it is not there, or cannot be read now.
        DamagedFile: it is not what the run wrote.
    """
    path = folder / CONFIG
    try:
        found = yaml.safe_load(unsealed_text(path.read_text(encoding="utf-8")))
    except (ValueError, yaml.YAMLError) as error:
        what = f"{type(error).__name__}: " if not isinstance(error, DamagedFile) else ""
        raise DamagedFile(f"{path} is damaged ({what}{' '.join(str(error).split())})") from error
    if not isinstance(found, dict):
        raise DamagedFile(f"{path} is damaged (it is no config)")
    return found
