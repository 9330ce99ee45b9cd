"""Jobs that stand still: noticed, shown with the stacks of all processes, and started again."""

import re

import pytest

from jaxrl.cli import STALLED
from jaxrl.cluster.child import Start
from jaxrl.cluster.host import Host
from jaxrl.cluster.settings import place_in_job
from jaxrl.cluster.supervise import Restarts, supervise
from tests.jobs import ROOT, run as run_job

pytestmark = pytest.mark.slow

SECONDS = 15  # longer than anything takes to compile


def run(folder, how, count):
    """Supervise `stalling_job`; the status and the number of attempts."""
    modes = []

    def start(mode):
        modes.append(mode)
        host = Host()
        address = f"127.0.0.1:{host.free_port()}"
        argv = ["-m", "tests.cluster.stalling_job", how, str(len(modes))]
        host.start(
            [
                Start(
                    index,
                    argv,
                    {"JAXRL_STALL_SECONDS": str(SECONDS), **place_in_job(address, count, index)},
                    folder / f"{index}.log",
                    folder=str(ROOT),
                )
                for index in range(count)
            ]
        )
        return host, {index: f"[process {index}]" for index in range(count)}

    status = supervise(start, Restarts(2, 0.01, lambda: 0, "latest"))
    return status, len(modes)


@pytest.mark.parametrize("how", ["asleep", "reading", "holding_the_lock"])
def test_a_process_that_stands_still_is_named_and_the_job_starts_again(tmp_path, capfd, how):
    """Process 0 waits for it in a collective, and says so."""
    assert run(tmp_path, how, 2) == (0, 2)
    out, err = capfd.readouterr()
    assert "[process 0] done" in out
    stacks = re.split(r"launch: the stacks of process \d:", err)
    assert len(stacks) == 3
    assert re.search(r'multihost_utils.py", line \d+ in process_allgather', stacks[1])
    assert re.search(rf'stalling_job.py", line \d+ in {how}\n', stacks[2])
    reason = re.search("launch: the job stands still: (.*); restart 1 of 2", stacks[2])[1]
    if how == "holding_the_lock":
        holds = "process 1 holds the lock of its interpreter, or does not run; "
        assert reason.startswith(holds)
        reason = reason.removeprefix(holds).replace("process 0", "process 1")
    assert re.fullmatch(
        r"process 1 on \S+: generate of step 3, nothing done for \d+ s "
        r"\(trainer.cluster.stall_seconds=15\)",
        reason,
    )


def test_a_job_of_one_process_that_holds_the_lock(tmp_path, capfd):
    """Nobody else can notice: the timer of `faulthandler` does."""
    assert run(tmp_path, "holding_the_lock", 1) == (0, 2)
    err = capfd.readouterr().err
    assert re.search(r"Timeout \(0:00:15[.\d]*\)!\n(.*\n)+.*line \d+ in holding_the_lock\n", err)
    holds = "process 0 holds the lock of its interpreter, or does not run; restart 1 of 2"
    assert f"launch: the job stands still: {holds}" in err


def test_the_status_says_that_it_stood_still():
    """75, where no launcher has ended the processes; the last may end with the coordinator."""
    argv = ["-m", "tests.cluster.stalling_job", "asleep", "1"]
    ended = run_job(argv, 2, devices=1, environment={"JAXRL_STALL_SECONDS": str(SECONDS)})
    assert STALLED == 75
    assert STALLED in [process.status for process in ended]
    assert all(process.status != 0 for process in ended)
    assert all("stalled: process " in process.error for process in ended)
