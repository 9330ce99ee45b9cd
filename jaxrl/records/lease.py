"""A folder that one process at a time works in: on a local disk, a shared one, or in a bucket.

    <folder>/.lock          held with flock(2): the system lets go of it when the process dies
    <folder>/.leases/<n>    JSON, who works here; the highest number counts

Whoever wants the folder creates the next number, which the file system lets one process do alone,
on other hosts too. So of two that find the same lease dead one gets the folder, and since numbers
are never used again, the one that lost it can see so. A lease is dead when its process is, which
this machine knows of its own; of another host's, when its beat has stood still for LEASE_SECONDS as
this process saw it: clocks are not compared. flock alone would not do on disks that do not pass it
on to other hosts; the lease alone would have a run that was killed wait.

A lease is there whole or not at all. So one that cannot be read is damaged, and nobody's: where its
owner lives it writes it anew with the next beat, or finds that another process has the folder.
"""

import atexit
import contextlib
import dataclasses
import errno
import json
import os
import socket
import threading
import time
import uuid
import weakref
from datetime import UTC, datetime
from pathlib import Path

import fsspec
import psutil
from etils import epath

from jaxrl import activity
from jaxrl.files import FolderError, replaced, sealed, sync_file, sync_names, unsealed, writing

try:
    import fcntl
except ImportError:  # Windows: the lease alone keeps others out
    fcntl = None

LOCK, LEASES = ".lock", ".leases"
BEAT_SECONDS, LEASE_SECONDS = 10.0, 90.0
POLL_SECONDS, START_SECONDS = 0.5, 2.0  # START: between a process's flock and its lease
NO_LINKS = errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP  # of disks without them
KEPT = 16  # numbers that stay: none is made again by a process that read the folder long ago


@dataclasses.dataclass(frozen=True)
class Lease:
    """Say who works in a folder, as its file does.

    Attributes:
        run: its run folder.
        since: in UTC.
        machine: the same for processes whose kernel is; pids: for those that see each other.
        started: of the process, for a pid is used again.
        flocked: whether it holds the file lock, too.
        beat: counts up while it lives.
        held: False once it has let go.
        token: of this lease alone.
    """

    run: str
    host: str
    pid: int
    since: str
    machine: str
    pids: str
    started: str
    flocked: bool
    beat: int
    held: bool
    token: str

    def described(self) -> str:
        """Say who it is, in words."""
        return f"the run {self.run} (process {self.pid} on {self.host}, since {self.since})"

    def is_dead(self, flocked: bool | None) -> bool:
        """Tell whether it is certain that its process has ended.

        Args:
            flocked: True where this process has the file lock of the folder now.
        """
        if self.machine != machine_id():
            return False
        if self.pids == pid_namespace():
            return process_start(self.pid) != self.started
        return flocked is True and self.flocked

    def lives(self, flocked: bool | None) -> bool:
        """Tell whether it is certain that its process goes on; arguments as for `is_dead`.

        Of another container on this machine the file lock alone says so: where there is none, as in
        a bucket, its beat is watched like that of another host.
        """
        seen = self.pids == pid_namespace() or flocked is False
        return self.machine == machine_id() and seen and not self.is_dead(flocked)


_UNKNOWN = Lease("?", "?", -1, "?", "?", "?", "?", flocked=False, beat=0, held=True, token="?")
_DAMAGED = dataclasses.replace(_UNKNOWN, held=False)


def _as_text(lease: Lease) -> str:
    return json.dumps(sealed(dataclasses.asdict(lease)))


