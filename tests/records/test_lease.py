"""Folders that one process at a time works in, with real processes."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from jaxrl.files import FolderError, sealed, unsealed
from jaxrl.records import lease
from jaxrl.records.lease import KEPT, FolderLock
from tests.full_disk import Disk

# Takes the folders that it is told of, one after another; says whether it got them, and keeps them.
PROCESS = """
import sys
from jaxrl.records import lease
from jaxrl.files import FolderError

machine, flock, pids = sys.argv[1:]
lease.BEAT_SECONDS, lease.LEASE_SECONDS, lease.POLL_SECONDS = 0.05, 1.0, 0.05
if machine != "this":
    lease.machine_id = lambda: machine
if pids != "these":
    lease.pid_namespace = lambda: pids
if flock == "without":
    lease.FolderLock._flock = lambda self: None
locks = []
print("ready", flush=True)
for line in sys.stdin:
    what, _, folder = line.strip().partition(" ")
    try:
        if what == "check":
            locks[-1].check()
        else:
            locks.append(lease.FolderLock(folder, "runs/other"))
        answer = "yes"
    except FolderError as error:
        answer = f"no: {error}"
    print("answer " + answer, flush=True)
"""


class Process:
    """One of them."""

    def __init__(self, machine="this", flock="with", pids="these"):
        self.popen = subprocess.Popen(
            [sys.executable, "-c", PROCESS, machine, flock, pids],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, text):
        self.popen.stdin.write(f"{text}\n")
        self.popen.stdin.flush()

    def answer(self, word="answer"):
        for line in self.popen.stdout:
            if line.startswith(word):
                return line.removeprefix("answer ").strip()
        raise AssertionError("it ended")

    def take(self, folder):
        self.tell(f"take {folder}")
        return self.answer()

    def kill(self):
        self.popen.kill()
        self.popen.wait()


@pytest.fixture
def start():
    started = []

    def one(*how):
        started.append(Process(*how))
        started[-1].answer("ready")
        return started[-1]

    yield one
    for process in started:
        process.kill()


@pytest.fixture
def soon(monkeypatch):
    """Leases that run out in a second."""
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(lease, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(lease, "POLL_SECONDS", 0.05)


def numbers(folder):
    return sorted(int(path.name) for path in (folder / ".leases").glob("[0-9]*"))


@pytest.mark.parametrize("flock", ["with", "without"])
def test_a_second_process_is_refused_until_the_first_has_let_go_or_died(tmp_path, start, flock):
    """A pid says as much on one machine as flock does, where the disk has no flock."""
    first, second = start("this", flock), start("this", flock)
    assert first.take(tmp_path) == "yes"
    refused = second.take(tmp_path)
    who = f"another run goes on in {tmp_path}: the run runs/other (process {first.popen.pid} on "
    assert refused.startswith(f"no: {who}") and " UTC). Give this one a " in refused
    first.kill()
    assert second.take(tmp_path) == "yes"  # at once: nothing is waited for
    assert numbers(tmp_path) == [1, 2]


@pytest.mark.parametrize("flock", ["with", "without"])
def test_a_container_that_was_killed_is_followed_by_another_on_its_machine(tmp_path, start, flock):
    """They do not see each other's pids, and in a bucket, or on some disks, there is no flock."""
    first, second = start("this", flock, "pid:[1]"), start("this", flock, "pid:[2]")
    assert first.take(tmp_path) == "yes"
    assert second.take(tmp_path).startswith(f"no: another run goes on in {tmp_path}: the run runs/")
    first.kill()
    assert second.take(tmp_path) == "yes"


