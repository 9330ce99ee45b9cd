"""Tests run on the CPU with eight host devices: every mesh of up to eight devices is real."""

import contextlib
import ctypes
import functools
import gc
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

from tests import quick_compile
from tests.seconds import Seconds, recorded

# What a test starts would compile all that it imports anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + f" --xla_force_host_platform_device_count=8 {quick_compile.FLAGS}"
)
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# One cache for all processes of a run: many tests build the same trainer again. CI keeps one from
# run to run (`.ci/run`), where programs lie under hashes of their text, of jaxlib and its flags;
# there small ones are worth writing, too, which costs a twentieth more where the cache is empty.
LEAST_SECONDS = "0.2"
if kept := os.environ.get("JAXRL_TEST_CACHE"):
    os.environ["JAX_COMPILATION_CACHE_DIR"], LEAST_SECONDS = kept, "0"
elif "PYTEST_XDIST_WORKER" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="jaxrl_tests_")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = LEAST_SECONDS
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import jax  # noqa: E402

from jaxrl import activity  # noqa: E402

# Tracing makes objects that stay: looking for rubbish among them as often as Python does by itself
# takes a quarter of its time.
gc.set_threshold(100_000, 20, 50)

# Now: whoever asks first for the devices decides how many there are, and some tests set XLA_FLAGS.
assert jax.device_count() == 8


def pytest_addoption(parser):
    """Let a run be written down, or be of another schedule."""
    parser.addoption("--write-seconds", action="store_true", help="write tests/seconds.txt")
    parser.addoption(
        "--ahead",
        action="store_true",
        help="engines begin a block before they have the last one, as on accelerators",
    )


def pytest_configure(config):
    """Add up the seconds of each file, where the tests are reported; set the engines' schedule."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Seconds(config.getoption("--write-seconds")))
    if config.getoption("--ahead"):
        from jaxrl.rollout.native.engine import NativeEngine

        defaults = NativeEngine.__init__.__kwdefaults__
        assert defaults is not None and defaults["ahead"] is None
        defaults["ahead"] = True


@functools.cache
def scope_of(file):
    """What one process runs: a file, or all files that share what takes long to make.

    Those are the Ray cluster, the programs of the training service, and those of whole runs.
    """
    for folder in ("tests/cluster/", "tests/tools/tinker/"):
        if file.startswith(folder):
            return folder
    text = Path(file).read_text() if Path(file).is_file() else ""
    whole_runs = re.search(
        r"tests\.test_train import .*\bsmall\b|def test_\w+\(.*\bfinished\b", text
    )
    return "tests/test_train.py" if whole_runs else file


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    """Bring tests into their order, and mark slow what `some` leaves out.

    First what `make check` runs, then the longest files. Of the cases of a function that has `some`
    all but so many are slow, spread evenly.
    """
    seconds = Counter()
    for file, spent in recorded().items():
        seconds[scope_of(file)] += spent

    def order(item):
        scope = scope_of(item.nodeid.partition("::")[0])
        return item.get_closest_marker("check") is None, -seconds[scope], scope

    items.sort(key=order)
    functions = {}
    for item in items:
        if item.get_closest_marker("some") and not item.get_closest_marker("slow"):
            functions.setdefault(item.function, []).append(item)
    for cases in functions.values():
        count = cases[0].get_closest_marker("some").args[0]
        kept = {i * len(cases) // count for i in range(count)}
        for i, item in enumerate(cases):
            if i not in kept:
                item.add_marker("slow")


def pytest_collection_finish():
    """Keep what was imported out of Python's garbage collections.

    A run does so for itself where nobody has (`trainer.out_of_collections`), and walks through all
    that there is before: 0.8 s for each.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give what one process runs to one, in the order of the items."""
    config.option.loadscopereorder = False

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return scope_of(nodeid.partition("::")[0])

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Folder and trainer of one uninterrupted run, for the tests of whole runs."""
    from jaxrl.train import train
    from tests.test_train import small

    folder = tmp_path_factory.mktemp("run")
    return folder, train(small(folder))


@pytest.fixture(autouse=True)
def _everything_is_printed():
    """Undo what the displays of a test set: each decides for its whole process what is said."""
    yield
    activity.show(activity.FULL)


@pytest.fixture(scope="module", autouse=True)
def _few_programs():
    """Forget compiled programs once there are many: other files may want the same ones.

    Each holds memory maps, of which Linux gives a process 65,530; when they are used up, the next
    compilation is a segmentation fault. And each holds memory.
    """
    yield
    if not Path("/proc/self/maps").exists():
        return
    if _memory_maps() > 40_000 or _resident() > 3 * 2**30:
        _give_back()
    if _memory_maps() > 40_000 or _resident() > 3 * 2**30:
        jax.clear_caches()
        gc.collect()
        _give_back()


def _memory_maps():
    return len(Path("/proc/self/maps").read_text().splitlines())


def _resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _give_back():
    """Give memory back that was freed: glibc keeps it, which looks as if it were still needed."""
    with contextlib.suppress(AttributeError):  # another library of C
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="module")
def as_users_compile():
    """Compile as users do: the tests leave most optimisations out, and are quicker for it."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.clear_caches()  # a program that is there is taken however it was compiled
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()
