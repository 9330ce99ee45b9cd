"""Attempts at a job whose processes are small programs."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl.cluster import supervise as supervising
from jaxrl.cluster.child import Start
from jaxrl.cluster.host import Host, Report
from jaxrl.cluster.supervise import Console, HostLost, Restarts, newest_step, supervise
from jaxrl.parallel.watchdog import SIGN
from jaxrl.records.checkpoint_folders import PREFIX
from tests.cluster.test_child import wait_until_dead

ROOT = Path(__file__).parents[2]
# of process INDEX in attempt ATTEMPT: what the test says, else to wait for the others' end
PROGRAM = """
import os, signal, sys, time
step = lambda n: os.makedirs(f"checkpoints/global_step_{n}")
attempt, index = int(sys.argv[1]), int(sys.argv[2])
%s
"""


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(supervising, "POLL_SECONDS", 0.1)


def printed(text):
    """Without what Ray says of others, where the tests of this process started one."""
    return [line for line in text.splitlines() if "(pid=" not in line]


class Job:
    """Two processes; what they do is given by code."""

    def __init__(self, folder, code, **settings):
        self.folder, self.code, self.modes, self.hosts = folder, PROGRAM % code, [], []
        self.checkpoints = folder / "checkpoints"
        given = {"most": 2, "backoff_seconds": 0.01, "resume_mode": "latest", **settings}
        self.restarts = Restarts(newest=lambda: newest_step(str(self.checkpoints)), **given)

    def start(self, mode):
        host = Host()
        self.modes.append(mode)
        self.hosts.append(host)
        host.start(
            [
                Start(
                    index,
                    ["-c", self.code, str(len(self.modes)), str(index)],
                    {},
                    self.folder / f"{index}.log",
                    folder=str(self.folder),
                )
                for index in range(2)
            ]
        )
        return host, {0: "", 1: "[process 1 b]"}

    def run(self):
        return supervise(self.start, self.restarts)


def test_a_job_that_ends_well_is_started_once(tmp_path, capfd):
    job = Job(tmp_path, "print('process', index, 'of attempt', attempt)")
    assert job.run() == 0
    assert job.modes == ["latest"]
    out, err = capfd.readouterr()
    lines = ["[process 1 b] process 1 of attempt 1", "process 0 of attempt 1"]
    assert sorted(printed(out)) == lines
    assert printed(err) == []


def test_a_dead_process_ends_the_others_and_all_start_again(tmp_path, capfd):
    """Process 1 is killed in the first attempt, while process 0 would go on for long."""
    code = """
print(os.getpid(), file=open(f"pid_{attempt}_{index}", "w"), flush=True)
if attempt == 1:
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)
"""
    job = Job(tmp_path, code)
    assert job.run() == 0
    assert job.modes == ["latest", "latest"]
    if (tmp_path / "pid_1_0").exists():
        wait_until_dead(int((tmp_path / "pid_1_0").read_text()))
    assert (
        "launch: process 1 was killed by signal 9; restart 1 of 2 in a row, from the beginning, "
        "in 0.01 s"
    ) in capfd.readouterr().err


@pytest.mark.parametrize(("status", "what"), [(2, "process 1 ended with status 2"), (1, "1")])
def test_what_the_user_must_mend_and_an_alarm_are_final(tmp_path, capfd, status, what):
    """It decides, though process 0 crashed before: it lost its partner."""
    code = f"""
if index == 0:
    while not os.path.exists("fault"):
        time.sleep(0.01)
    sys.exit(70)
open("fault", "w").close()
time.sleep(0.03)
print("error: the reward is not a number", file=sys.stderr)
sys.exit({status})
"""
    job = Job(tmp_path, code)
    assert job.run() == status
    assert len(job.modes) == 1
    out, err = capfd.readouterr()
    assert printed(out) == ["[process 1 b] error: the reward is not a number"]
    assert what in err


def test_a_checkpoint_lets_restarts_count_anew_once():
    """Of four failures in a row the second finds a new checkpoint, the same as those after it."""
    steps = iter([0, 0, 5, 5, 5])  # the first before the job
    restarts = Restarts(2, 10.0, lambda: next(steps), "latest")
    assert [restarts.next() for _ in range(4)] == [10, 10, 20, None]


def test_it_gives_up_after_restarts_in_a_row_without_a_checkpoint(tmp_path, capfd, monkeypatch):
    """Attempts 1 and 2 fail, 3 saves and fails: two more restarts from there, then the end."""
    waits = []
    monkeypatch.setattr(supervising.time, "sleep", waits.append)
    code = """
