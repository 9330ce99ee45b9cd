"""SIGTERM and Ctrl-C end a run after the step that is being done; nothing of it is lost."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from jaxrl.audit import audit
from jaxrl.signals import Ending, Interrupted, Terminated
from jaxrl.train import BasePPOExp, exit_status, for_scripts, train
from jaxrl.trainer import Trainer
from tests.test_train import assert_bitwise_equal, metric_lines, small

NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


@pytest.fixture(autouse=True)
def handlers():
    """Those of a program that sets none: shells have jobs behind ignore Ctrl-C."""
    wanted = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    yield wanted
    after = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert after == wanted  # a run leaves them as they were


def signalled(*numbers):
    """An experiment to which signals come in the update of step 3, as from outside."""

    class SignalledTrainer(Trainer):
        def update(self, batch, step):
            for number in numbers if step == 3 else ():
                os.kill(os.getpid(), number)
            super().update(batch, step)

    class SignalledExp(BasePPOExp):
        def get_trainer(self, *args, **kwargs):
            return SignalledTrainer(*args, **kwargs)

    return SignalledExp


def steps_of_checkpoints(folder):
    names = [path.name for path in (folder / "checkpoints").glob("global_step_*")]
    return sorted(int(name.removeprefix("global_step_")) for name in names)


@pytest.mark.parametrize("number", list(NAMES))
def test_a_run_ends_after_the_step_and_goes_on_with_the_same_bits(
    finished, tmp_path, capfd, number
):
    folder, whole = finished
    assert exit_status(signalled(number), small(tmp_path)) == 128 + number
    said = capfd.readouterr().err.splitlines()
    name = NAMES[number]
    assert f"{name}: ends after step 3 with a checkpoint; once more ends it at once" in said
    assert said[-1] == f"{name}: ended after step 3; the same command resumes after step 3"
    assert steps_of_checkpoints(tmp_path) == [2, 3]
    assert metric_lines(tmp_path) == metric_lines(folder)[:4]
    assert not (tmp_path / "exports" / "global_step_3").exists()
    if number == signal.SIGINT:
        return
    resumed = train(small(tmp_path))
    assert metric_lines(tmp_path) == metric_lines(folder)
    assert_bitwise_equal(resumed.state, whole.state)
    assert not any(result.failures for result in audit(tmp_path / "quickstart"))
    assert steps_of_checkpoints(tmp_path) == [3, 4]  # of max_ckpts_to_keep=2 it is one
    assert sorted(path.name for path in (tmp_path / "exports").glob("global_step_*")) == sorted(
        path.name for path in (folder / "exports").glob("global_step_*")
    )


@pytest.mark.parametrize("number", list(NAMES))
def test_a_run_method_that_calls_train_ends_in_the_same_way(tmp_path, capfd, number):
    """As in jobs of scripts: `for_scripts` leaves what a signal does to the command."""

    class OfAScript(signalled(number)):
        def run(self):
            return for_scripts(super().run)()

    settings = {"trainer.eval_interval": -1}
    assert exit_status(OfAScript, small(tmp_path, **settings)) == 128 + number
    said = [line for line in capfd.readouterr().err.splitlines() if ": ended after" in line]
    end = "ended after step 3; the same command resumes after step 3"
    assert said == [f"{NAMES[number]}: {end}"]


def test_a_second_signal_ends_it_at_once(tmp_path):
    """Of Ctrl-C every one counts; SIGTERM comes twice where the launcher passes it on, too."""
    settings = {"trainer.eval_interval": -1}
    with pytest.raises(KeyboardInterrupt, match="resumes after step 2") as raised:
        exit_status(signalled(*[signal.SIGTERM] * 2, signal.SIGINT), small(tmp_path, **settings))
    assert not isinstance(raised.value, Interrupted)
    assert steps_of_checkpoints(tmp_path) == [2]


def test_a_run_without_checkpoints_writes_none_and_says_so(tmp_path, capfd):
    settings = {"trainer.ckpt_interval": -1, "trainer.eval_interval": -1}
    assert exit_status(signalled(signal.SIGTERM), small(tmp_path, **settings)) == 143
    said = capfd.readouterr().err.splitlines()
    assert said[-2:] == [
        "SIGTERM: ends after step 3 without one (trainer.ckpt_interval=-1); once more ends it at "
        "once",
        "SIGTERM: ended after step 3; there is no checkpoint yet: the same command starts again "
        "from the beginning",
    ]
    assert steps_of_checkpoints(tmp_path) == []


def test_a_script_is_told_by_an_exception(tmp_path):
    """Else it would take a run that a signal has ended for one that is done."""
    settings = {"trainer.eval_interval": -1, "trainer.max_training_steps": 3}
    with pytest.raises(Terminated, match="^SIGTERM: ended after step 3$") as raised:
        signalled(signal.SIGTERM)(small(tmp_path, **settings)).run()
    assert raised.value.code == 143


def test_rays_handler_is_replaced_and_put_back():
    """It exits at once; `ray.init` sets it in a run whose environments are actors."""

    def handler(number, frame):
        sys.exit(number)

    handler.__module__ = "ray._private.worker"
    signal.signal(signal.SIGTERM, handler)
    with Ending(1, 4, saves=True) as ending:
        os.kill(os.getpid(), signal.SIGTERM)
        assert ending.asked_by(1) == signal.SIGTERM
    assert signal.signal(signal.SIGTERM, signal.SIG_DFL) is handler


def test_handlers_of_the_program_and_other_threads_are_left_alone(handlers):
    received = []
    signal.signal(signal.SIGTERM, lambda *_: received.append("mine"))
    with Ending(1, 4, saves=True) as ending:
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == ["mine"]
        assert ending.asked_by(1) is None
        assert signal.getsignal(signal.SIGINT) != signal.default_int_handler
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def run():
        with Ending(1, 4, saves=True):
            seen.append({number: signal.getsignal(number) for number in handlers})

    seen = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [handlers]


CODE = """
import os, signal, sys
from jaxrl import signals
signals.SAME_SECONDS = 0.0
ending = signals.Ending(7, 9, saves=True)
with signals.before_sigterm(lambda: os.write(1, b"left")), ending:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == signal.SIGTERM  # without a word: it has no run
        os.kill(os.getpid(), signal.SIGTERM)
        assert ending.asked_by(7) == signal.SIGTERM
        {}
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("what", "status", "said"),
    [
        ("ending.leave(7, None)", 143, ""),  # as the run does, at its end
        ("", -signal.SIGTERM, "left"),  # a second one: what the display left is mended
    ],
)
def test_what_took_the_signal_before_has_the_second(what, status, said):
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(what)], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (status, said)
    line = "SIGTERM: ends after step 7 with a checkpoint; once more ends it at once\n"
    assert done.stderr == line
