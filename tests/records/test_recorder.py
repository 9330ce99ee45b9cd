"""What a whole run tells callbacks, alarms and the profiler, and whether its times add up."""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxrl import trainer
from jaxrl.records import progress, recorder
from jaxrl.records.callbacks import EVENTS, TrainingCallback, load_callbacks
from jaxrl.records.json_lines import read_lines
from jaxrl.records.phases import PHASES
from jaxrl.records.profiling import Profiler
from jaxrl.records.progress import timed
from jaxrl.records.recorder import Recorder, conversation_text
from jaxrl.rollout.server.agent_generator import AgentGenerator
from jaxrl.train import BasePPOExp, train
from tests.test_train import assert_bitwise_equal, small


def lines_of(folder):
    return read_lines(folder / "quickstart" / "metrics.jsonl")


def test_the_phases_of_a_run_are_nearly_all_of_its_time(finished):
    lines = lines_of(finished[0])
    wall = sum(line["timing/wall"] for line in lines)
    phases = sum(line.get(f"timing/{name}", 0.0) for line in lines for name in PHASES)
    assert phases + sum(line["timing/other"] for line in lines) == pytest.approx(wall)
    assert all(line["timing/other"] >= 0 for line in lines)


def test_what_waits_for_the_device_or_the_disk_is_in_a_phase(monkeypatch, tmp_path):
    """The clock of this run moves by 1 when its thread waits for one of them, and not else."""
    now, here = [0], threading.current_thread()

    def slow(owner, name):
        function = getattr(owner, name)

        def waits(*args, **kwargs):
            now[0] += threading.current_thread() is here
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, waits)

    slow(jax, "device_get")
    for name in ("__array__", "__float__"):
        slow(type(jax.numpy.zeros(())), name)
    for name in ("fsync", "replace"):
        slow(os, name)
    for name in ("open", "write_text"):
        slow(Path, name)
    clock = SimpleNamespace(**{**vars(time), "perf_counter": lambda: now[0]})
    for module in (progress, recorder, trainer):
        monkeypatch.setattr(module, "time", clock)

    train(small(tmp_path))
    lines = lines_of(tmp_path)
    assert [line["timing/other"] for line in lines] == [0] * len(lines)
    assert min(line["timing/wall"] for line in lines) > 10
    for phase in ("policy_train", "fwd_logprobs_values_reward", "ledger"):
        assert all(line[f"timing/{phase}"] > 0 for line in lines[1:])


def test_a_line_has_the_time_since_the_line_before(monkeypatch, tmp_path):
    """Steps of 8 s in two phases, a save of 3 s after each, 1 s in no phase."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    between: dict[str, float] = {}
    recorder = Recorder(small(tmp_path), total_steps=2, steps_per_epoch=2, seconds=between)
    recorder.start_clock()
    recorder.open(0)
    for step in (1, 2):
        metrics = {}
        for name, seconds in (("generate", 5), ("policy_train", 3)):
            with timed(metrics, name):
                clock[0] += seconds
        clock[0] += 1
        recorder.record(step, metrics)
        with timed(between, "save_checkpoints"):
            clock[0] += 3
    recorder.logger.close()
    first, second = lines_of(tmp_path)
    assert (first["timing/wall"], first["timing/other"]) == (9, 1)
    assert (second["timing/wall"], second["timing/other"]) == (12, 1)
    assert "timing/save_checkpoints" not in first
    assert second["timing/save_checkpoints"] == 3


def test_only_the_runs_own_conversations_keep_the_limits_of_the_config(finished, tmp_path):
    """A generator of the user's may have others; agents have their own."""

    class OfTheUsers(BasePPOExp):
        def get_generator(self, engine, tokenizer):
            return object()

    run, agents = OfTheUsers(small(tmp_path)), AgentGenerator(None, None, seconds=7200.0)
    assert finished[1].recorder.waits == 300.0  # environment.skyrl_gym.env_timeout_seconds
    assert [run._longest_wait(one) for one in (object(), agents)] == [None, 7200.0]


def test_the_metrics_of_a_run_have_the_diagnostics(finished):
    for line in lines_of(finished[0])[1:]:
        assert line["policy/ratio_min"] <= line["policy/ratio_p01"] <= line["policy/ratio_p50"]
        assert line["policy/ratio_p50"] <= line["policy/ratio_p99"] <= line["policy/ratio_max"]
        assert 0 < line["policy/effective_sample_size"] <= 1 + 1e-6
        assert line["policy/approx_kl"] >= 0
        assert 0 <= line["reward/zero_variance_ratio"] <= 1
        assert line["trainer/tflops_per_second_per_gpu"] > 0
        assert not any(value for name, value in line.items() if name.startswith("alarm/"))


class Witness(TrainingCallback):
    """Writes down what it is told."""

    def __init__(self):
        self.told = []
        for event in EVENTS:
            setattr(self, event, self._tell(event))

    def _tell(self, event):
        def tell(trainer, callback_input, control):
            self.told.append((event, callback_input))
            if event == "on_log":
                callback_input.logs["mine"] = 7.0
            if event == "on_step_end" and callback_input.global_step == 1:
                control.should_save = control.should_evaluate = True

        return tell


