"""List the commands: every module whose docstring shows its command line."""

import ast
import sys
from pathlib import Path

_ROOT = Path(__file__).parent


def commands() -> dict[str, str]:
    """Map each module that is a command to its one line, without importing any."""
    found = {}
    for path in sorted(_ROOT.rglob("*.py")):
        module = ".".join(("jaxrl", *path.relative_to(_ROOT).with_suffix("").parts))
        text = path.read_text(encoding="utf-8")
        # The usage is a paragraph that is indented; elsewhere a command may be named in passing.
        usage = f"\n    python -m {module} "
        if usage not in text:
            continue
        docstring = ast.get_docstring(ast.parse(text)) or ""
        if usage in docstring:
            found[module] = " ".join(docstring.partition("\n\n")[0].split())
    return found


def main() -> int:
    """Print the list."""
    found = commands()
    width = max(map(len, found))
    print("Commands; each has --help:\n")
    for module, line in found.items():
        print(f"  python -m {module:{width}}  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
