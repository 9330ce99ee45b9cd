"""Numbers computed with SkyRL's own functions (commit a9564572e).

README.md there has the contracts.
"""

import json
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent


class Case(dict):
    """One golden case: its JSON entry, with the arrays under `i` (inputs) and `o` (outputs)."""

    @property
    def i(self) -> dict[str, np.ndarray]:
        return self["arrays"]["in"]

    @property
    def o(self) -> dict[str, np.ndarray]:
        return self["arrays"]["out"]


def cases(name: str) -> list[Case]:
    """All cases of `tests/golden/<name>.{json,npz}`."""
    arrays = np.load(FOLDER / f"{name}.npz")
    found = []
    for entry in json.loads((FOLDER / f"{name}.json").read_text())["cases"]:
        sides = {
            side: {key: arrays[f"{entry['id']}/{side}/{key}"] for key in entry[listed]}
            for side, listed in (("in", "inputs"), ("out", "outputs"))
        }
        found.append(Case(entry, arrays=sides))
    return found
