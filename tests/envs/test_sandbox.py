"""Programs that mean harm: the host does not notice, the reason is recorded, nothing is left."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from jaxrl.envs.sandbox import jail, sandbox
from jaxrl.envs.sandbox.sandbox import Limits, SandboxError, run, run_each
from tests.envs import plain_user

LIMITS = Limits(
    seconds=30.0,  # for a busy machine
    cpu_seconds=1.0,
    memory_mb=200,
    disk_mb=8,
    files=64,
    processes=16,
    output_bytes=10_000,
)


def _can_hold() -> str:
    try:
        sandbox.require()
    except SandboxError as error:
        return str(error)
    return ""


# A machine that cannot hold the code runs none of it; nothing can be shown there but that.
REFUSED = _can_hold()
needs_sandbox = pytest.mark.skipif(bool(REFUSED), reason=REFUSED)


MARK = f"sandbox_tests_{os.getpid()}"  # tells our processes from those of tests beside us


@pytest.fixture(autouse=True)
def marked(monkeypatch, tmp_path_factory):
    """The program and the environment of everything in a sandbox say whose it is."""
    jail = tmp_path_factory.mktemp(MARK) / "jail.py"
    jail.write_bytes(sandbox._JAIL.read_bytes())
    monkeypatch.setattr(sandbox, "_JAIL", jail)
    monkeypatch.setitem(sandbox._ENVIRONMENT, "MARK", MARK)
    return jail


def left():
    """Processes of our sandboxes on this host, by what they say of themselves."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.name == str(os.getpid()):
                continue
            told = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            if MARK.encode() in told:
                found.append(told)
        except OSError:  # it ended, or belongs to somebody else
            pass
    return found


def wait_for_none(seconds=20.0):
    """The kernel takes a moment to bury the dead."""
    end = time.monotonic() + seconds
    while left() and time.monotonic() < end:
        time.sleep(0.01)
    return left()


def play(code, stdin="", limits=LIMITS):
    return run(textwrap.dedent(code), stdin, limits)


# ---- ordinary programs ---------------------------------------------------------------------------


@needs_sandbox
def test_a_program_reads_and_writes():
    result = play(
        "import sys\nprint(sum(map(int, sys.stdin)))\nprint('to', file=sys.stderr)", "3\n4"
    )
    assert (result.reason, result.stdout, result.stderr) == ("ok", "7\n", "to\n")
    assert (result.exit_code, result.ok) == (0, True)
    assert result.seconds > 0
    assert 1 < result.peak_mb < 100


@needs_sandbox
def test_every_input_has_a_run_of_its_own():
    code = """
    import os
    print(sorted(os.listdir()), input())
    open("left", "w").write("x")
    if os.fork() == 0: __import__("time").sleep(60)
    """
    results = list(run_each(textwrap.dedent(code), ["a", "b"], LIMITS))
    assert [result.stdout for result in results] == ["['main.py'] a\n", "['main.py'] b\n"]
    assert all(result.ok for result in results)  # nobody waits for the sleeper


@needs_sandbox
def test_what_a_program_sees_of_the_machine():
    code = """
    import os, socket, sys, tempfile
    print(os.listdir(), sorted(os.listdir("/proc")), socket.gethostname())
    # Those of a user without rights cannot be given up, and have no number of their own inside.
    print(os.getpid() < 10, set(os.getgroups()) - {os.getgid(), 65534})
    print(sorted(os.environ), len(os.listdir("/dev")))
    print(os.path.exists("/etc/passwd"), os.path.exists("/boot"), os.path.exists("/sys"))
    for place in ("/", "/usr/lib", sys.prefix, "/dev", "/proc"):
        try: open(place + "/new", "w"); print("wrote", place)
        except OSError: pass
    tempfile.TemporaryFile().write(b"x")
    """
    result = play(code)
    assert result.stdout.splitlines() == [
        "['main.py'] [] sandbox",
        "True set()",
        "['HOME', 'LANG', 'MARK', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS',"
        " 'PYTHONHASHSEED', 'PYTHONPATH', 'TMPDIR'] 3",
        "False False False",
    ]
    assert result.ok, result.stderr


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "reason", "exit_code"),
    [
        ("raise ValueError('x')", "error", 1),
        ("import sys; sys.exit(3)", "error", 3),
        ("def f(:", "error", 1),
        ("x = '\ud800'", "error", 1),  # not UTF-8
        ("import os; os.kill(os.getpid(), 11)", "killed", -11),
        ("import os; os.close(1); os.close(2)", "ok", 0),
        ("", "ok", 0),
    ],
)
def test_how_it_ended(code, reason, exit_code):
    result = run(code, "", LIMITS)
    assert (result.reason, result.exit_code) == (reason, exit_code)


