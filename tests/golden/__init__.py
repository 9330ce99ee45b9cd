"""Numbers computed with SkyRL's own functions (commit a9564572e).

README.md there has the contracts; `python -m tests.golden [FOLDER]` checks a folder of that form.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent


class Case(dict[str, Any]):
    """One golden case: its JSON entry, with the arrays under `i` (inputs) and `o` (outputs)."""

    @property
    def i(self) -> dict[str, np.ndarray]:
        return self["arrays"]["in"]

    @property
    def o(self) -> dict[str, np.ndarray]:
        return self["arrays"]["out"]


def cases(name: str, folder: Path = FOLDER) -> list[Case]:
    """All cases of `<folder>/<name>.json` and, where there is one, of its `.npz`."""
    entries = json.loads((folder / f"{name}.json").read_text())
    if name.startswith("config_defaults_"):  # {key: default}: every key is a case
        return [Case(id=key, default=value) for key, value in entries.items()]
    if name == "python_utils":  # {function: [case]}
        return [
            Case(case, id=f"{function}.{number}", function=function)
            for function, listed in entries["cases"].items()
            for number, case in enumerate([listed] if isinstance(listed, dict) else listed)
        ]
    with np.load(folder / f"{name}.npz") as stored:
        arrays = dict(stored)
    found = []
    for entry in entries["cases"]:
        sides = {
            side: {key: arrays[f"{entry['id']}/{side}/{key}"] for key in entry[listed]}
            for side, listed in (("in", "inputs"), ("out", "outputs"))
        }
        found.append(Case(entry, arrays=sides))
    return found
