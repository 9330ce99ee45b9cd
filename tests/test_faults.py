"""Faults of one line: which are drawn, and what stands where they are planted."""

import ast

import pytest

from tests.faults.known import known_faults
from tests.faults.places import ROOT, Fault, draw, faults_of, room

pytestmark = pytest.mark.check


def test_a_seed_draws_the_same_faults_of_all_rooms():
    faults = draw(7, 30)
    assert faults == draw(7, 30) != draw(8, 30)
    assert len(set(faults)) == 30
    rooms = {path.name for path in (ROOT / "jaxrl").iterdir() if any(path.glob("*.py"))}
    assert {room(fault.path) for fault in faults} == rooms | {"."}
    assert {fault.path for fault in draw(0, 3, ("data/packing.py",))} == {"jaxrl/data/packing.py"}


def test_a_fault_changes_one_line_and_what_it_changes_can_still_be_read():
    faults = draw(3, 60) + [fault for fault, _ in known_faults()]
    for fault in faults:
        before = (ROOT / fault.path).read_text()
        after = fault.planted(before)
        ast.parse(after)
        lines = zip(before.splitlines(), after.splitlines(), strict=True)
        assert [n for n, (x, y) in enumerate(lines, 1) if x != y] == [fault.line], fault


def test_what_only_words_are_made_of_is_no_fault(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.faults.places.ROOT", tmp_path)
    (tmp_path / "one.py").write_text(
        "LIMIT = 3\n"
        "def cut(x: int = 1) -> int:\n"
        "    '''Return 2 at most.'''\n"
        "    if x < 2 and not LIMIT:\n"
        "        raise ValueError(f'{x + 1} is more than {LIMIT - 1}')\n"
        "    return x + 1\n"
    )
    found = {(fault.line, fault.before, fault.after) for fault in faults_of("one.py")}
    assert found == {
        (4, "x < 2 and not LIMIT", "(x < 2) or (not LIMIT)"),
        (4, "x < 2", "x <= 2"),
        (4, "2", "3"),
        (4, "not LIMIT", "bool(LIMIT)"),
        (6, "x + 1", "(x) - (1)"),
        (6, "1", "2"),
    }


def test_a_fault_that_has_moved_is_refused():
    fault = Fault("jaxrl/losses/m2po.py", 1, 0, 3, "???", "!!!")
    with pytest.raises(AssertionError):
        fault.planted("abc\n")
