"""The child of `envs.sandbox.sandbox`: a program that jails itself, then runs others' Python.

Three processes, each started by the one before:

1. This program leaves the host: new user (unless root), mount, PID, network, IPC, UTS and cgroup
   namespaces. It dies with the process that started it.
2. Process 1 of the new PID namespace builds a file system in memory that holds a Python and nothing
   else, starts the code, counts its output, memory and seconds, and says how it ended. When it
   dies, the kernel kills everything in the namespace: no fork, session or signal handler escapes.
3. The code: an unprivileged user without capabilities, behind resource limits and a seccomp filter.

Standard library only, and nothing of jaxrl: it starts in milliseconds, and is read by whoever wants
to know what holds the code. Reads one JSON object from stdin, see `sandbox._request`; writes one
JSON line per run to stdout.
"""

import _socket
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time

_CLONE_NEW = {
    "mount": 0x00020000,
    "cgroup": 0x02000000,
    "UTS": 0x04000000,
    "IPC": 0x08000000,
    "PID": 0x20000000,
    "network": 0x40000000,
}
_CLONE_NEWUSER = 0x10000000
_MS_NOSUID_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2 | 4, 4096, 16384, 1 << 18
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_MOUNT_SETATTR_CALL = 442  # on every machine
_MNT_DETACH, _AT_FDCWD, _AT_RECURSIVE = 2, -100, 0x8000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 4, 38, 22

_FIRST_UID = 0x70000000  # far above those that systems hand out; one per run, by the PID
_STAGE = "/proc"  # a folder that exists everywhere; it is covered in the new mount namespace only
_TICK_SECONDS = 0.02  # between two looks at the memory
_ROOT_BYTES = 1 << 20
_MEMORY = (b"RssAnon:", b"RssFile:", b"VmSwap:", b"VmPTE:")  # of a process, without shared files

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Read the request, leave the host and hand over to process 1."""
    request = json.load(sys.stdin.buffer)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != request["parent"]:
        return  # it died before the line above
    uid = _FIRST_UID + os.getpid() if os.geteuid() == 0 else os.geteuid()
    try:
        _leave_host()
    except OSError as error:
        _say({"refused": str(error)})
        return
    if child := os.fork():
        os.waitpid(child, 0)
    else:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            _process_1(request, uid)
        except OSError as error:
            _say({"refused": str(error)})
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            os._exit(0)


def _leave_host() -> None:
    """Enters namespaces of its own; without root's rights they begin with a user namespace."""
    _write("/proc/self/oom_score_adj", b"1000")  # if memory runs out, it is killed first
    uid, gid = os.geteuid(), os.getegid()
    if uid != 0:
        _check(_libc.unshare(_CLONE_NEWUSER), "a user namespace (not root)")
        _write("/proc/self/setgroups", b"deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1".encode())
        _write("/proc/self/gid_map", f"{gid} {gid} 1".encode())
    for name, flag in _CLONE_NEW.items():
        _check(_libc.unshare(flag), f"a {name} namespace")


def _process_1(request: dict, uid: int) -> None:
    """Do all after the fork: one run after the other, each in an empty folder of its own."""
    _prctl(_PR_SET_DUMPABLE, 0)  # nobody looks into this process
    # Without a handler of its own, the kernel keeps every signal of the code from process 1.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.umask(0o022)  # the code may read what is made for it, whatever the trainer's mask
    _check(_libc.sethostname(b"sandbox", 7), "name the host")
    processes = _build_root(request["paths"], request["home"], request["pivot_root"])
    for stdin in request["stdins"]:
        _mount_home(request, uid, stdin)
        _say({"begun": True})  # what goes wrong from here on may be the code's doing
        _say(_run(request, uid, processes))
        _check(_libc.umount2(request["home"].encode(), _MNT_DETACH), "unmount the run's folder")


# ---- the file system -----------------------------------------------------------------------------


