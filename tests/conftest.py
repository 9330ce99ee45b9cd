"""Tests run on the CPU with eight host devices: every mesh of up to eight devices is real."""

import gc
import os
import tempfile
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

from tests import quick_compile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + f" --xla_force_host_platform_device_count=8 {quick_compile.FLAGS}"
)
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# One cache for all processes of a run: many tests build the same trainer again.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="jaxrl_tests_")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import jax  # noqa: E402

from jaxrl import activity  # noqa: E402

# Now: whoever asks first for the devices decides how many there are, and some tests set XLA_FLAGS.
assert jax.device_count() == 8


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    """Mark slow what `some` leaves out: all cases of a function but so many, spread evenly."""
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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give a file to one process, and all that share the Ray cluster to the same."""

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "tests/cluster" if file.startswith("tests/cluster/") else file

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
    """Forget compiled programs once there are many.

    Each holds memory maps, of which Linux gives a process 65,530; when they are used up, the next
    compilation is a segmentation fault. And each holds memory.
    """
    yield
    maps, sizes = Path("/proc/self/maps"), Path("/proc/self/statm")
    if not maps.exists():
        return
    resident = int(sizes.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if len(maps.read_text().splitlines()) > 20_000 or resident > 3 * 2**30:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module")
def as_users_compile():
    """Compile as users do: the tests leave most optimisations out, and are quicker for it."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
