"""What counts as done in a job; jobs that stand still are in cluster/test_stall.py."""

from types import SimpleNamespace

import jax

from jaxrl import activity
from jaxrl.parallel import watchdog


class Table:
    """The coordinator's, with one counter."""

    def __init__(self):
        self.total, self.gone = 0, False

    def key_value_increment(self, key, amount):
        self.total += amount
        return self.total

    def key_value_try_get(self, key):
        if self.gone:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE")
        return str(self.total)


def test_what_any_process_does_counts_once(monkeypatch):
    table = Table()
    monkeypatch.setattr(watchdog, "global_state", SimpleNamespace(client=table))
    job = watchdog._Job()

    def looks():
        return [job.progressed(), job.progressed()]

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


def test_a_compiled_program_counts():
    before = activity.progress()
    watchdog._listen(watchdog.COMPILED, 1.0)
    after = activity.progress()
    assert before != after
    watchdog._listen("/jax/core/compile/jaxpr_trace_duration", 1.0)
    assert activity.progress() == after
