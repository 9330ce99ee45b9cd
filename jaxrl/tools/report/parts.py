"""Make the parts of a page by their names: a file holds them all, a live page fetches them.

    manifest       {"runs": [all that is small: see `about`]}
    m<run>         the curves, a blob of `series`
    c<run>         {"card": the objective card, "changed": the fields that differ from defaults};
                   what a run of an earlier version did not write takes a second to make
    p<run>         {step: [uid of each prompt in the page]}; a live page knows all steps
    v<run>-<from>  a blob of what the tokens with the numbers `from` on say
    t<run>-<step>  {"of": prompts of the step, "groups": [blob]}; what does not fit is left out

Runs are numbered from 0. All but the blobs is JSON.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.records.alarms import REWARD
from jaxrl.tools.report.blob import finite, inert_json, pack
from jaxrl.tools.report.run_files import METRICS, RunFiles
from jaxrl.tools.report.series import alarms
from jaxrl.tools.report.settings import changed, fields, objective
from jaxrl.tools.report.vocabulary import Vocabulary


def about(run: RunFiles) -> dict[str, Any]:
    """Return what the page says of a run beside its curves and trajectories."""
    path = run.folder / METRICS
    rewards = [line[REWARD] for line in run.lines.values() if REWARD in line][-10:]
    walls = [line["timing/wall"] for line in run.lines.values() if "timing/wall" in line]
    said = {
        "name": run.name,
        "folder": str(run.folder.resolve()),
        "last_step": run.last_step,
        "total_steps": run.total_steps,
        "recent_reward": finite(sum(rewards) / len(rewards)) if rewards else None,
        "seconds": finite(sum(walls)) if walls else None,
        "written": path.stat().st_mtime if path.is_file() else None,
        "has_ledger": run.has_ledger,
        "attempts": run.attempts,
        "ends": run.ends,
        "stops": run.stops,
        "alarms": alarms(run),
        "fields": fields(run.settings),
        "recorded": list(run.rollouts),
        "left_out": None,
    }
    return said | {"notes": run.all_notes()}  # of what failed above, too


def config(run: RunFiles) -> str:
    """Return what the config of a run means; `run.notes` say what of it cannot be made."""
    return inert_json({"card": objective(run), "changed": changed(run)})


def manifest(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the part that is read first, of what `about` said of each run."""
    return inert_json({"runs": runs})


def vocabulary(words: Vocabulary, start: int) -> str:
    """Return what the tokens from number `start` on say; later ones may come."""
    special = [number for number in words.special if number >= start]
    header = {"entries": words.entries[start:], "ids": words.ids[start:], "special": special}
    return pack(header | {"known": words.tokenizer is not None}, {})


def trajectories(blobs: Sequence[str], of: int) -> str:
    """Return the groups of a step that are in the page, and how many the step has."""
    return inert_json({"of": of, "groups": blobs})
