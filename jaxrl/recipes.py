"""List the recipes that have a name: those of ./configs, and those that came with jaxrl.

    python -m jaxrl.recipes [WORD]

With a WORD only those whose name or purpose has it: `jaxrl recipes lora`. A name stands for its
file in every command that takes a config: `jaxrl train quickstart`. docs/recipes.md has a table.
"""

import ast
import symtable
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl import cli
from jaxrl.config.recipe import recipe_files


def purpose(recipe: Path) -> str | None:
    """Return the first sentence of the docstring of a recipe, in one line; "" without one.

    None of a file that is no recipe: it has no `get_config`. Nothing in it is run.
    """
    try:
        text = recipe.read_text(encoding="utf-8")
        module, names = ast.parse(text), symtable.symtable(text, recipe.name, "exec")
    except (SyntaxError, ValueError, OSError) as error:  # of a recipe that is being written
        return f"cannot be read: {error}"
    if "get_config" not in names.get_identifiers():
        return None
    docstring = ast.get_docstring(module) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


@cli.command(__doc__, bare=None)
def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.recipes [WORD]`; the list needs no argument."""
    words = list(argv)
    found = {name: purpose(path) for name, path in sorted(recipe_files().items())}
    shown = {
        name: what
        for name, what in found.items()
        if what is not None and all(word.lower() in f"{name} {what}".lower() for word in words)
    }
    if not shown:
        raise ValueError(f"no recipe has {' and '.join(words)} in its name or purpose")
    width = max(map(len, shown)) + 2
    for name, what in shown.items():
        room = 100 - width if sys.stdout.isatty() else len(what)  # a pipe or a file has no width
        print(f"{name:{width}}{what if len(what) <= room else what[: room - 3] + '...'}")
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