def test_of_many_that_find_a_dead_owner_one_gets_the_folder(tmp_path, start):
    """Without flock, which would choose one by itself: as on a disk without it."""
    killed, others = start("this", "without"), [start("this", "without") for _ in range(5)]
    folders = [tmp_path / str(number) for number in range(20)]
    assert {killed.take(folder) for folder in folders} == {"yes"}
    killed.kill()
    for folder in folders:
        for process in others:
            process.tell(f"take {folder}")
        answers = [process.answer() for process in others]
        assert sum(answer == "yes" for answer in answers) == 1, answers
        assert numbers(folder) == [1, 2]


def test_the_owner_on_another_machine_is_believed_while_its_beat_moves(tmp_path, soon, start):
    there = start("other machine", "without")
    assert there.take(tmp_path) == "yes"
    with pytest.raises(FolderError, match=r"another run goes on in .*the run runs/other"):
        FolderLock(tmp_path)
    there.kill()
    began = time.monotonic()
    lock = FolderLock(tmp_path)  # of a dead one it knows nothing but that the beat stands still
    assert time.monotonic() - began >= 1.0
    lock.check()
    lock.close()


def test_a_process_that_slept_longer_than_its_lease_finds_that_it_is_lost(tmp_path, soon, start):
    there = start("other machine", "without")
    assert there.take(tmp_path) == "yes"
    there.popen.send_signal(signal.SIGSTOP)
    lock = FolderLock(tmp_path, "runs/mine")
    # what its own file says where it remembers an older list of the folder
    assert not json.loads((tmp_path / ".leases" / "1").read_text())["held"]
    there.popen.send_signal(signal.SIGCONT)
    there.tell("check")
    answer = there.answer()
    assert answer.startswith("no: the run runs/mine (process ") and "has taken" in answer
    assert "this run ends before it writes there again" in answer
    lock.check()  # what the other did when it woke up changed nothing
    lock.beat()
    lock.close()


def test_of_two_machines_that_wait_for_a_lease_to_run_out_one_gets_it(tmp_path, start):
    killed = start("a", "without")
    assert killed.take(tmp_path) == "yes"
    killed.kill()
    others = [start(machine, "without") for machine in "bcd"]
    for process in others:
        process.tell(f"take {tmp_path}")
    assert sorted(process.answer()[:3] for process in others) == ["no:", "no:", "yes"]


def left_lease(folder, **changes):
    """The lease of an owner that lived before a reboot, or of another version."""
    lock = FolderLock(folder)
    found, checked = unsealed((folder / ".leases" / "1").read_text())
    lock.close()
    assert checked
    return found | {"machine": "the boot before"} | changes


def test_an_owner_of_before_a_reboot_or_of_another_version_is_waited_for(tmp_path, soon):
    of_today = left_lease(tmp_path)
    of_tomorrow = sealed({"beat": 3, "held": True, "what": "nobody knows"})
    for left in (sealed(of_today), of_today, of_tomorrow):
        number = max(numbers(tmp_path))
        (tmp_path / ".leases" / str(number)).write_text(json.dumps(left))
        began = time.monotonic()
        taken = FolderLock(tmp_path)
        assert time.monotonic() - began >= 1.0
        taken.close()
        assert max(numbers(tmp_path)) == number + 1


@pytest.mark.parametrize("left", ["", "{", "[]", None])
def test_a_lease_that_is_damaged_is_nobodys(tmp_path, capsys, left):
    """As a full disk left it, or with another digit: nobody waits for the 90 s of a lease."""
    text = json.dumps(sealed(left_lease(tmp_path)))
    path = tmp_path / ".leases" / "1"
    path.write_text(text.replace('"beat": ', '"beat": 1') if left is None else left)
    lock = FolderLock(tmp_path)
    assert "waiting" not in capsys.readouterr().out
    assert numbers(tmp_path) == [1, 2]
    lock.close()


def test_an_owner_whose_lease_is_damaged_writes_it_anew(tmp_path):
    lock, path = FolderLock(tmp_path), tmp_path / ".leases" / "1"
    path.write_text(path.read_text()[:30])
    lock.check()
    lock.beat()
    assert unsealed(path.read_text())[0]["beat"] == 1
    with pytest.raises(FolderError, match="another run goes on in"):
        FolderLock(tmp_path)
    lock.close()


