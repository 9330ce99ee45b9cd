"""What counts as done in a job, and how long nothing may be; a run that stands still says so.

Jobs that do, and are started again, are in cluster/test_stall.py.
"""

import os
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import jax
import pytest

from jaxrl import activity
from jaxrl.parallel import watchdog
from tests.jobs import ROOT


class Table:
    """The coordinator's, with one counter."""

    def __init__(self):
        self.total, self.gone, self.limits = 0, False, {}

    def key_value_increment(self, key, amount):
        self.total += amount
        return self.total

    def key_value_set(self, key, value, allow_overwrite):
        assert allow_overwrite
        self.limits[key] = value

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in self.limits.items() if key.startswith(folder)]

    def key_value_try_get(self, key):
        if self.gone:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE")
        return str(self.total)


def test_what_any_process_does_counts_once(monkeypatch):
    table = Table()
    state = SimpleNamespace(client=table, process_id=0)
    monkeypatch.setattr(watchdog, "global_state", state)
    job = watchdog._Job()

    def looks():
        return [job.progressed(300.0), job.progressed(300.0)]

    assert looks() == [True, False]  # the first knows of nothing before
    activity.progressed()
    assert looks() == [True, False]
    assert table.total == 2
    with activity.doing("rollouts", 8) as rollouts:
        assert looks() == [True, False]
        rollouts.done += 1
        assert looks() == [True, False]
    assert looks() == [True, False]
    table.total += 1  # of another process
    assert looks() == [True, False]
    table.gone = True
    assert looks() == [False, False]
    activity.progressed()
    table.gone = False
    assert looks() == [True, False]


def test_the_limit_of_a_job_is_the_longest_of_its_processes(monkeypatch):
    """One waits in a phase that is always short for another one, which compiles."""
    table = Table()
    jobs = {}
    for process, own in ((0, 300.0), (1, 3600.0)):
        state = SimpleNamespace(client=table, process_id=process)
        monkeypatch.setattr(watchdog, "global_state", state)
        jobs[process] = watchdog._Job()
        jobs[process].progressed(own)
    assert [jobs[i].limit(own) for i, own in ((0, 300.0), (1, 3600.0))] == [3600.0, 3600.0]
    jobs[1].progressed(400.0)  # it is done
    assert jobs[0].limit(300.0) == 400.0
    table.limits.clear()  # as of a coordinator that was asked before anybody has told it
    assert jobs[0].limit(300.0) == 300.0


@pytest.mark.parametrize(
    ("given", "longest", "waits", "seconds"),
    [
        (None, None, 0.0, 3600.0),  # the first of its kind, or something compiles
        (None, 0.0, 0.0, 300.0),  # at least
        (None, 29.0, 0.0, 300.0),
        (None, 90.0, 0.0, 900.0),  # ten times
        (None, 0.0, 300.0, 360.0),  # an environment that never returns is the run's to end
        (None, 90.0, 300.0, 900.0),
        (None, None, 7200.0, 7260.0),
        (45, None, 300.0, 45.0),  # as trainer.cluster.stall_seconds says
        (7200, 1.0, 0.0, 7200.0),
    ],
)
def test_how_long_nothing_may_be_done(given, longest, waits, seconds):
    assert watchdog.limit(given, longest, waits) == seconds


def test_a_phase_is_known_once_it_has_ended(monkeypatch):
    place = SimpleNamespace(step=0, phases=[], count=0, known=set())
    monkeypatch.setattr(activity, "_place", place)
    assert (activity.kind(), activity.is_known("")) == ("", False)
    activity.begin_step(1)
    assert not activity.is_known("")
    with activity.phase("generate"):
        assert (activity.kind(), activity.is_known("generate")) == ("generate", False)
    assert activity.is_known("generate")
    activity.begin_step(2)
    assert activity.is_known("")


