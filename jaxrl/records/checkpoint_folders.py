"""Name the folders of checkpoints, `global_step_<N>`, and find those that are there."""

from etils import epath

PREFIX = "global_step"


def checkpoint_steps(folder: epath.Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, in order."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    numbers = [n.removeprefix(f"{PREFIX}_") for n in names if n.startswith(f"{PREFIX}_")]
    return sorted(int(number) for number in numbers if number.isdigit())