@needs_sandbox
def test_a_program_has_three_descriptors():
    """Process 1 has others: they are closed by their list, not by trying each number."""
    code = """
    import os
    for number in range(64):
        try: os.fstat(number); print(number)
        except OSError: pass
    """
    assert play(code).stdout == "0\n1\n2\n"


@needs_sandbox
def test_a_trainer_that_shares_no_files():
    mask = os.umask(0o077)
    try:
        assert play("print(open('main.py').read()[:5])").stdout == "print\n"
    finally:
        os.umask(mask)


@needs_sandbox
def test_input_that_does_not_fit_is_named():
    with pytest.raises(SandboxError, match="No space left on device"):
        play("print(1)", stdin="x" * (9 << 20))


@needs_sandbox
def test_installed_packages_are_there():
    assert play("import numpy; print(numpy.arange(3).sum())", limits=Limits()).stdout == "3\n"


@needs_sandbox
def test_packages_in_the_folder_for_temporary_files(monkeypatch):
    """As of a clone in /tmp: they are seen, and the folder of the run is another."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        Path(folder, "only_here.py").write_text("number = 7")
        monkeypatch.setattr(sandbox, "_packages", lambda: [folder])
        sandbox.require.__wrapped__()
        code = """
        import os, tempfile, only_here
        open("x", "w"); tempfile.TemporaryFile()
        print(only_here.number, os.getcwd(), os.environ["HOME"], tempfile.gettempdir())
        """
        assert play(code).stdout == "7 /sandbox /sandbox /sandbox\n"
        monkeypatch.setattr(sandbox, "_HOMES", ("/tmp",))
        with pytest.raises(SandboxError, match="needs one of /tmp without packages"):
            play(code)


def test_packages_that_are_hidden_are_noticed(monkeypatch):
    """A folder of the host that the sandbox does not show."""
    outermost = sandbox._outermost
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(sandbox, "_packages", lambda: [folder])
        monkeypatch.setattr(
            sandbox, "_outermost", lambda paths: [p for p in outermost(paths) if p != folder]
        )
        with pytest.raises(SandboxError, match="does not hold: .*1 of 1 folders of packages"):
            sandbox.require.__wrapped__()


# ---- hostile programs ----------------------------------------------------------------------------

# 4 MB at a time, which no process has any more when the next are touched.
TOUCH = (
    "for i in range(0, len(m), 4 << 20):\n m[i : i + (4 << 20)] = bytes(4 << 20)\n"
    " m.madvise(mmap.MADV_DONTNEED, i, 4 << 20)\n"
)
HOSTILE = {
    "fork bomb": ("timeout", "import os\nwhile True:\n try: os.fork()\n except OSError: pass"),
    "fork bomb that sleeps": (
        "ok",
        "import os, time\nfor _ in range(1000):\n try:\n  if os.fork() == 0: time.sleep(99)\n"
        " except OSError: print('no more'); break",
    ),
    "daemon": (
        "ok",
        "import os, signal, time\n"
        "if os.fork() == 0:\n os.setsid()\n"
        " for n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n  except: pass\n"
        " if os.fork() == 0: time.sleep(99)\n os._exit(0)",
    ),
    "threads": (
        "error",
        "import threading, time\nfor _ in range(1000):\n"
        " threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
    ),
    "memory of one process": ("memory", "x = 'x' * (1 << 30)"),
    "memory piece by piece": ("memory", "x = []\nwhile True: x.append(bytearray(1 << 20))"),
    "memory of many processes": (
        "memory",
        "import os, time\nfor _ in range(6):\n try: os.fork()\n except OSError: pass\n"
        "x = b'x' * (150 << 20)\ntime.sleep(99)",
    ),
    "memory in files without names": (
        "error",
        "import os\nfor i in range(99): os.write(os.memfd_create('x'), bytes(1 << 20))",
    ),
    "infinite output": ("output", "while True: print('x' * 1000)"),
    "infinite errors": ("output", "import sys\nwhile True: sys.stderr.write('x' * 1000)"),
    "output of an orphan": (
        "output",
        "import os\nif os.fork() == 0:\n while True: os.write(1, b'x' * 1000)\n"
        "__import__('time').sleep(99)",
    ),
    "infinite loop": ("timeout", "while True: pass"),
    "sleep": ("timeout", "import time; time.sleep(99)"),
    "ignores every signal": (
        "timeout",
        "import signal\nfor n in range(1, 65):\n try: signal.signal(n, lambda *a: None)\n"
        " except: pass\nwhile True: pass",
    ),
    "stops itself": ("timeout", "import os, signal; os.kill(0, signal.SIGSTOP)"),
    "kills everybody": ("error", "import os; os.kill(-1, 9)"),  # there is nobody
    "kills its group": ("killed", "import os; os.kill(0, 9)"),
    "kills process 1": ("ok", "import os\ntry: os.kill(1, 9)\nexcept OSError: print('no')"),
    "kills its parent": (
        "ok",
        "import os\ntry: os.kill(os.getppid(), 9)\nexcept OSError: print('no')",
    ),
    "file that grows": ("error", "f = open('x', 'wb')\nwhile True: f.write(bytes(1 << 20))"),
    "files without end": ("error", "for i in range(10**6): open(str(i), 'w')\n"),
    "folders without end": ("error", "import os\nfor i in range(10**6): os.mkdir(str(i))"),
    "huge file with a hole": ("error", "import os; os.truncate('main.py', 1 << 40)"),
    "open files without end": ("error", "x = [open('/dev/null') for _ in range(10**6)]"),
    "recursion": ("error", "f = lambda: f()\nf()"),
    "recursion in C": (
        "killed or error",  # Python counts calls in C from 3.12 on; another one runs for "plain"
        "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n def __repr__(s): return repr([s])\n"
        "repr(A())",
    ),
    "link to the host's files": (
        "error",
        "import os\nos.symlink('/etc/shadow', 'x')\nprint(open('x').read())",
    ),
    "dots": ("error", "print(open('../../../../etc/shadow').read())"),
    "link out of the folder": (
        "error",
        "import os, sys\nos.symlink(sys.prefix, 'x')\nopen('x/new', 'w')",
    ),
    "hard link": ("error", "import os, sys; os.link(sys.executable, 'x')"),
    "environment of the parent": ("error", "print(open('/proc/1/environ').read())"),
    "memory of the parent": ("error", "open('/proc/1/mem', 'r+b')"),
    "a /proc of its own": (
        "ok",
        "import ctypes, os\nc = ctypes.CDLL(None)\n"
        "print(c.mount(b'proc', b'/proc', b'proc', 0, 0), os.listdir('/proc'))",
    ),
    "device node": ("error", "import os; os.mknod('disk', 0o60666, os.makedev(254, 0))"),
    "root again": ("error", "import os; os.setuid(0)"),
    "chroot": ("error", "import os; os.chroot('/tmp')"),
    "set-uid program": (
        "ok",
        "import os, sys\nd = open(sys.executable, 'rb').read(1 << 20)\nopen('x', 'wb').write(d)\n"
        "os.chmod('x', 0o4755); print(os.stat('x').st_uid == os.getuid() != 0)",
    ),
    "internet": ("error", "import socket; socket.create_connection(('127.0.0.1', 22), 1)"),
    "datagrams": ("error", "import socket; socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)"),
    "vsock": ("error", "import socket; socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)"),
    "raw packets": ("error", "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"),
    "netlink": ("error", "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)"),
    "sockets of the host": (
        "error",
        "import socket; socket.socket(socket.AF_UNIX).connect('/var/run/docker.sock')",
    ),
    # Memory that no process has: none of these holds 200 MB, or even begins to.
    "shared memory without a name": (
        "error",
        "import mmap, os\nos.fork(); os.fork()\nm = mmap.mmap(-1, 80 << 20)\n" + TOUCH,
    ),
    "shared memory of a device": (
        "error",
        "import mmap, os\nos.fork(); os.fork()\n"
        "m = mmap.mmap(os.open('/dev/zero', os.O_RDWR), 80 << 20)\n" + TOUCH,
    ),
    "huge pages in a pipe": (
        "error",
        "import ctypes, mmap, os\nc, size, keep = ctypes.CDLL(None), 2 << 20, []\n"
        "for i in range(128):\n"
        " if i % 16 == 0: keep.append(os.pipe())\n"
        " m = mmap.mmap(-1, 2 * size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        " start = ctypes.addressof(byte := ctypes.c_char.from_buffer(m))\n"
        " start += -start % size\n"
        " c.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), 14)\n"
        " ctypes.memset(start, 1, 1)\n"
        " vec = (ctypes.c_size_t * 2)(start, 1)\n"
        " assert c.vmsplice(keep[-1][1], vec, ctypes.c_size_t(1), 0) == 1\n"
        " del byte; m.close()",
    ),
    "pages of deleted files in a pipe": (
        "error",
        "import os\nf, keep = os.open('x', os.O_RDWR | os.O_CREAT), []\n"
        "for i in range(60000):\n"
        " if i % 16 == 0 and len(keep) < 28: keep.append(os.pipe())\n"
        " os.pwrite(f, b'x' * 4096, 0)\n"
        " os.splice(f, keep[-1][1], 1, offset_src=0)\n os.truncate('x', 0)",
    ),
    "pages of deleted files in a socket": (
        "error",
        "import os, socket\nf, pair = os.open('x', os.O_RDWR | os.O_CREAT), socket.socketpair()\n"
        "os.write(f, b'x' * 4096)\nos.sendfile(pair[0].fileno(), f, 0, 1)",
    ),
    "deleted files that are mapped": (
        "error",
        "import mmap, os\nkeep = []\nfor i in range(60):\n"
        " f = os.open('x', os.O_RDWR | os.O_CREAT)\n os.unlink('x')\n"
        " os.posix_fallocate(f, 0, 4 << 20)\n keep.append(mmap.mmap(f, 4 << 20))\n os.close(f)",
    ),
    "memory of threads whose first has ended": (
        "memory",
        "import ctypes, os, threading, time\nos.fork(); os.fork()\n"
        "def f():\n time.sleep(0.2)\n x = b'x' * (80 << 20)\n time.sleep(99)\n"
        "threading.Thread(target=f).start()\n"
        "ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)",
    ),
    "tables of pages": (
        "memory",  # 8 KB each, to read 4 KB that are nobody's: 136 MB beside the 80
        "import ctypes, time\nx = b'x' * (80 << 20)\nf = ctypes.CDLL(None).mmap\n"
        "f.argtypes = [ctypes.c_size_t] * 2 + [ctypes.c_int] * 3 + [ctypes.c_size_t]\n"
        "for i in range(1, 17000): f(i << 30, 4096, 1, 0x108022, -1, 0)\n"
        "time.sleep(99)",
    ),
    "datagrams that nobody reads": (
        "error",
        "import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    ),
    "other families of sockets, in pairs": ("error", "import socket; socket.socketpair(30)"),
    # What it writes to would not close before the kernel looks for sockets that nobody has.
    "output on its way to nobody": (
        "ok",
        "import os, socket\na, b = socket.socketpair()\n"
        "socket.send_fds(a, [b'x'], [1, 2, a.fileno(), b.fileno()])",
    ),
    # Without root's rights process 1 is of the same user.
    "interrupts process 1": (
        "ok",
        "import os, time\nfor n in (2, *range(1, 65)):\n try: os.kill(1, n)\n"
        " except OSError: pass\ntime.sleep(0.2)",
    ),
    **{
        f"takes {name} from process 1": (
            "ok",
            f"import os, resource, time\ntry: resource.prlimit(1, resource.RLIMIT_{name}, (0, 0))\n"
            "except OSError: pass\ntime.sleep(0.2)",
        )
        for name in ("NOFILE", "CPU", "AS")
    },
    "makes process 1 wait": (
        "timeout",
        "import os\ntry: os.sched_setaffinity(1, [min(os.sched_getaffinity(0))])\n"
        "except OSError: pass\ntry: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))\n"
        "except OSError: pass\ntry: os.setpriority(os.PRIO_USER, os.getuid(), 19)\n"
        "except OSError: pass\nwhile True: pass",
    ),
}
USERS = ("root", "plain") if os.getuid() == 0 else ("plain",)


@needs_sandbox
@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name, user):
    if user == "plain" and (why := plain_user.refused()):
        pytest.skip(why)
    reason, code = HOSTILE[name]
    before = set(os.listdir("/tmp")), Path("/proc/self/mounts").read_text()
    # Seconds are for those that sleep: others have used up the CPU's before.
    limits = replace(LIMITS, seconds=1.0, cpu_seconds=0.4) if reason == "timeout" else LIMITS
    result = run(code, "", limits) if user == "root" else plain_user.run(code, "", limits, MARK)
    assert result.reason in reason.split(" or "), result
    assert len(result.stdout) <= LIMITS.output_bytes and len(result.stderr) <= LIMITS.output_bytes
    assert "root:" not in result.stdout
    assert wait_for_none() == []
    assert Path("/proc/self/mounts").read_text() == before[1]
    assert not [new for new in set(os.listdir("/tmp")) - before[0] if new in ("x", "main.py")]


@needs_sandbox
def test_system_calls_that_are_refused():
    """By number, past Python and the C library; 1 is "not permitted", 38 "no such call"."""
    machine = os.uname().machine
    numbers = {
        "x86_64": "ptrace=101 readv=310 writev=311 unshare=272 setns=308 bpf=321 shmget=29 "
        "keyctl=250 perf=298 faults=323 x32=1073741863 sendfile=40 splice=275 tee=276 vmsplice=278 "
        "aio=206 inotify=253 inotify1=294 fanotify=300 ioprio=251",
        "aarch64": "ptrace=117 readv=270 writev=271 unshare=97 setns=268 bpf=280 shmget=194 "
        "keyctl=219 perf=241 faults=282 sendfile=71 splice=76 tee=77 vmsplice=75 "
        "aio=0 inotify1=26 fanotify=262 ioprio=30",
    }[machine]
    code = f"""
    import ctypes, os
    c = ctypes.CDLL(None, use_errno=True)
    everywhere = "uring=425 pidfd_getfd=438 memfd_secret=447 landlock=444 clone3=435"
    for call in f"{numbers} {{everywhere}}".split():
        name, number = call.split("=")
        print(name, c.syscall(int(number), 0, 1, 0, 0, 0, 0), ctypes.get_errno())
    clone = {{"x86_64": 56, "aarch64": 220}}["{machine}"]
    for flag in (0x10000000, 0x20000, 0x40000000, 0x80):
        print("clone", c.syscall(clone, flag | 17, 0, 0, 0, 0), ctypes.get_errno())
    """
    result = play(code)
    lines = result.stdout.splitlines()
    assert lines.pop(-5) == "clone3 -1 38"
    assert len(lines) == len(numbers.split()) + 4 + 4
    assert {line.split(" ", 1)[1] for line in lines} == {"-1 1"}


@needs_sandbox
def test_arguments_of_system_calls_that_are_refused():
    """Each call with the argument that is refused, then with one that is not."""
    calls = {  # x86_64, aarch64, refused arguments, allowed ones; p is a place to write to
        "mmap shared": (9, 222, "0, 4096, 3, 0x21, -1, 0", "0, 4096, 3, 0x22, -1, 0"),
        "mmap validated": (9, 222, "0, 4096, 3, 0x23, -1, 0", "0, 4096, 3, 0x22, -1, 0"),
        "mmap huge": (9, 222, "0, 1 << 21, 3, 0x40022, -1, 0", "0, 4096, 3, 0x22, -1, 0"),
        "socketpair tipc": (53, 199, "30, 1, 0, p", "1, 1, 0, p"),
        "socketpair datagrams": (53, 199, "1, 0x80002, 0, p", "1, 0x80801, 0, p"),
        "socket vsock": (41, 198, "40, 1, 0", "1, 1, 0"),
        "socket packets": (41, 198, "1, 5, 0", "1, 0x80001, 0"),
        "setsockopt": (54, 208, "s, 1, 7, p, 4", "s, 1, 8, p, 4"),  # SO_SNDBUF, SO_RCVBUF
        "prlimit of 1": (302, 261, "1, 7, 0, p", "0, 7, 0, p"),
        "scheduler of 1": (144, 119, "1, 0, z", "0, 0, z"),
        "affinity of 1": (203, 122, "1, 128, a", "0, 128, a"),
        "parameters of 1": (142, 118, "1, z", "0, z"),
        "attributes of 1": (314, 274, "1, b, 0", "0, b, 0"),
        "priority of 1": (141, 140, "0, 1, 19", "0, 0, 19"),
        "priority of a user": (141, 140, "2, 0, 19", "0, 0, 19"),
        "sigaction": (13, 134, "17, p, 0, 8", "17, 0, p, 8"),  # SIGCHLD
        # a pointer of which only the upper half is not 0
        "sigaction far": (13, 134, "17, 1 << 32, 0, 8", "16, 0, p, 8"),
    }
    code = f"""
    import ctypes, os, socket
    c, s = ctypes.CDLL(None, use_errno=True), socket.socket(socket.AF_UNIX).fileno()
    p = ctypes.addressof(place := (ctypes.c_char * 512)())
    z = ctypes.addressof(zeros := (ctypes.c_char * 512)())
    a = ctypes.addressof(all := (ctypes.c_char * 128)(*b"\\xff" * 128))
    b = ctypes.addressof(attributes := (ctypes.c_uint32 * 12)(48, 0, 0, 0, 19))
    which = os.uname().machine == "aarch64"
    c.syscall.restype = ctypes.c_long
    for name, (*number, refused, allowed) in {calls!r}.items():
        for given in (refused, allowed):
            ctypes.set_errno(0)
            values = [ctypes.c_long(value) for value in eval(f"({{given}})")]
            print(name, c.syscall(number[which], *values) != -1, ctypes.get_errno())
    """
    result = play(code)
    lines = result.stdout.splitlines()
    wanted = [f"{name} {ended}" for name in calls for ended in ("False 1", "True 0")]
    assert lines == wanted, result


@needs_sandbox
def test_a_list_of_limits_that_cannot_be_raised():
    code = """
    import resource
    for name in ("AS", "NPROC", "FSIZE", "CPU", "NOFILE"):
        kind = getattr(resource, "RLIMIT_" + name)
        try: resource.setrlimit(kind, (1 << 40, 1 << 40)); print("raised", name)
        except (ValueError, OSError): pass
    """
    result = play(code)
    assert (result.stdout, result.reason) == ("", "ok")


@needs_sandbox
def test_the_time_of_all_processes_is_one_sum():
    """Four at a time, none of which alone comes near the limit; those that ended count too."""
    code = """
    import os, time
    while True:
        for _ in range(4):
            if os.fork() == 0:
                while time.process_time() < 0.05: pass
                os._exit(0)
        for _ in range(4): os.wait()
    """
    result = play(code, limits=replace(LIMITS, cpu_seconds=0.4))
    assert (result.reason, result.exit_code) == ("timeout", -9)


@needs_sandbox
def test_children_that_nobody_waits_for_count_too():
    """Sixty of 50 ms, one after the other: 3 s, of which the limit allows 0.4."""
    code = """
    import os, signal, time
    try: signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    except OSError: pass
    for _ in range(60):
        if os.fork() == 0:
            while time.process_time() < 0.05: pass
            os._exit(0)
        try: os.wait()
        except ChildProcessError: pass
    """
    result = play(code, limits=replace(LIMITS, cpu_seconds=0.4))
    assert (result.reason, result.exit_code) == ("timeout", -9)


@needs_sandbox
def test_sockets_count_as_memory():
    """Two processes of some 10 MB; 56 sockets, each of 212,992 bytes and half as much: 17 MB."""
    code = """
    import os, socket, time
    keep = [socket.socketpair() for _ in range(28)]
    if os.fork() == 0: time.sleep(99)
    time.sleep(0.1)
    print(len(keep))
    """
    with_sockets = play(code).peak_mb
    without = play(code.replace("range(28)", "range(0)")).peak_mb
    assert with_sockets - without > 10


@needs_sandbox
def test_files_count_as_memory():
    """Six of 1 MB, and deleted ones too, once each however many processes have them mapped."""
    code = """
    import mmap, os, time
    keep = []
    for name in range(6):
        f = open("x", "w+b")
        f.write(bytes(1 << 20)); f.flush()
        keep.append(mmap.mmap(f.fileno(), 1 << 20)); keep[-1].read()
        os.unlink("x")
    for _ in range(3):
        if os.fork() == 0: time.sleep(99)
    time.sleep(0.1)
    """
    with_files = play(code).peak_mb
    without = play(code.replace("range(6)", "range(0)")).peak_mb
    assert 5 < with_files - without < 12


def test_the_end_of_the_output_is_not_waited_for():
    """A pipe that was sent over a socket may stay open when all processes are dead."""
    read, write = os.pipe()
    os.write(write, b"said")
    watch = jail._Watch({"output_bytes": 10}, -1, 0.0, {read: bytearray()})
    watch.read_rest()
    assert (watch.outputs, watch.limit, watch.open) == ({read: b"said"}, None, {read})
    os.write(write, b"more of it")
    watch.read_rest()
    assert (watch.outputs, watch.limit) == ({read: b"saidmore o"}, "output")
    os.close(read)
    os.close(write)


# ---- the process that asked ----------------------------------------------------------------------


@needs_sandbox
def test_it_dies_with_the_process_that_started_it(marked):
    code = f"""
