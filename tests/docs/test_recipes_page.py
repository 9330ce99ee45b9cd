import pytest

from docs.generate.recipes import read_header

pytestmark = pytest.mark.check
HEADER = '''r"""A title
on two lines.

    python -m jaxrl.train --config=x.py

Paper: one
    and two
Hardware: a CPU
Plan: none
Expected: 1
Source: measured here
"""
'''


def test_a_header_is_read(tmp_path):
    recipe = tmp_path / "x.py"
    recipe.write_text(HEADER)
    header = read_header(recipe)
    assert header.title == "A title on two lines."
    assert header.fields["Paper"] == "one and two"
    assert list(header.fields) == ["Paper", "Hardware", "Plan", "Expected", "Source"]
    assert "python -m jaxrl.train --config=x.py" in header.commands


def test_a_header_that_lacks_a_field_is_named(tmp_path):
    recipe = tmp_path / "x.py"
    recipe.write_text(HEADER.replace("Plan: none\n", ""))
    with pytest.raises(ValueError, match=r"x.py: the header has no line Plan"):
        read_header(recipe)
