"""Write the files of a project, from the templates beside this file."""

import json
import keyword
from pathlib import Path

FILES = ("recipe.py", "rewards.py", "test_rewards.py", "pytest.ini", "README.md")
DATA = "prompts.jsonl"


def write_project(folder: Path) -> list[Path]:
    """Write a recipe, its reward, its data and a test into a new folder; return the files.

    Raises:
        ValueError: the folder is there already, or its name is none for a run and a module.
    """
    name = folder.resolve().name
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(
            f"{name!r} is no name for a project: letters, digits and _ as of a Python module, no "
            "word of the language, e.g. my_project"
        )
    if folder.exists():
        raise ValueError(f"{folder} is there already; choose another name, or delete it")
    folder.mkdir(parents=True)
    template = Path(__file__).parent / "template"
    for file in FILES:
        text = (template / file).read_text(encoding="utf-8")
        (folder / file).write_text(text.replace("my_project", name), encoding="utf-8")
    rows = ({"prompt": str(n), "answer": str(n)[::-1]} for n in range(10, 100))
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / DATA).write_text(text, encoding="utf-8")
    return [folder / file for file in (*FILES, DATA)]