class FolderLock:
    """Keep others out of a folder while this process works there, until `close`.

    Args:
        folder: local or in a bucket; made if need be.
        run: the run folder of the run that wants it.
        fix: what the user can do if another run has it.

    Raises:
        FolderError: another process works there, and the message names it; or the disk is full.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        run: str | os.PathLike[str] = "",
        fix: str = "Give this one a trainer.run_name of its own, or end the other",
    ) -> None:
        self.folder = epath.Path(folder)
        self.lost = ""  # why it is not held any more
        self._fix, self._number, self._tried = fix, 0, 0
        self._file = None
        self._mutex, self._stop = threading.Lock(), threading.Event()
        self._lease = Lease(
            run=os.fspath(run) or os.fspath(folder),
            host=socket.gethostname(),
            pid=os.getpid(),
            since=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
            machine=machine_id(),
            pids=pid_namespace(),
            started=process_start(os.getpid()) or "",
            flocked=False,
            beat=0,
            held=True,
            token=uuid.uuid4().hex,
        )
        try:
            with writing(self.folder / LEASES):
                self._files = _files(self.folder)
                self._acquire()
        except BaseException:
            self._stop.set()
            if self._number:  # the disk was full for what came after it
                with contextlib.suppress(OSError):
                    self._files.remove(self._number)
            self._unlock()
            raise
        _HELD.add(self)
        beats = threading.Thread(
            target=_beat_on, args=(weakref.ref(self), self._stop), name="lease", daemon=True
        )
        beats.start()

    def check(self) -> None:
        """Read whether the folder is still this process's.

        Raises:
            FolderError: another process has taken it, or what says so was deleted.
            OSError: it cannot be read now.
        """
        if self.lost:
            raise FolderError(self.lost)
        number, latest = self._latest()
        ours = latest if number == self._number else self._read(self._number)
        # reading our own file asks the server of a network disk; its folder may be remembered
        if number == self._number and ours and (ours is _DAMAGED or self._is_mine(ours)):
            return
        thief = latest.described() if latest and number > self._number else "somebody"
        self.lost = (
            f"{thief} has taken {self.folder} from this run, whose lease of {LEASE_SECONDS:g} s "
            "had run out, or has deleted its lease: this run ends before it writes there again. "
            "End the other, then start this one again"
        )
        raise FolderError(self.lost)

    def _is_mine(self, lease: Lease) -> bool:
        return lease.token == self._lease.token and lease.held

    def close(self) -> None:
        """Let go of the folder."""
        if self._stop.is_set() or os.getpid() != self._lease.pid:  # a fork: it is its parent's
            return
        self._stop.set()
        with self._mutex:
            if self._lease.held and self._number:
                with contextlib.suppress(FolderError, OSError):
                    self.check()
                    self._files.write(self._number, self._renewed(held=False))
            self._lease = dataclasses.replace(self._lease, held=False)
        self._unlock()
        _HELD.discard(self)

    def __del__(self) -> None:
        if hasattr(self, "_files"):  # else it could not be made
            self.close()

    def beat(self) -> None:
        """Say that this process lives.

        Raises:
            FolderError: too late.
        """
        with self._mutex:
            if self._lease.held:
                self.check()
                self._files.write(self._number, self._renewed(beat=self._lease.beat + 1))

    # ---------------------------------------------------------------- getting it

    def _acquire(self) -> None:
        seen, began = None, time.monotonic()
        while True:
            flocked = self._flock()
            number, lease = self._latest()
            free = lease is None or not lease.held or lease.is_dead(flocked)
            if free and flocked is not False:
                if self._take(number, lease, flocked):
                    return
                continue
            waited = time.monotonic() - began
            if lease is None or free:  # its holder writes it now, is of older make, or left a child
                if waited > START_SECONDS:
                    raise self._refusal(lease if lease and lease.held else None)
            elif lease.lives(flocked):
                raise self._refusal(lease)
            elif seen is None:
                seen, began = (number, lease.beat), time.monotonic()
                activity.say(
                    f"{self.folder} is held by {lease.described()}; waiting up to "
                    f"{LEASE_SECONDS:g} s for a sign of its life"
                )
            elif seen != (number, lease.beat):
                raise self._refusal(lease)
            elif waited > LEASE_SECONDS:
                if flocked is False:
                    raise self._refusal(lease)
                if self._take(number, lease, flocked):
                    return
            time.sleep(POLL_SECONDS)

    def _take(self, number: int, lease: Lease | None, flocked: bool | None) -> bool:
        """Create the number after that of a free or dead lease; False: another was first."""
        self._lease = dataclasses.replace(self._lease, flocked=flocked is True)
        try:
            self._files.create(number + 1, self._renewed())
        except FileExistsError:
            self._tried = number + 1
            return False
        made = self._read(number + 1)
        if made is None or made.token != self._lease.token:  # a client that sends no condition
            return False
        self._number = number + 1
        if lease is not None and lease.held:  # its process may only have slept
            self._files.write(number, _as_text(dataclasses.replace(lease, held=False)))
        self._files.remove(self._number - KEPT)
        return True

    def _refusal(self, lease: Lease | None) -> FolderError:
        who = f": {lease.described()}" if lease else ""
        return FolderError(f"another run goes on in {self.folder}{who}. {self._fix}")

    def _flock(self) -> bool | None:
        """Take the file lock, if nobody has it; None where there are none."""
        if fcntl is None or "://" in str(self.folder):
            return None
        if self._file is None:
            with writing(self.folder / LOCK):
                self._file = (Path(self.folder) / LOCK).open("a", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a disk without locks
            return None
        return True

    def _unlock(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    # ---------------------------------------------------------------- its file

    def _latest(self) -> tuple[int, Lease | None]:
        """Return the highest number and its lease; 0 and None where there is none."""
        number = max([self._tried, *self._files.numbers()])
        return number, self._read(number) if number else None

    def _read(self, number: int) -> Lease | None:
        try:
            found, _ = unsealed(self._files.read(number))
        except FileNotFoundError:
            return None
        except ValueError:
            return _DAMAGED
        # of another version: what it does not say is as of a process that nobody knows
        known = {f.name: found[f.name] for f in dataclasses.fields(Lease) if f.name in found}
        return dataclasses.replace(_UNKNOWN, **known)

    def _renewed(self, **changes: object) -> str:
        self._lease = dataclasses.replace(self._lease, **changes)
        return _as_text(self._lease)


_HELD: "weakref.WeakSet[FolderLock]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for lock in list(_HELD):
        lock.close()


def _beat_on(of: "weakref.ref[FolderLock]", stop: threading.Event) -> None:
    while not stop.wait(BEAT_SECONDS):
        if (lock := of()) is None:
            return
        # on a disk that is full or away the next beat may pass
        with contextlib.suppress(FolderError, OSError):
            lock.beat()
        if lock.lost:  # for the thread that trains
            return
        del lock


# ---------------------------------------------------------------- where leases are


class _LocalFiles:
    """Keep the leases of a folder on a disk."""

    def __init__(self, folder: epath.Path) -> None:
        self._folder = Path(folder) / LEASES
        self._folder.mkdir(parents=True, exist_ok=True)

    def numbers(self) -> list[int]:
        """Return the numbers that there are."""
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return []
        return [int(name) for name in names if name.isdecimal()]

    def read(self, number: int) -> str:
        return (self._folder / str(number)).read_text(encoding="utf-8")

    def create(self, number: int, text: str) -> None:
        """Make a lease, whole, in one process alone.

        The others get FileExistsError, as does whoever finds one there.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        lease, new = self._folder / str(number), self._folder / f".{number}.{uuid.uuid4().hex}"
        try:
            new.write_text(text, encoding="utf-8")
            sync_file(new)
            try:
                os.link(new, lease)
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                with lease.open("x", encoding="utf-8") as file:  # who reads it too early takes it
                    file.write(text)
        finally:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
        sync_names(self._folder)

    def write(self, number: int, text: str) -> None:
        """Replace a lease, so that readers find the old or the new, whole."""
        # not synced, which waits for a checkpoint that is being written: after a power cut its
        # process is dead
        with replaced(self._folder / str(number), part=str(os.getpid()), sync=False) as new:
            new.write_text(text, encoding="utf-8")

    def remove(self, number: int) -> None:
        (self._folder / str(number)).unlink(missing_ok=True)


