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

from jaxrl.envs import sandbox
from jaxrl.envs.sandbox import Limits, SandboxError, run, run_each

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
    print(os.listdir("/tmp"), sorted(os.listdir("/proc")), socket.gethostname())
    print(os.getpid() < 10, os.getgroups(), sorted(os.environ), len(os.listdir("/dev")))
    print(os.path.exists("/etc/passwd"), os.path.exists("/home"), os.path.exists("/sys"))
    for place in ("/", "/usr/lib", sys.prefix, "/dev", "/proc"):
        try: open(place + "/new", "w"); print("wrote", place)
        except OSError: pass
    tempfile.TemporaryFile().write(b"x")
    """
    result = play(code)
    assert result.stdout.splitlines() == [
        "['main.py'] [] sandbox",
        "True [] ['HOME', 'LANG', 'MARK', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS',"
        " 'PYTHONHASHSEED', 'PYTHONPATH'] 4",
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


# ---- hostile programs ----------------------------------------------------------------------------

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
        "import os, time\nfor _ in range(6): os.fork()\nx = b'x' * (150 << 20)\ntime.sleep(99)",
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
        "killed",
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
}


@needs_sandbox
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name, tmp_path):
    reason, code = HOSTILE[name]
    before = set(os.listdir("/tmp")), Path("/proc/self/mounts").read_text()
    result = run(code, "", replace(LIMITS, seconds=1.0) if reason == "timeout" else LIMITS)
    assert result.reason == reason, result
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
        "keyctl=250 perf=298 faults=323 x32=1073741863",
        "aarch64": "ptrace=117 readv=270 writev=271 unshare=97 setns=268 bpf=280 shmget=194 "
        "keyctl=219 perf=241 faults=282",
    }[machine]
    code = f"""
    import ctypes, os
    c = ctypes.CDLL(None, use_errno=True)
    for call in "{numbers} uring=425 pidfd_getfd=438 memfd_secret=447 clone3=435".split():
        name, number = call.split("=")
        print(name, c.syscall(int(number), 0, 1, 0, 0, 0, 0), ctypes.get_errno())
    clone = {{"x86_64": 56, "aarch64": 220}}["{machine}"]
    for flag in (0x10000000, 0x20000, 0x40000000, 0x80):
        print("clone", c.syscall(clone, flag | 17, 0, 0, 0, 0), ctypes.get_errno())
    """
    result = play(code)
    lines = result.stdout.splitlines()
    assert lines.pop(-5) == "clone3 -1 38"
    assert len(lines) == len(numbers.split()) + 3 + 4
    assert {line.split(" ", 1)[1] for line in lines} == {"-1 1"}


@needs_sandbox
def test_a_list_of_limits_that_cannot_be_raised():
    code = """
    import resource
    for name in ("AS", "NPROC", "FSIZE", "CPU", "NOFILE"):
        kind = getattr(resource, "RLIMIT_" + name)
        try: resource.setrlimit(kind, (1 << 40, 1 << 40)); print("raised", name)
        except (ValueError, OSError): pass
    """
    assert (play(code).stdout, play(code).reason) == ("", "ok")


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


# ---- the process that asked ----------------------------------------------------------------------


@needs_sandbox
def test_it_dies_with_the_process_that_started_it(marked):
    code = f"""
from pathlib import Path
from jaxrl.envs import sandbox
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


@pytest.mark.skipif(
    os.getuid() != 0 or not os.path.exists("/usr/bin/python3") or bool(REFUSED),
    reason="needs root, to give it up, and a Python that others may start",
)
def test_a_user_without_rights_has_the_same_sandbox():
    """By a user namespace. The modules need no package, so any Python can run them."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "jaxrl", "envs")
        package.mkdir(parents=True)
        for name in ("sandbox.py", "jail.py", "seccomp.py"):
            (package / name).write_bytes(Path(sandbox.__file__).with_name(name).read_bytes())
        Path(folder).chmod(0o755)
        code = """
            import os
            from jaxrl.envs import sandbox
            sandbox.require()
            print(os.getuid(), sandbox.run("import os; os.setuid(0)").reason)
            limits = sandbox.Limits(seconds=0.5)
            print(sandbox.run("import os\\nwhile os.fork() or True: pass", limits=limits).reason)
        """
        command = ["/usr/bin/python3", "-c", textwrap.dedent(code)]
        user = {"user": 65534, "group": 65534, "extra_groups": []}
        ran = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=60, check=False, **user
        )
    assert (ran.stdout, ran.stderr) == ("65534 error\nerror\n", "")
    assert wait_for_none() == []


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