time.sleep(0.1 * index)
step(attempt) if attempt == 3 and index == 0 else None
sys.exit(70)
"""
    job = Job(tmp_path, code, backoff_seconds=10.0)
    assert job.run() == 70
    assert len(job.modes) == 5  # 1; restarts 1, 2; 3 saved, hence 1, 2 again
    assert [wait for wait in waits if wait >= 10] == [10, 20, 10, 20]
    assert "gave up after 2 restarts in a row without a new checkpoint" in capfd.readouterr().err


@pytest.mark.parametrize("mode", ["from_path", "none", None])
def test_the_first_intention_holds_until_the_job_has_a_checkpoint_of_its_own(tmp_path, mode):
    (tmp_path / "checkpoints" / "global_step_2").mkdir(parents=True)  # another run's, or older
    code = (
        "step(attempt + 2) if attempt == 2 and index == 0 else None\nsys.exit(70 * (attempt < 4))"
    )
    job = Job(tmp_path, code, most=3, resume_mode=mode)
    assert job.run() == 0
    assert job.modes == [mode, mode, "latest", "latest"]


STANDS_STILL = """
import faulthandler
if attempt == 1:
    if index == 0:
        while not os.path.exists("ready"):
            time.sleep(0.01)
        where = "process 0 on a: generate of step 3, nothing done for 60 s"
        thread = "Thread 0x1 (most recent call first):\\n  File"
        text = f"{thread} 'watchdog.py', line 1\\n{thread} '/jax/_src/array.py', line 2"
        print(f"so far\\nstalled: {where}\\n{text}", file=sys.stderr, flush=True)
    else:
        faulthandler.register(signal.SIGUSR1)
        open("ready", "w").close()
    while True:
        time.sleep(100)
"""


def test_a_job_that_stands_still_shows_its_stacks_and_starts_again(tmp_path, capfd, monkeypatch):
    """Process 1 cannot say by itself where it is: a signal asks it. Process 0 dies of that."""
    monkeypatch.setattr(supervising, "SETTLE_SECONDS", 0.5)
    job = Job(tmp_path, STANDS_STILL)
    assert job.run() == 0
    assert job.modes == ["latest", "latest"]
    out, err = capfd.readouterr()
    assert printed(out) == ["so far"]
    first, second = err.partition("launch: the stacks of process 1:\n")[::2]
    assert first.startswith("launch: the stacks of process 0:\nstalled: process 0 on a: generate")
    assert "/jax/_src/array.py" in first
    assert second.startswith("Current thread 0x")
    assert 'File "<string>", line' in second
    assert (
        "launch: the job stands still: process 1 holds the lock of its interpreter, or does not "
        "run; process 0 on a: generate of step 3, nothing done for 60 s; restart 1 of 2"
    ) in second


@pytest.mark.parametrize("waits", [(), (0,), (1,), (0, 1)])
def test_who_stands_still_does_not_wait_for_devices(waits):
    """The main thread, the last, is at work, not in JAX."""
    stacks = {
        index: f"{SIGN}process {index}: eval\nThread 0x1 (most recent call first):\n  File 'a'\n"
        "Current thread 0x2 (most recent call first):\n  File "
        + ("'/jax/_src/array.py'\n" if index in waits else "'env.py'\n  File '/jax/api.py'\n")
        for index in range(2)
    }
    wanted = {
        (): "process 0: eval",
        (0,): "process 1: eval",
        (1,): "process 0: eval",
        (0, 1): "every process waits for its devices; process 0: eval",
    }
    assert supervising._where(stacks, set()) == f"the job stands still: {wanted[waits]}"


def test_backoff_is_bounded():
    restarts = Restarts(most=9, backoff_seconds=10.0, newest=lambda: 0, resume_mode="latest")
    assert [restarts.next() for _ in range(7)] == [10, 20, 40, 80, 160, 300, 300]
    assert Restarts(0, 1.0, lambda: 0, "latest").next() is None


def test_the_newest_step_is_that_of_a_finished_checkpoint(tmp_path):
    assert f"{PREFIX}_" == supervising.STEP_PREFIX
    assert newest_step(str(tmp_path / "none")) == 0
    for name in ("global_step_2", "global_step_10", "global_step_12.damaged", "global_step_14.tmp"):
        (tmp_path / name).mkdir()
    assert newest_step(str(tmp_path)) == 10


@pytest.mark.parametrize(
    ("polls", "status"),
    [
        ([[(0, 70), (1, 2)]], 2),  # both at once
        ([[(0, 70)], [(1, 1)]], 1),
        ([[(1, 0)], [(0, 137)]], 70),  # no other is left to say why
        ([[(1, 0), (0, 0)]], 0),
    ],
)
def test_the_status_of_a_job_is_that_which_explains_the_others(polls, status):
    class Scripted:
        def poll(self, seconds):
            return [Report(index, "", code) for index, code in polls.pop(0)]

        def stop(self):
            pass

    restarts = Restarts(0, 0.0, lambda: 0, "latest")
    assert supervise(lambda mode: (Scripted(), {0: "", 1: "b"}), restarts) == status


def test_a_host_that_is_lost_before_the_start_counts_as_a_failed_attempt(tmp_path, capfd):
    job = Job(tmp_path, "")
    start, job.start = job.start, None

    def first_lost(mode):
        if not job.modes:
            job.modes.append(mode)
            raise HostLost("2 hosts were not free in time")
        return start(mode)

    job.start = first_lost
    assert job.run() == 0
    assert "launch: 2 hosts were not free in time; restart 1 of 2" in capfd.readouterr().err


def test_lines_are_whole_and_shown_once(capsys):
    console = Console({0: "", 1: "[process 1 b]"})
    console.show(Report(1, "par", None))
    console.show(Report(0, "half", None))
    console.show(Report(0, " a line\nwarning\n", None))
    console.show(Report(1, "t\nwarning\n0%\r50%\r100%\n", None))
    console.show(Report(1, "error: wrong", 2))
    console.show(Report(0, "error: wrong\n", 2))
    assert printed(capsys.readouterr().out) == [
        "half a line",
        "warning",
        "[process 1 b] part",
        "[process 1 b] 100%",
        "[process 1 b] error: wrong",
    ]


LAUNCHER = """
import sys
from pathlib import Path
from jaxrl.cluster.child import Start
from jaxrl.cluster.host import Host
from jaxrl.cluster.supervise import Restarts, supervise
CHILD = '''
import os, signal, sys, time
def end(*_):
    print("ends", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[1] == "1" else end)
signal.signal(signal.SIGINT, end)
print("pid", os.getpid(), flush=True)
time.sleep(100)
'''
def start(mode):
    host = Host()
    starts = [Start(i, ["-c", CHILD, str(i)], {}, Path(str(i))) for i in range(2)]
    host.start(starts)
    return host, {0: "", 1: ""}