class _BucketFiles:
    """Keep the leases of a folder in a bucket; "create" is a write if there is no such object.

    gcsfs and s3fs send the condition (`ifGenerationMatch=0`, `If-None-Match: *`) since 2025.
    """

    def __init__(self, folder: epath.Path) -> None:
        self._files, path = fsspec.core.url_to_fs(str(folder))
        self._folder = f"{path}/{LEASES}"

    def numbers(self) -> list[int]:
        self._files.invalidate_cache()  # of what others have written
        try:
            paths = self._files.ls(self._folder, detail=False)
        except FileNotFoundError:
            return []
        names = [path.rstrip("/").rpartition("/")[2] for path in paths]
        return [int(name) for name in names if name.isdecimal()]

    def read(self, number: int) -> str:
        return self._files.cat_file(f"{self._folder}/{number}").decode()

    def create(self, number: int, text: str) -> None:
        self._files.pipe_file(f"{self._folder}/{number}", text.encode(), mode="create")

    def write(self, number: int, text: str) -> None:
        self._files.pipe_file(f"{self._folder}/{number}", text.encode())

    def remove(self, number: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._folder}/{number}")


def _files(folder: epath.Path) -> _LocalFiles | _BucketFiles:
    return (_BucketFiles if "://" in str(folder) else _LocalFiles)(folder)


# ---------------------------------------------------------------- which process


def machine_id() -> str:
    """Return what is the same for all processes of one kernel, from its start to its end."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:  # no Linux
        return socket.gethostname()


def pid_namespace() -> str:
    """Return what is the same for processes that see each other's pids: one container's."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def process_start(pid: int) -> str | None:
    """Return when a living process began, as its system says it; None: there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
        try:
            process = psutil.Process(pid)
            return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
        except psutil.NoSuchProcess:
            return None
    fields = text.rpartition(")")[2].split()  # the name before it may have spaces
    return None if fields[0] in "ZX" else fields[19]