from pathlib import Path
from jaxrl.envs.sandbox import sandbox
sandbox._JAIL = Path({str(marked)!r})
sandbox._ENVIRONMENT["MARK"] = {MARK!r}
sandbox.run("while True: pass")
"""
    trainer = subprocess.Popen([sys.executable, "-c", code])
    end = time.monotonic() + 20
    while not any(b"main.py" in told for told in left()):
        assert time.monotonic() < end
        time.sleep(0.01)
    trainer.kill()
    trainer.wait()
    assert wait_for_none() == []


@needs_sandbox
def test_a_judge_that_dies_during_a_run_is_the_fault_of_the_program(marked):
    """It has reason and reward like any other; before a run, the machine is to blame."""
    begins = '_say({"begun": True})'
    source = marked.read_text()
    assert source.count(begins) == 1
    for end, said in (("os._exit(1)", "killed"), ("raise OSError('no more')", "no more")):
        marked.write_text(source.replace(begins, f"{begins}; {end}"))
        [result] = run_each("print(7)", ["a", "b"], LIMITS)
        found = (result.reason, result.exit_code, result.stdout, result.stderr)
        assert found == ("killed", -9, "", said)
    marked.write_text(source.replace(begins, "os._exit(1)"))
    with pytest.raises(SandboxError, match="ended without a result: killed"):
        play("print(7)")


@needs_sandbox
def test_an_iterator_that_is_closed_ends_the_sandbox():
    results = run_each("import time; time.sleep(float(input()))", ["0", "60"], Limits())
    assert next(results).ok
    results.close()
    assert wait_for_none() == []


@needs_sandbox
def test_several_at_a_time_do_not_share_limits():
    """Twelve processes each, of sixteen allowed: only a common count would refuse them."""
    code = "import os, time\nfor _ in range(11):\n if os.fork() == 0: time.sleep(99)\nprint('all')"
    found = []
    threads = [threading.Thread(target=lambda: found.append(play(code).stdout)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["all\n"] * 4


@needs_sandbox
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give it up")
def test_a_user_without_rights_has_the_same_sandbox():
    """By a user namespace."""
    if why := plain_user.refused():
        pytest.skip(why)
    result = plain_user.run("import os\nprint(os.getuid())\nos.setuid(0)", "", LIMITS, MARK)
    assert (result.stdout, result.reason) == ("65534\n", "error")


def test_a_machine_that_does_not_allow_it_runs_nothing(monkeypatch, tmp_path):
    """Without the right to make namespaces: refused, with the reason and the remedy."""
    # A child that gives up the right first, as in a container, and may make no user namespace.
    touched = tmp_path / "touched"
    script = tmp_path / "jail.py"
    source = sandbox._JAIL.read_text().replace(
        "_libc.unshare(flag)", "(ctypes.set_errno(1), -1)[1]"
    )
    script.write_text(source)
    monkeypatch.setattr(sandbox, "_JAIL", script)
    with pytest.raises(SandboxError, match="does not allow the sandbox: .* a mount namespace"):
        run(f"open({str(touched)!r}, 'w')")
    assert not touched.exists()


def test_another_system_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match="needs Linux on one of x86_64, aarch64; this is darwin"):
        run("print(1)")


@pytest.mark.parametrize("name", ["seconds", "memory_mb", "output_bytes"])
def test_limits_are_positive(name):
    with pytest.raises(ValueError, match=f"sandbox limit {name} must be > 0, got 0"):
        Limits(**{name: 0})


def test_signal_of_the_cpu_limit_is_a_timeout():
    assert sandbox._reason(None, -signal.SIGXCPU, "") == "timeout"