import jaxrl.cluster.supervise as supervising
sys.exit(supervise(start, Restarts(3, 1.0, lambda: 0, "latest")))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_ends_everything(tmp_path, number):
    """Passed on; the process that does not heed it is killed by the second."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    time.sleep(0.05)
    process.send_signal(number)
    ends = [process.stdout.readline() for _ in range(1 if number == signal.SIGTERM else 2)]
    if number == signal.SIGTERM:  # process 1 has all the time that it wants, as a long step
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)
        process.send_signal(number)
    out, err = process.communicate()
    assert process.returncode == 128 + number
    assert (ends, out) == (["ends\n"] * len(ends), "")
    name = signal.Signals(number).name
    assert f"launch: {name}: passed on to all processes, waiting for their end; once more" in err
    wait_until_dead(*pids)


def test_a_job_whose_processes_a_signal_ended_starts_again_after_their_step(tmp_path, capfd):
    """One got it, as of a host that is preempted, and told the other; the launcher did not."""
    code = "step(3) if attempt == 1 and index == 0 else None\nsys.exit(143 * (attempt == 1))"
    job = Job(tmp_path, code)
    assert job.run() == 0
    assert job.modes == ["latest", "latest"]
    line = r"launch: process [01] was ended by SIGTERM; restart 1 of 2 in a row, after step 3, in"
    assert re.search(line, capfd.readouterr().err)


@pytest.mark.parametrize("status", [130, 143, -15])
def test_a_process_that_a_signal_ended_before_its_first_step_is_a_lost_one(tmp_path, status):
    end = f"os.kill(os.getpid(), {-status})" if status < 0 else f"sys.exit({status})"
    job = Job(tmp_path, f"if attempt == 1:\n    {end} if index else sys.exit(70)")
    assert job.run() == 0
    assert len(job.modes) == 2


def test_a_job_that_fails_while_it_ends_is_ended(tmp_path, monkeypatch):
    """The others wait for what will not come."""
    monkeypatch.setattr(supervising, "SETTLE_SECONDS", 0.1)
    code = """
signal.signal(signal.SIGTERM, (lambda *_: sys.exit(70)) if index else signal.SIG_IGN)
if index == 0:
    while not os.path.exists("ready"):
        time.sleep(0.01)
    os.kill(LAUNCHER, signal.SIGTERM)
open("ready", "w").close()
time.sleep(100)
"""
    job = Job(tmp_path, code.replace("LAUNCHER", str(os.getpid())))
    assert job.run() == 143
    assert len(job.modes) == 1


def test_a_signal_never_interrupts_a_look_at_the_processes():
    """There it would leave a lock of `Popen` held, for which the end of the process waits."""
    log = []

    class Interrupting:
        def poll(self, seconds):
            if "signal" not in log:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)  # the handler has run
            log.append("polled")
            return [Report(0, "", 0)]

        def signal(self, number):
            log.append("signal")

        def stop(self):
            log.append("stop")

    before = signal.getsignal(signal.SIGINT)
    status = supervise(
        lambda mode: (Interrupting(), {0: ""}), Restarts(3, 1.0, lambda: 0, "latest")
    )
    assert status == 128 + signal.SIGINT
    assert log == ["polled", "signal", "stop"]  # what had ended in that look is not waited for
    assert signal.getsignal(signal.SIGINT) is before