class WatchedExp(BasePPOExp):
    def get_callbacks(self):
        self.witness = Witness()
        return [self.witness]


@pytest.mark.slow
def test_an_alarm_may_stop_a_run_which_goes_on_as_if_nothing_had_happened(
    finished, tmp_path, capsys
):
    folder, whole = finished
    watching = {
        "trainer.watching.on_alarm": "stop",
        "trainer.watching.thresholds": {"mismatch_growth": -1.0},  # from the third step on
        "trainer.watching.trace_steps": [2],
        "trainer.watching.memory_steps": [2],
    }
    run = WatchedExp(small(tmp_path, **watching))
    stopped = run.run()
    assert int(stopped.state.step) == 3
    assert stopped.recorder.stopped_by_alarm
    assert "ALARM mismatch_growth at step 3" in capsys.readouterr().out
    told = [(event, about.global_step) for event, about in run.witness.told]
    assert told[:4] == [
        ("on_train_start", 0),
        ("on_eval_start", 0),
        ("on_eval_end", 0),
        ("on_log", 0),
    ]
    assert [event for event, at in told if at == 1] == [
        "on_epoch_start",
        "on_step_start",
        "on_step_end",
        "on_eval_start",
        "on_eval_end",
        "on_log",
        "on_save",
    ]
    assert [event for event, at in told if at == 3] == [
        "on_step_start",
        "on_step_end",
        "on_alarm",
        "on_log",
        "on_save",
        "on_train_end",
    ]
    about = dict(run.witness.told)
    assert about["on_alarm"].alarms == ("mismatch_growth",)
    assert about["on_save"].ckpt_path == str(tmp_path / "checkpoints" / "global_step_3")
    assert about["on_step_end"].batch.tokens.shape[0] == 16
    assert [line["mine"] for line in lines_of(tmp_path)] == [7.0] * 4
    profiles = tmp_path / "quickstart" / "profiles"
    assert (profiles / "memory" / "step_2.prof").stat().st_size > 0
    assert list(profiles.glob("traces/plugins/profile/*/*.xplane.pb"))
    resumed = BasePPOExp(small(tmp_path)).run()
    assert_bitwise_equal(resumed.state, whole.state)
    assert [line["step"] for line in lines_of(tmp_path)] == [0, 1, 2, 3, 4]


def test_neighbouring_steps_are_one_trace_and_another_trace_is_no_reason_to_stop(
    tmp_path, monkeypatch, capsys
):
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    profiler = Profiler(tmp_path, trace_steps=[2, 3, 5])
    for step in range(1, 5):
        profiler.start(step)
        profiler.stop(step)
        calls.append(step)
    profiler.start(5)
    profiler.close()  # the run ends within the step
    assert calls == [1, "start", 2, "stop", 3, 4, "start", "stop"]

    def busy(folder):
        raise RuntimeError("Only one profile may be run at a time.")

    monkeypatch.setattr(jax.profiler, "start_trace", busy)
    profiler = Profiler(tmp_path, trace_steps=[1])
    profiler.start(1)
    profiler.stop(1)
    assert "step 1 is not traced: Only one profile" in capsys.readouterr().err


class NeedsArgument(TrainingCallback):
    def __init__(self, value):
        self.value = value


class Letters:
    """A tokenizer whose ids are characters."""

    def decode(self, tokens):
        return "".join(map(chr, tokens))


def ids(text):
    return [ord(letter) for letter in text]


def test_a_sample_says_on_every_line_who_speaks():
    output = {
        "prompt_token_ids": [ids("sort\n3142>\n")],
        "response_ids": [ids("12no\n>34\n\ngiven | 5")],
        "loss_masks": [[1] * 2 + [0] * 4 + [1] * 13],
    }
    text = (
        "given | sort\ngiven | 3142>\nmodel | 12\ngiven | no\ngiven | >\nmodel | 34\nmodel | \n"
        "model | given | 5"
    )
    assert conversation_text(output, Letters()) == text
    # nothing is learnt from it: its tokens are the model's nevertheless
    output["token_versions"] = [[7] * 2 + [-1] * 4 + [7] * 13]
    output["loss_masks"] = [[0] * 19]
    assert conversation_text(output, Letters()) == text
    del output["token_versions"]
    assert conversation_text(output, Letters()).count("given | ") == 3  # two, and what it says


def test_callbacks_are_loaded_by_path():
    path = "tests.records.test_recorder"
    (callback,) = load_callbacks([f"{path}:Witness"])
    assert type(callback).__name__ == "Witness"
    for name, message in {
        "NeedsArgument": r"NeedsArgument'\(\) raised TypeError.*get_callbacks",
        "Nobody": r"has no function 'Nobody'",
        "lines_of": r"raised TypeError",
    }.items():
        with pytest.raises(ValueError, match=message):
            load_callbacks([f"{path}:{name}"])
    with pytest.raises(ValueError, match="is a count, not a"):
        load_callbacks(["itertools:count"])