@pytest.mark.parametrize("write", ["write", "fsync", "link"])
def test_a_full_disk_leaves_no_lease_and_is_named(tmp_path, write):
    with pytest.MonkeyPatch.context() as patch:
        Disk(patch, tmp_path, f"{write} .leases/.1.")
        with pytest.raises(FolderError, match=f"cannot write {tmp_path}/.leases .No space left.*f"):
            FolderLock(tmp_path)
    assert os.listdir(tmp_path / ".leases") == []
    FolderLock(tmp_path).close()


def test_a_disk_without_links_has_leases_too(tmp_path, monkeypatch):
    def none(*args, **kwargs):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", none)
    lock = FolderLock(tmp_path)
    assert os.listdir(tmp_path / ".leases") == ["1"]
    with pytest.raises(FolderError, match="another run goes on in"):
        FolderLock(tmp_path)
    lock.close()


def test_a_process_that_holds_the_file_lock_alone_is_not_overlooked(tmp_path, start, monkeypatch):
    """An older version has no lease; a child that outlives its run may keep the lock, too."""
    monkeypatch.setattr(lease, "START_SECONDS", 0.2)
    first = FolderLock(tmp_path)
    os.remove(tmp_path / ".leases" / "1")
    with pytest.raises(FolderError, match=f"another run goes on in {tmp_path}. Give this one"):
        FolderLock(tmp_path)
    with pytest.raises(FolderError, match="or has deleted its lease: this run ends before it"):
        first.check()


def test_a_lease_is_let_go_of_and_numbers_are_not_used_again(tmp_path):
    for _ in range(KEPT + 3):
        lock = FolderLock(tmp_path)
        lock.check()
        lock.close()
        lock.close()
    assert numbers(tmp_path) == list(range(4, KEPT + 4))
    assert not json.loads((tmp_path / ".leases" / str(KEPT + 3)).read_text())["held"]
    abandoned = FolderLock(tmp_path)
    del abandoned
    FolderLock(tmp_path).close()


def test_a_fork_does_not_let_go_of_its_parents_folder(tmp_path):
    lock = FolderLock(tmp_path)
    if (pid := os.fork()) == 0:
        lock.close()
        os._exit(0)
    os.waitpid(pid, 0)
    lock.check()
    lock.close()


def test_beats_go_on_after_a_disk_was_full(tmp_path, soon, monkeypatch):
    lock, failed = FolderLock(tmp_path), threading.Event()

    def full(number, text):
        failed.set()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(lock._files, "write", full)
        assert failed.wait(10)
    path, deadline = tmp_path / ".leases" / "1", time.monotonic() + 10
    beat = json.loads(path.read_text())["beat"]
    while json.loads(path.read_text())["beat"] == beat:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lock.close()


def test_a_bucket_is_held_by_a_lease_alone(monkeypatch, soon):
    """fsspec's own memory stands in for the bucket."""
    memory = MemoryFileSystem()
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url: (memory, url.partition("://")[2]))
    folder, got, start = "gs://bucket/locks/checkpoints", [], threading.Barrier(8)
    first = FolderLock(folder, "runs/a")
    with pytest.raises(FolderError, match=rf"goes on in {folder}: the run runs/a \(process"):
        FolderLock(folder, "runs/b")
    first.beat()
    first.check()
    first.close()

    def contend(number):
        start.wait()
        try:
            got.append(FolderLock(folder, f"runs/{number}"))
        except FolderError:
            got.append(None)

    threads = [threading.Thread(target=contend, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (lock,) = [lock for lock in got if lock]
    memory.rm("/bucket/locks/checkpoints/.leases", recursive=True)
    with pytest.raises(FolderError, match="has deleted its lease"):
        lock.check()
