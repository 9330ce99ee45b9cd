"""A process of a job, and what it leaves behind: nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl.cluster.child import Child, Start
from jaxrl.cluster.host import Facts, Host, Report, check_versions, versions

ROOT = Path(__file__).parents[2]
# starts a process in a session of its own, which the group of the first does not reach
FAMILY = """
import subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"],
                         start_new_session=True)
print(other.pid, flush=True)
{}
"""


def started(tmp_path, code, **changes):
    start = Start(0, ["-c", code], {}, tmp_path / "logs" / "process_0.log")
    return Child(start._replace(**changes))


def ended(child):
    """Status and output, once it has ended by itself."""
    text = ""
    while child.status() is None:
        text += child.output()
        time.sleep(0.01)
    text += child.output()
    child.stop()
    return child.status(), text


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def wait_until_dead(*pids, seconds=20):
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def first_line(child):
    text = ""
    while "\n" not in text:
        text += child.output()
        time.sleep(0.01)
    return text.splitlines()[0]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("print('ü')", 0),
        ("raise SystemExit(70)", 70),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),  # 128 + 9
    ],
)
def test_status_and_output_are_those_of_the_command(tmp_path, code, status):
    found, text = ended(started(tmp_path, code, heading="--- first"))
    assert found == status
    assert text == ("ü\n" if status == 0 else "")
    assert (tmp_path / "logs" / "process_0.log").read_text() == f"--- first\n{text}"


def test_it_has_the_environment_the_input_and_the_folder_that_it_was_given(tmp_path, monkeypatch):
    monkeypatch.setenv("LEFT_OUT", "a")
    monkeypatch.setenv("CHANGED", "a")
    code = """
import os, sys
print(os.environ.get("LEFT_OUT"), os.environ["CHANGED"], len(sys.stdin.buffer.read()), os.getcwd())
"""
    given = {"environment": {"LEFT_OUT": None, "CHANGED": "b"}, "stdin": b"x" * 200_000}
    _, text = ended(started(tmp_path, code, **given, folder=str(tmp_path)))
    assert text.split() == ["None", "b", "200000", str(tmp_path)]  # more than a pipe holds


def test_a_signal_is_passed_on(tmp_path):
    code = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("ready", flush=True)
time.sleep(100)
"""
    child = started(tmp_path, code)
    assert first_line(child) == "ready"
    child.signal(signal.SIGTERM)
    assert ended(child)[0] == 5


def test_stopped_it_takes_all_that_it_started_along(tmp_path):
    child = started(tmp_path, FAMILY.format("time.sleep(100)"))
    other = int(first_line(child))
    assert is_alive(other)
    child.stop()
    wait_until_dead(other)


def test_what_it_left_behind_ends_with_it(tmp_path):
    _, text = ended(started(tmp_path, FAMILY.format("")))
    wait_until_dead(int(text))


def test_it_ends_with_a_launcher_that_is_killed(tmp_path):
    launcher = f"""
import sys, time
from pathlib import Path
from jaxrl.cluster.child import Child, Start
child = Child(Start(0, ["-c", {FAMILY.format("time.sleep(100)")!r}], {{}}, Path("log")))
while not (text := child.output()).endswith("\\n"):
    time.sleep(0.01)
print(child._process.pid, text, flush=True)
time.sleep(100)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", launcher],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    guard, other = map(int, process.stdout.readline().split())
    assert is_alive(guard) and is_alive(other)
    process.kill()
    process.communicate()
    wait_until_dead(guard, other)


def test_a_log_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "logs").write_text("")
    with pytest.raises(ValueError, match=r"trainer.log_path: cannot write .*/process_0.log on"):
        started(tmp_path, "")


def test_the_processes_of_a_host_divide_its_devices(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    code = "import os; print(os.environ['XLA_FLAGS'], os.environ['CUDA_VISIBLE_DEVICES'])"
    host = Host()
    host.start([Start(i, ["-c", code], {}, tmp_path / str(i)) for i in range(2)])
    texts, open_ones = {0: "", 1: ""}, {0, 1}
    while open_ones:
        for index, text, status in host.poll(1.0):
            texts[index] += text
            open_ones -= {index} if status is not None else set()
    flags = "--xla_a=1 --xla_force_host_platform_device_count=4"  # 8 of 2 processes
    assert texts == {0: f"{flags} 4,5\n", 1: f"{flags} 6,7\n"}
    assert host.poll(0.0) == []


def test_a_report_of_an_end_has_all_that_was_printed(tmp_path):
    """Nobody asks again; what is read at once is a quarter of a million bytes."""
    host = Host()
    host.start([Start(0, ["-c", "print('x' * 1_000_000)"], {}, tmp_path / "0")])
    while host._children[0].status() is None:
        time.sleep(0.01)
    (report,) = host.poll(0.0)
    assert (len(report.text), report.status) == (1_000_001, 0)


def test_what_is_printed_just_before_the_end_is_reported_with_it():
    class Ending:
        """Says its last words between two questions."""

        index, words = 0, ""

        def status(self):
            self.words = "error: no reward"
            return 2

        def output(self):
            said, self.words = self.words, ""
            return said

        def stop(self):
            pass

    host = Host()
    host._children.append(Ending())
    assert host.poll(0.0) == [Report(0, "error: no reward", 2)]


def test_hosts_of_other_versions_are_named():
    found = versions()
    assert {"python", "jax", "jaxlib", "numpy", "jaxrl"} <= set(found)
    hosts = [Facts("a", "10.0.0.1", found, 0), Facts("b", "10.0.0.2", {**found, "jax": "0.1"}, 0)]
    check_versions(hosts[:1] * 2)
    expected = rf"b \(10.0.0.2\) has jax 0.1, a \(10.0.0.1\) has jax {found['jax']}: install the"
    with pytest.raises(ValueError, match=expected):
        check_versions(hosts)
