"""What macOS and Windows can run on the CPU, here with Linux' modules and calls taken away.

The standard library and the packages were imported before they go: these have ways of their own on
each system. What is not shown: real files, sockets and processes of Windows.
"""

import os
import subprocess
import sys

import pytest

from tests.jobs import ROOT

TINY = [
    f"--config={ROOT / 'configs' / 'quickstart.py'}",
    "--config.trainer.run_name=tiny",
    "--config.trainer.max_training_steps=2",
    "--config.trainer.train_batch_size=4",
    "--config.trainer.policy_mini_batch_size=4",
    "--config.generator.n_samples_per_prompt=4",
    "--config.trainer.eval_interval=-1",
]

HIDE = """
import asyncio, importlib, importlib.abc, multiprocessing, os, pkgutil, signal, ssl
import subprocess, sys, tempfile, warnings
import aiohttp, fsspec, jax, matplotlib.pyplot, orbax.checkpoint, psutil, pyarrow, tensorboardX
import transformers

GONE = {
    *("curses", "fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog"),
    *("termios", "tty"),
}


class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in GONE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


for name in GONE:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Hide())
for module, names in {
    os: "fork forkpty geteuid getgid getloadavg getpgid getuid killpg mkfifo nice "
    "sched_getaffinity setsid statvfs sysconf uname wait3",
    signal: "SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGSTOP SIGUSR1 SIGUSR2 alarm setitimer",
}.items():
    for name in names.split():
        delattr(module, name)
if hasattr(os, "process_cpu_count"):  # Python 3.13: of sched_getaffinity, where there is one
    os.process_cpu_count = os.cpu_count
sys.platform = "win32"
"""

IMPORT = """
import jaxrl

for info in pkgutil.walk_packages(jaxrl.__path__, "jaxrl."):
    # the jail is a program of the sandbox; extras need not be here
    if info.name.endswith(("__main__", ".jail")) or ".wire." in info.name:
        continue
    importlib.import_module(info.name)
print("imported")
"""

RUN = """
from jaxrl import audit, report, train
from jaxrl.cluster import launch
from jaxrl.envs.sandbox import sandbox
from jaxrl.envs.tasks import math_checker
from jaxrl.files import FolderError
from jaxrl.records.lease import FolderLock, process_start

warnings.filterwarnings("error", category=EncodingWarning, module=r"jaxrl\\.")
assert train.main(sys.argv[1:]) == 0
assert report.main(["runs/tiny"]) == 0
assert audit.main(["runs/tiny"]) == 0
assert process_start(os.getpid()) and process_start(2**22 + 1) is None
held = FolderLock("here")
try:
    FolderLock("here")
except FolderError as error:
    print("LOCK", error)
held.close()
FolderLock("here").close()
for refused in (sandbox.require, math_checker.require):
    try:
        refused()
    except (ImportError, sandbox.SandboxError) as error:
        print("REFUSED", error)
assert launch.main(["--local-processes=2", *sys.argv[1:]]) == 2
"""


def run(program, folder, *arguments):
    """What a program prints on a machine that has nothing of Linux."""
    flags = ["-X", "warn_default_encoding", "-c", HIDE + program]
    done = subprocess.run(
        [sys.executable, *flags, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


def test_every_module_can_be_imported(tmp_path):
    assert run(IMPORT, tmp_path)[0].splitlines()[-1] == "imported"


@pytest.mark.slow
def test_a_run_its_report_and_its_audit_need_nothing_of_linux(tmp_path):
    out, err = run(RUN, tmp_path, *TINY)
    assert (tmp_path / "runs" / "tiny" / "report.html").is_file()
    assert (tmp_path / "runs" / "tiny" / "checkpoints" / "global_step_2").is_dir()
    said = [line for line in out.splitlines() if line.startswith(("LOCK", "REFUSED"))]
    assert "LOCK another run goes on in here: the run here (process" in said[0]
    assert said[1].startswith("REFUSED the sandbox needs Linux on one of x86_64")
    assert said[2] == (
        "REFUSED the environment 'math' needs Linux or macOS, for its time limit; this is win32"
    )
    assert (
        "error: the launcher needs Linux or macOS, for its process groups; this is win32. "
        "python -m jaxrl.train runs here, in one process"
    ) in err