def _build_root(paths: list[str], home: str, pivot_root: int) -> int:
    """Build a root with read-only binds of `paths`.

    Returns the descriptor of a /proc that only we can see.
    """
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE, "")
    with contextlib.ExitStack() as stack:
        # Opened before the stage covers one of them.
        sources = {path: os.open(path, os.O_PATH) for path in paths if os.path.exists(path)}
        for descriptor in sources.values():
            stack.callback(os.close, descriptor)
        descriptors = os.open("/proc/self/fd", os.O_PATH | os.O_DIRECTORY)
        stack.callback(os.close, descriptors)
        _mount("tmpfs", _STAGE, "tmpfs", _MS_NOSUID_NODEV, f"size={_ROOT_BYTES},mode=755")
        os.fchdir(descriptors)
        for path, descriptor in sources.items():
            _bind(path, descriptor)
    os.chdir(_STAGE)
    for folder in ("proc", home[1:]):
        os.makedirs(folder, exist_ok=True)
    _mount("proc", "proc", "proc", _MS_NOSUID_NODEV, "")
    processes = os.open("proc", os.O_RDONLY | os.O_DIRECTORY)
    _check(_libc.umount2(b"proc", _MNT_DETACH), "unmount /proc")
    _check(_libc.syscall(pivot_root, b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "unmount the old root")
    os.chdir("/")
    _set_attributes("/", _MOUNT_ATTR_RDONLY)
    return processes


def _bind(path: str, descriptor: int) -> None:
    """Show a file, folder or device of the host at the same place; symbolic links are copied."""
    target = _STAGE + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        _write(target, b"")
    _mount(str(descriptor), target, None, _MS_BIND | _MS_REC, "")  # in /proc/self/fd
    is_device = path.startswith("/dev/")
    attributes = _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_RDONLY
    _set_attributes(target, attributes | (0 if is_device else _MOUNT_ATTR_NODEV))


def _mount_home(request: dict, uid: int, stdin: str) -> None:
    """Mounts an empty folder in memory, which holds the program and its input."""
    options = f"size={request['disk_mb']}m,nr_inodes={request['files']},mode=700,uid={uid}"
    _mount("tmpfs", request["home"], "tmpfs", _MS_NOSUID_NODEV, options)
    for name, text in (("main.py", request["code"]), (".stdin", stdin)):
        # A lone surrogate is in some answers; Python says then where.
        _write(f"{request['home']}/{name}", text.encode("utf-8", "surrogatepass"))


def _mount(source: str, target: str, kind: str | None, flags: int, options: str) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    result = _libc.mount(*encoded, ctypes.c_ulong(flags), options.encode())
    _check(result, f"mount {kind or source} at {target}")


def _set_attributes(path: str, attributes: int) -> None:
    value = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    recursive = 0 if path == "/" else _AT_RECURSIVE
    result = _libc.syscall(
        *(_MOUNT_SETATTR_CALL, _AT_FDCWD, path.encode(), recursive, value, ctypes.sizeof(value))
    )
    _check(result, f"mount_setattr of {path} (Linux 5.12 or later)")


# ---- one run -------------------------------------------------------------------------------------


def _run(request: dict, uid: int, processes: int) -> dict:
    """Run the code once, and kill all that is left of it.

    Returns:
        stdout, stderr: what it wrote, cut; a character per byte.
        status: of waitpid.
        limit: "timeout", "memory" or "output" if that is why it was killed.
        seconds: it took.
        peak_mb: the largest memory that was seen.
    """
    pipes = [os.pipe() for _ in range(2)]
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            _become_the_code(request, uid, [write for _, write in pipes], processes)
        finally:
            os._exit(126)
    for _, write in pipes:
        os.close(write)
    watch = _Watch(request, processes, start, {read: bytearray() for read, _ in pipes})
    ends = os.pidfd_open(child)  # readable when it is over
    while watch.limit is None and not watch.look(ends):
        pass
    seconds = time.monotonic() - start
    # The program is over, or must be: so is everything that it started.
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    status = _reap(child)
    # Sockets on their way to nobody may hold files; the kernel looks for them when one is closed.
    _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM).close()
    watch.read_rest()
    for descriptor in (*watch.outputs, ends):
        os.close(descriptor)
    stdout, stderr = (bytes(text).decode("latin-1") for text in watch.outputs.values())
    used = {"seconds": round(seconds, 4), "peak_mb": round(watch.peak_mb, 1)}
    return {"stdout": stdout, "stderr": stderr, "status": status, "limit": watch.limit} | used


