"""Run the sections of a proof one after another, each in a process of its own.

No JAX here: one process at a time can use a TPU, and that is the section's.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxrl import __version__, cli
from jaxrl.files import replace_text, writable_folder
from jaxrl.tools.prove import page
from jaxrl.tools.prove.section import Machine, Result, read_result
from jaxrl.tools.prove.shareable import shareable
from jaxrl.tools.prove.work import WORK

_HERE = "jaxrl.tools.prove"
SECTIONS = {  # name -> its function; in this order
    "machine": f"{_HERE}.machine:look",
    "doctor": f"{_HERE}.checks:doctor",
    "kernels": f"{_HERE}.kernels:kernels",
    "update": f"{_HERE}.training:update",
    "memory": f"{_HERE}.training:memory",
    "decode": f"{_HERE}.sampling:decode",
    "sync": f"{_HERE}.sampling:sync",
    "quickstart": f"{_HERE}.runs:quickstart",
    "resume": f"{_HERE}.runs:resume",
}
JSON, PAGE = "proof.json", "proof.html"
SECONDS = 3600  # after which a section hangs, and is ended
FORMAT = 1  # of the JSON


def prove(
    out: Path,
    mode: str,
    again: Sequence[str] = (),
    tell: Callable[[str], None] = print,
) -> bool:
    """Run the sections that are not done yet; keep the JSON and the page up to date.

    When the budget of the mode is spent, what is not done is left out. The next call, which has a
    whole budget again, goes on with it.

    Args:
        out: folder of the results, and of what the sections print.
        mode: "whole", "quick" or "small"; CPUs make "small" of the others.
        again: sections that are done anew.
        tell: gets a line for each section.

    Returns:
        Whether none failed.

    Raises:
        ValueError: the folder cannot be written, there is no such section, or JAX has no device.
    """
    if unknown := [name for name in again if name not in SECTIONS]:
        raise ValueError(
            f"--again={unknown[0]}: there is no such section; there are {', '.join(SECTIONS)}"
        )
    writable_folder("--out", out)
    for name in again:
        (out / f"{name}.json").unlink(missing_ok=True)
    # The machine is looked at each time: results of another one are not taken for its own.
    found = {"machine": _run(out, "machine", mode)}
    if found["machine"].passed is False:
        raise ValueError(f"JAX has no device that works: {found['machine'].reason}")
    tell(line("machine", found["machine"]))
    machine = Machine.of(out)
    mode = "small" if machine.platform == "cpu" else mode
    budget = WORK[mode].budget
    end = time.monotonic() + (math.inf if budget is None else budget)
    for name in SECTIONS:
        if name not in found:
            kept = read_result(out, name, mode, machine)
            found[name] = kept or _run(out, name, mode, end - time.monotonic())
            tell(line(name, found[name]) + (", done before" if kept else ""))
        proof = as_json(mode, found)
        replace_text(out / JSON, json.dumps(proof, indent=1) + "\n")
        replace_text(out / PAGE, page.html(proof, waiting=[x for x in SECTIONS if x not in found]))
    return all(result.passed is not False for result in found.values())


def line(name: str, result: Result) -> str:
    """Return what the terminal shows of a section."""
    said = "; ".join(x for x in (result.figure, result.reason) if x)
    return f"{name:11}{result.verdict:8}{result.seconds:6.0f} s  {said}"


def as_json(mode: str, found: Mapping[str, Result]) -> dict[str, Any]:
    """Return the proof as it may be sent."""
    sections = {name: {"verdict": x.verdict} | asdict(x) for name, x in found.items()}
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    about = {"format": FORMAT, "jaxrl": __version__, "mode": mode, "made": made}
    return shareable(about | {"sections": sections})


def _run(out: Path, name: str, mode: str, left: float = math.inf) -> Result:
    """Run a section to its end; what it prints goes to `name`.log.

    Args:
        left: seconds of the mode's budget; when they are over the section is left out.

    Raises:
        ValueError: what the user must mend, as the section says.
    """
    wrote, log, started = out / f"{name}.json", out / f"{name}.log", time.monotonic()
    wrote.unlink(missing_ok=True)
    if left <= 0:
        return _left_out(mode)
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", f"{_HERE}.child", name, SECTIONS[name], mode, str(out)],
            stdin=subprocess.PIPE,  # closed when this process has gone: then that one ends, too
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(min(SECONDS, left))
        except subprocess.TimeoutExpired:
            status = None
        finally:  # Ctrl-C too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    seconds = time.monotonic() - started
    if status is None and left < SECONDS:
        wrote.unlink(missing_ok=True)  # it may have been about to end
        return _left_out(mode, seconds)
    said = ([""] + log.read_text(encoding="utf-8", errors="replace").strip().splitlines())[-1]
    if status == cli.REFUSED:
        raise ValueError(said.removeprefix("error: "))
    if status == cli.DONE:
        content = json.loads(wrote.read_text(encoding="utf-8"))
        return Result(**content["result"])
    how = f"did not end within {SECONDS} s" if status is None else f"ended with status {status}"
    if status == -signal.SIGKILL:
        how += " (killed: by the system, where memory ran out)"
    return Result(False, reason=f"{how}; {log.name}: {said}", seconds=seconds)


def _left_out(mode: str, seconds: float = 0.0) -> Result:
    """Return the result of a section for which no time was left, or too little."""
    budget = WORK[mode].budget
    assert budget is not None
    why = f"the {budget / 60:.0f} minutes of --{mode} were over"
    if seconds:
        why = f"was ended before it was done, as {why}"
    reason = f"{why}; the same command goes on with it"
    return Result(None, reason=reason, seconds=seconds, left_out=True)