def test_the_limits_of_phases(monkeypatch):
    """Of a run whose environments may take 600 s, after a first step."""
    kinds = {"generate", "policy_train", "save_checkpoints"}
    place = SimpleNamespace(step=1, phases=[], count=0, known=kinds)
    monkeypatch.setattr(activity, "_place", place)
    monkeypatch.setattr(watchdog._state, "waits", 600.0)
    longest = {"generate": 20.0, "policy_train": 40.0, "save_checkpoints": 1.0}
    kinds = "generate", "policy_train", "eval", "save_checkpoints"
    found = [watchdog._limit_of(kind, None, longest) for kind in kinds]
    assert found == [660.0, 400.0, 3600.0, 3600.0]  # no evaluation yet; storage may be slow
    place.known.add("on_step_end")  # a callback that is short at most steps
    assert watchdog._limit_of("on_step_end", None, longest | {"on_step_end": 0.1}) == 3600.0
    assert watchdog._limit_of("save_checkpoints", 45, longest) == 45
    monkeypatch.setattr(watchdog, "_compiles", lambda: True)
    assert watchdog._limit_of("policy_train", None, longest) == 3600.0


@pytest.mark.parametrize(("given", "seconds"), [(None, 3602.0), (40.0, 42.0)])
def test_a_process_that_is_stopped_for_minutes_is_not_ended(monkeypatch, given, seconds):
    """The timer's clock goes on then, and the limit of the phase may be of minutes."""
    monkeypatch.setattr(watchdog, "_limit_of", lambda *_: given or 300.0)
    stop, timers = threading.Event(), []

    def arm(timeout, file):
        timers.append(timeout)
        stop.set()

    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", arm)
    watchdog._look_until(stop, given, ends=True)
    assert timers == [seconds]


def test_what_a_thread_compiles_is_seen():
    """JAX says it when it is done; before that it asks the cache on disk, within its compiler."""
    seen = []

    def listen(event, **_):
        if event == "/jax/compilation_cache/compile_requests_use_cache":
            seen.append(watchdog._compiles())

    jax.monitoring.register_event_listener(listen)
    try:
        jax.jit(lambda x: x + 1.2345)(1.0)
    finally:
        jax.monitoring.unregister_event_listener(listen)
    assert seen == [True]
    assert not watchdog._compiles()


STANDS_STILL = """
import threading, time
from jaxrl import activity
from jaxrl.parallel import watchdog
from jaxrl.parallel.processes import joined_main
watchdog.FIRST_SECONDS, watchdog.LEAST_SECONDS, watchdog.SECONDS_BETWEEN = 1000.0, 0.4, 0.02
watchdog.STAY_SECONDS = 0.0
said = threading.Event()
say = watchdog._say
def saying(*given):
    say(*given)
    said.set()
watchdog._say = saying

def main(argv):
    with watchdog.watched(None, 0.0):
        for step in (1, 2):
            activity.begin_step(step)
            with activity.phase("policy_train"):
                if step == 2:
                    said.wait()
                    said.clear()
                    said.wait()  # at twice the time again
    print("done")
    return 0

raise SystemExit(joined_main(main, []))
"""


@pytest.mark.parametrize("environment", [{}, {"JAXRL_STALL_SECONDS": "auto"}])
def test_a_run_that_stands_still_says_where_and_goes_on_waiting(environment):
    """In a process that nobody would start again; who does asks for its end."""
    done = subprocess.run(
        [sys.executable, "-c", STANDS_STILL],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    signs = re.findall(
        r"^stalled: process 0 on \S+: policy_train of step 2, nothing done for \d+ s "
        r"\(trainer.cluster.stall_seconds=None, here \d+\)$",
        done.stderr,
        re.MULTILINE,
    )
    assert re.search(r'File "<string>", line \d+ in main\n', done.stderr)
    if environment:
        assert (done.returncode, done.stdout, len(signs)) == (75, "", 1)
    else:
        assert (done.returncode, done.stdout, len(signs)) == (0, "done\n", 2)


def test_a_compiled_program_counts():
    before = activity.progress()
    watchdog._listen(watchdog.COMPILED, 1.0)
    after = activity.progress()
    assert before != after
    watchdog._listen("/jax/core/compile/jaxpr_trace_duration", 1.0)
    assert activity.progress() == after