class _Watch:
    """Read the output, and compare time, memory and output with their limits."""

    def __init__(
        self, request: dict, processes: int, start: float, outputs: dict[int, bytearray]
    ) -> None:
        self.request, self.processes, self.start = request, processes, start
        self.outputs, self.open = outputs, set(outputs)
        for descriptor in outputs:
            os.set_blocking(descriptor, False)
        self.limit: str | None = None
        self.peak_mb = 0.0
        socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        # What it may send, and once more half of that: the last message may exceed it.
        self.socket_bytes = socket.getsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF) * 3 // 2
        socket.close()

    def look(self, ends: int) -> bool:
        """Wait at most a tick for output, and look at clock and memory.

        Returns whether the program ended.
        """
        ready = select.select([*self.open, ends], [], [], _TICK_SECONDS)[0]
        self._read([descriptor for descriptor in ready if descriptor != ends])
        mb, cpu_seconds = self._used()
        self.peak_mb = max(self.peak_mb, mb)
        if mb > self.request["memory_mb"]:
            self.limit = "memory"
        elif (
            time.monotonic() - self.start > self.request["seconds"]
            or cpu_seconds > self.request["cpu_seconds"]
        ):
            self.limit = "timeout"
        return ends in ready

    def read_rest(self) -> None:
        """Read what still lies in the pipes when no process is left to write to them.

        Their end is not waited for: one that was sent over a socket may outlive its senders.
        """
        while self._read(list(self.open)) and self.limit != "output":
            pass

    def _read(self, descriptors: list[int]) -> bool:
        """Append what there is, if anything; what exceeds the limit is thrown away."""
        found = False
        for descriptor in descriptors:
            try:
                data = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                continue
            if not data:
                self.open.remove(descriptor)
            found, text = found or bool(data), self.outputs[descriptor]
            text += data
            if len(text) > self.request["output_bytes"]:
                del text[self.request["output_bytes"] :]
                self.limit = self.limit or "output"
        return found

    def _used(self) -> tuple[float, float]:
        """Return the memory in MB and the CPU seconds of all processes.

        Memory is what is resident or swapped (a page that processes share counts for each), page
        tables, files, and what sockets may hold in the kernel. Processes that ended count with
        their CPU: nobody buries them before the run is over.
        """
        kb = ticks = 0
        for name in os.listdir(self.processes):
            if name.isdigit() and name != "1":
                with contextlib.suppress(OSError):
                    # Its name in brackets may hold anything; then state is field 3 of proc(5).
                    fields = self._told(f"{name}/stat").rpartition(b")")[2].split()
                    ticks += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
                    kb += self._resident_kb(name)
        files = os.statvfs(self.request["home"])
        sockets = self._told("1/net/unix").count(b"\n") - 1  # those on their way to nobody too
        size = (files.f_blocks - files.f_bfree) * files.f_frsize
        mb = kb / 2**10 + (size + sockets * self.socket_bytes) / 2**20
        return mb, ticks / os.sysconf("SC_CLK_TCK")

    def _resident_kb(self, name: str) -> int:
        """Return the memory of a process, which all its threads share.

        Its first thread may have ended before the others: it then no longer has any.
        """
        for thread in _names(f"{name}/task", self.processes):
            rows = self._told(f"{name}/task/{thread}/status").split(b"\n")
            if found := [int(row.split()[1]) for row in rows if row.startswith(_MEMORY)]:
                return sum(found)
        return 0

    def _told(self, name: str) -> bytes:
        """Return a file of /proc."""
        with open(os.open(name, os.O_RDONLY, dir_fd=self.processes), "rb") as file:
            return file.read()


def _names(folder: str, processes: int) -> list[str]:
    """Return what is in a folder of /proc."""
    descriptor = os.open(folder, os.O_RDONLY, dir_fd=processes)
    try:
        return os.listdir(descriptor)
    finally:
        os.close(descriptor)


def _reap(child: int) -> int:
    """Wait for every process that is left; return the status of `child`."""
    status = 0
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, ended = os.wait()
            if pid == child:
                status = ended
    return status


# ---- the code ------------------------------------------------------------------------------------


def _become_the_code(request: dict, uid: int, outputs: list[int], processes: int) -> None:
    """Give up every right and descriptor and become the Python that runs the code."""
    os.setsid()
    os.chdir(request["home"])
    stdin = os.open(".stdin", os.O_RDONLY)
    for target, source in enumerate((stdin, *outputs)):
        os.dup2(source, target)
    os.unlink(".stdin")
    # By their list: there may be a thousand million numbers.
    for name in _names("self/fd", processes):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # the list names its own
                os.close(int(name))
    if os.geteuid() == 0:
        os.setgroups([])
    for name, value in _limits(request).items():
        kind = getattr(resource, f"RLIMIT_{name}")
        most = resource.getrlimit(kind)[1]
        values = (value, value + (name == "CPU"))  # a second between the signal and the kill
        allowed = [v if most == resource.RLIM_INFINITY else min(v, most) for v in values]
        resource.setrlimit(kind, (allowed[0], allowed[1]))
    if os.geteuid() == 0:
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _filter_calls(request["filter"])
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.execve(request["python"], request["arguments"], request["environment"])


def _limits(request: dict) -> dict[str, int]:
    mb, seconds = 2**20, int(request["cpu_seconds"] + 0.999)
    return {
        "AS": request["memory_mb"] * mb,
        "CPU": seconds,
        "FSIZE": request["disk_mb"] * mb,
        "NPROC": request["processes"],
        "NOFILE": 64,
        "CORE": 0,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
        "SIGPENDING": 256,
        "NICE": 0,
        "RTPRIO": 0,
    }


class _Filter(ctypes.Structure):
    _fields_ = [
        *(("code", ctypes.c_uint16), ("jt", ctypes.c_uint8)),
        *(("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("filters", ctypes.POINTER(_Filter))]


def _filter_calls(lines: list[list[int]]) -> None:
    """Put a program of `seccomp.py` between the code and the kernel."""
    filters = (_Filter * len(lines))(*(_Filter(*line) for line in lines))
    program = _Program(len(lines), filters)
    _prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program))


# ---- calls of the host ---------------------------------------------------------------------------


def _prctl(option: int, *arguments) -> None:
    values = (*arguments, 0, 0, 0, 0)[:4]
    _check(_libc.prctl(option, *values), f"prctl {option}")


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def _say(message: dict) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
