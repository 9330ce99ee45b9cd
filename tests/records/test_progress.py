"""The bar of a run, on a terminal and in a notebook."""

import io
import sys

import pytest

from jaxrl.records.progress import progress_bar


class OutStream(io.StringIO):
    """As ipykernel's stdout."""

    __module__ = "ipykernel.iostream"


@pytest.mark.parametrize("notebook", [False, True])
def test_the_bar_is_where_the_messages_are_in_a_notebook(notebook, monkeypatch):
    out, err = OutStream() if notebook else io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with progress_bar("run", 10, 4) as bar:
        bar.update()
    used, other = (out, err) if notebook else (err, out)
    assert "run:  50%" in used.getvalue() and "5/10" in used.getvalue()
    assert other.getvalue() == ""


def test_a_hidden_bar_writes_nothing(capsys):
    with progress_bar("run", 2, 0, shown=False) as bar:
        bar.update()
    assert capsys.readouterr() == ("", "")
