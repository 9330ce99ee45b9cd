"""The tables of docs/baselines.md are what the recorded runs give."""

import re

import pytest

from benchmarks.baselines import PAGE, numbers, recorded, with_table
from jaxrl.tools.sweep.summary import table

pytestmark = pytest.mark.check
TASKS = [x for x in re.findall(r"^<!-- (\w+) -->$", PAGE.read_text(), re.MULTILINE) if x != "end"]


def test_the_page_has_tables():
    assert TASKS


def test_a_table_stands_between_its_marks_and_nothing_else_changes():
    page = "# A\n<!-- a -->\n<!-- end -->\n# B\n<!-- b -->\n| old |\n<!-- end -->\n"
    page = with_table(with_table(page, "a", "| x |"), "b", "| y |")
    assert page == "# A\n<!-- a -->\n| x |\n<!-- end -->\n# B\n<!-- b -->\n| y |\n<!-- end -->\n"
    with pytest.raises(ValueError, match="has no line '<!-- c -->'"):
        with_table(page, "c", "| z |")


@pytest.mark.parametrize("task", TASKS)
def test_a_table_is_that_of_its_runs(task):
    page = PAGE.read_text()
    assert with_table(page, task, table(recorded(task))) == page
    assert numbers(task).with_suffix(".png").exists()
