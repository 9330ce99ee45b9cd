"""The panel on a pseudo-terminal: a process of its own, which gets keys and an interrupt."""

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

PROGRAM = """
import logging, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it for jobs behind
logging.basicConfig()  # as absl does on import
from jaxrl import activity
from jaxrl.records.display import display_of

display = display_of("sums", "auto")
display.course.begin(0, 4)
try:
    with display, activity.doing("rollouts", 512):
        for step in (1, 2):
            display.stepped(step, {"reward/avg_raw_reward": step / 4, "timing/step": 1.0})
            display.sample(f"2+2={step}")
        print("something printed")
        activity.warn("something wrong")
        logging.getLogger("jaxrl.rollout").warning("judge %d failed", 3)
        display.alarm("ALARM a at step 2: 3 is above 1. Try: b")
        print("ready", flush=True)
        while True:
            time.sleep(0.1)  # a signal that comes just before a long sleep waits for its end
except KeyboardInterrupt:
    print("goodbye", flush=True)
    sys.stdin.readline()  # what a session's leader wrote may be lost when it ends
"""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def terminal():
    """Start a program on a terminal of some size; `until(text)` returns what it wrote so far."""
    started = []

    def start(columns, rows, **variables):
        parent, child = os.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        process = subprocess.Popen(
            ["setsid", "--ctty", sys.executable, "-c", PROGRAM],
            stdin=child,
            stdout=child,
            stderr=child,
            env={**kept, "TERM": "xterm-256color", **variables},
        )
        os.close(child)
        started.append((process, parent))
        written = bytearray()

        def until(text, seconds=60.0):
            end = time.monotonic() + seconds
            while text.encode() not in written and time.monotonic() < end:
                if select.select([parent], [], [], 0.2)[0]:
                    try:
                        written.extend(os.read(parent, 65536))
                    except OSError:  # it has ended
                        break
            return written.decode(errors="ignore")  # the last character may be on its way

        return process, parent, until

    yield start
    for process, parent in started:
        process.kill()
        process.wait()
        os.close(parent)


def last_panel(text):
    text = text.replace("\x1b[2K", "\n")  # a line that is erased, and written anew
    lines = ESCAPES.sub("", text).replace("\r", "").split("\n")
    (start,) = [i for i, line in enumerate(lines) if line.startswith("╭─ sums")][-1:]
    (end,) = [i for i, line in enumerate(lines[start:], start) if line.startswith("╰")][:1]
    return lines[start : end + 1]


def test_80_by_24_with_a_key_and_an_interrupt(terminal):
    process, parent, until = terminal(80, 24)
    until("ready")
    before = termios.tcgetattr(parent)
    assert not before[3] & termios.ECHO  # keys are no text
    os.write(parent, b"s")
    assert "2+2=2" in until("2+2=2")
    process.send_signal(signal.SIGINT)
    text = until("goodbye")
    os.write(parent, b"\n")
    assert process.wait(60) == 0
    for said in ("something printed", "warning: something wrong", "Try: b"):
        assert said in text
    lines = ESCAPES.sub("", text.replace("\x1b[2K", "\n")).replace("\r", "").split("\n")
    assert "warning: judge 3 failed" in lines
    assert "WARNING:" not in text  # which a handler writes past the display, into the panel
    panel = last_panel(text)
    assert {len(line) for line in panel} == {80}
    assert len(panel) == 6
    assert "ALARM a at step 2: 3 is above 1 " in panel[3]
    assert re.match(r"│ interrupted after \d:\d\d, at step 2 of 4 ", panel[4])
    assert text.rstrip().endswith("goodbye")  # below the panel, which stays


def test_sigterm_leaves_a_terminal_that_can_be_used(terminal):
    process, parent, until = terminal(80, 24)
    until("ready")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    text = until("\x1b[?25h")
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")  # the cursor is there again
    assert termios.tcgetattr(parent)[3] & termios.ECHO


def test_a_terminal_that_does_not_know_its_width(terminal):
    process, _, until = terminal(0, 0)
    until("ready")
    process.send_signal(signal.SIGINT)
    assert {len(line) for line in last_panel(until("goodbye"))} == {80}


def test_no_color(terminal):
    process, _, until = terminal(80, 24, NO_COLOR="1")
    until("ready")
    process.send_signal(signal.SIGINT)
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", until("goodbye"))
