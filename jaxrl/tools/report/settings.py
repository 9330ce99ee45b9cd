"""Show the config of a run: the objective card, and what differs from the defaults."""

import json
from collections.abc import Mapping
from typing import Any

from jaxrl import config as cfg
from jaxrl.records.resume_identity import differences
from jaxrl.tools.report.run_files import RunFiles

CARD = "objective_card.txt"
SUPERVISED = "train/loss"  # a metric that only supervised runs have


def objective(run: RunFiles) -> str:
    """Return the objective card, as the run printed it; "" where it cannot be made."""
    if not run.settings:
        return ""
    if any(SUPERVISED in line for line in run.lines.values()):
        run.notes.append("no objective card: a supervised run has none in its folder")
        return ""
    return run.note_of("no objective card", lambda: _card(run), "")


def _card(run: RunFiles) -> str:
    if (path := run.folder / CARD).is_file():
        return path.read_text(encoding="utf-8").rstrip()
    # Of a run that did not write it. Its formulas are those of the losses, which need jax.
    machine = run.attempts[-1]["machine"] if run.attempts else {}
    return cfg.objective_card(cfg.to_train_config(run.settings), machine.get("devices") or 1)


def changed(run: RunFiles) -> list[tuple[str, str, str]]:
    """Return the fields that differ from the defaults: (dotted name, value, default), as JSON."""
    if not run.settings:
        return []
    usual = cfg.resolve(cfg.TrainConfig())
    default = cfg.get_config_as_dict(cfg.with_settled(usual, cfg.ON_CPU))
    found = run.note_of("config", lambda: differences(default, run.settings), {})
    return [(name, shown(value), shown(usual)) for name, (usual, value) in found.items()]


def fields(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return all fields by their dotted names, as JSON."""
    found: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            found |= fields(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = shown(value)
    return found


def shown(value: Any) -> str:
    """Return a value as JSON; dates and other things of YAML as text."""
    return json.dumps(value, default=str, ensure_ascii=False)
