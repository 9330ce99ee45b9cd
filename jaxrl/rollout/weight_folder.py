"""Weights for engines in other processes: Hugging Face folders on a shared file system."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxrl.models.transformer import Params

Write = Callable[[Params, Path], None]  # makes a whole folder, or none


@dataclass(frozen=True)
class WeightFolder:
    """`root/version-N` for every version that an engine may still have to read.

    Attributes:
        root: on a file system that trainer and engines see under the same path.
        write: as `models.export.save_pretrained` does.
    """

    root: Path
    write: Write

    def publish(self, params: Params, version: int) -> Path:
        """Write a version; it has its name only once it is whole. One that is there is replaced."""
        folder = Path(os.path.abspath(self.root)) / f"version-{version}"
        self.write(params, folder)
        return folder

    def keep_only(self, folder: Path) -> None:
        """Delete the other versions; a file that cannot be deleted is left."""
        for other in Path(self.root).glob("version-*"):
            if other.name != folder.name:
                shutil.rmtree(other, ignore_errors=True)
