"""Generate docs/recipes.md from the headers of the recipes."""

import ast
import re
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).parents[2]
RECIPES = _ROOT / "configs"
PAGE = _ROOT / "docs" / "recipes.md"
FIELDS = ("Paper", "Hardware", "Plan", "Expected", "Source")

_INTRODUCTION = """# Recipes

<!-- Written by `python -m docs.generate`; edit the headers in configs/. -->

After this page you can start from a setup that is known, with its paper, its hardware and its
expected result.

A recipe is a file in `configs/` that returns the config of a run. Its header has the commands in
the order in which you run them (first the data, `python -m jaxrl.data.prepare`, then the training),
and names the paper. You can set every field on the command line (`--config.trainer.seed=1`), and
your own file can start from one of these:

```python
from jaxrl.config import load_config_file


def get_config():
    config = load_config_file("configs/gsm8k_qwen2_5_1_5b_grpo.py")
    config.trainer.run_name = "mine"
    config.trainer.algorithm.policy_loss_type = "dual_clip"
    return config
```

**Source** says where the expected result comes from. *Measured here*: runs of this repository, in
LOG.md. *Literature*: somebody else's run with these settings or nearly these; nobody has run the
recipe at its full size with jaxrl. *Not measured*: no figure was found. Tests run a tiny version of
every recipe (`tests/configs`): the same algorithm, environment, turns, adapters, critic, teacher
and schedule, with a model of the same family, of two layers and random weights, for two steps on a
CPU.

**Plan** is the largest need of a device and what it has, by [`jaxrl.plan`](plan.md): *compiled* by
the TPU's own compiler, *estimated* for GPUs. It needs only a folder with the `config.json` of the
model, so nothing has to be downloaded for it:

<!-- not run: writes a vocabulary of 151,936 tokens -->
```bash
python -m benchmarks.shapes qwen2.5-1.5b models/qwen2.5-1.5b
python -m jaxrl.plan --topology=h100:4 \\
    --config=configs/gsm8k_qwen2_5_1_5b_grpo.py \\
    --config.trainer.policy.model.path=models/qwen2.5-1.5b
```

"""
_TABLE = """
## {title}

| recipe | what | hardware | plan | expected | source |
|---|---|---|---|---|---|
{rows}"""
_FIRST = "quickstart.py"


class Header(NamedTuple):
    """Hold what the docstring of a recipe says.

    Attributes:
        title: its first paragraph.
        commands: its indented lines.
        fields: those of `FIELDS`, each on one line.
    """

    title: str
    commands: list[str]
    fields: dict[str, str]


def read_header(recipe: Path) -> Header:
    """Return the header of a recipe.

    Raises:
        ValueError: it has none, or lacks a field.
    """
    text = ast.get_docstring(ast.parse(recipe.read_text()), clean=True) or ""
    title = " ".join(text.partition("\n\n")[0].split())
    commands = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    names = "|".join(FIELDS)
    found = re.findall(rf"^({names}): (.*(?:\n    .*)*)", text, re.MULTILINE)
    fields = {name: " ".join(value.split()) for name, value in found}
    if missing := [name for name in FIELDS if name not in fields]:
        raise ValueError(f"{recipe}: the header has no line {', '.join(missing)}")
    return Header(title, commands, fields)


def page() -> str:
    """Return the text of docs/recipes.md."""
    recipes = sorted(RECIPES.glob("*.py"), key=lambda path: (path.name != _FIRST, path.name))
    rows: dict[bool, list[str]] = {True: [], False: []}
    for recipe in recipes:
        header = read_header(recipe)
        rows[header.fields["Hardware"].startswith("a CPU")].append(_row(recipe.name, header))
    tables = (
        _TABLE.format(title=title, rows="".join(rows[on_cpu]))
        for title, on_cpu in (("On a CPU", True), ("On accelerators", False))
    )
    return _INTRODUCTION.rstrip("\n") + "\n" + "".join(tables)


def _row(name: str, header: Header) -> str:
    cited = r"arXiv:(\d{4}\.\d{5})"
    paper, title = header.fields["Paper"], header.title
    if re.search(cited, paper) and not re.search(cited, title):
        title += f" Paper: {paper}."
    linked = re.sub(cited, r"[arXiv:\1](https://arxiv.org/abs/\1)", title)
    cells = [f"`{name}`", linked, *(header.fields[field] for field in FIELDS[1:])]
    return f"| {' | '.join(cells)} |\n"
