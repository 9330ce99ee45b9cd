"""Which display a run gets."""

import os
import sys

from jaxrl.records.display.course import Course
from jaxrl.records.display.plain import Display, Plain, is_terminal


def display_of(name: str, chosen: str, *, shown: bool = True) -> Display:
    """Return the display of a run: a context while it goes on.

    Args:
        name: of the run.
        chosen: `trainer.watching.display`. "auto": a plot in a notebook, a panel on a terminal,
            else lines.
        shown: False: as "quiet"; for processes beside the first.
    """
    course = Course(name)
    if not shown or chosen == "quiet":
        return Display(course)
    if chosen == "auto":
        chosen = _found()
    if chosen == "notebook":
        from jaxrl.records.display.notebook import Notebook  # IPython: of a notebook alone

        return Notebook(course)
    if chosen == "panel":
        from jaxrl.records.display.panel import Panel  # rich: of a terminal alone

        return Panel(course)
    return Plain(course)


def _found() -> str:
    """Return which display fits what stdout is."""
    if type(sys.stdout).__module__.startswith("ipykernel."):
        return "notebook"
    terminal = is_terminal(sys.stdout) and os.environ.get("TERM") not in (
        None,
        "",
        "dumb",
        "unknown",
    )
    return "panel" if terminal else "plain"
