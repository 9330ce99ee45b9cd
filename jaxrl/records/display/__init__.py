"""What a run shows while it goes on: a panel on a terminal, lines in a log, a plot in a notebook.

All of them show the same `Course`, and what `jaxrl.activity` knows is going on.
"""

from jaxrl.records.display.choose import display_of
from jaxrl.records.display.course import Course
from jaxrl.records.display.plain import Display

__all__ = ["Course", "Display", "display_of"]
