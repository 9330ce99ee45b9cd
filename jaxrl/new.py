"""Write a folder to begin with: a recipe, a reward, data and a test.

    python -m jaxrl.new my_project

Then, in that folder, `jaxrl train recipe.py` shows a reward that rises within two minutes on a CPU:
a tiny model learns to write numbers backwards. Change rewards.py and prompts.jsonl next. README.md
in the folder says how; docs/environments.md has conversations of several turns.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl import cli
from jaxrl.tools.new.project import write_project


@cli.command(__doc__, bare=cli.REFUSED)
def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.new FOLDER`."""
    arguments = cli.Arguments()
    arguments.add_argument("folder", type=Path)
    folder = arguments.parse_args(argv).folder
    for path in write_project(folder):
        print(path)
    print(f"\ncd {folder}\njaxrl train recipe.py")
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
