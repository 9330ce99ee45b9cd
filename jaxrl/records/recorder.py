"""The recorder of a training run: what the trainer tells it goes to the loggers, alarms, callbacks.

A line of `metrics.jsonl` covers the time from the line before it to this one: what follows the line
of a step, its checkpoint for one, is in the next.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax

from jaxrl import activity, config as cfg
from jaxrl.files import FolderError, replace_text
from jaxrl.parallel import agree, allgather, is_first, record_folder, watchdog
from jaxrl.parallel.compilation import CompilationWatch
from jaxrl.records.alarms import Alarm, Alarms
from jaxrl.records.callbacks import CallbackInput, TrainingControl
from jaxrl.records.display import display_of
from jaxrl.records.loggers import check_installed
from jaxrl.records.phases import PHASES
from jaxrl.records.profiling import Profiler, memory_metrics
from jaxrl.records.progress import timed
from jaxrl.records.run_folders import RunFolders
from jaxrl.records.run_logger import RunLogger
from jaxrl.signals import Ending
from jaxrl.types import GeneratorOutput, TrainBatch

Notify = Callable[[str, CallbackInput, TrainingControl], None]


class Recorder:
    """Record one run; a context while it trains, which closes everything.

    Args:
        config: resolved.
        total_steps, steps_per_epoch: of the run.
        seconds: what the trainer does between steps, `timing/<phase>`; the phases of a step are in
            its metrics.
        notify: (event, what it is about, control), tells the callbacks; None: there are none.

    Attributes:
        control: what callbacks and alarms ask for; stopped_by_alarm: the run ended for one.
        ended_by: number of the signal that ended it early, in whichever process; None = none.
        watch: counts compilations.
        display: what a person sees of the run.
        cards: by file name, written into the run folder when it is opened.
        folders: of the run, held; None = `open` takes them.

    Raises:
        ValueError: the package of a logger is not installed.
    """

    def __init__(
        self,
        config: cfg.TrainConfig,
        *,
        total_steps: int,
        steps_per_epoch: int,
        seconds: dict[str, float],
        notify: Notify | None = None,
    ) -> None:
        self.config, self.seconds, self.notify = config, seconds, notify
        self.total_steps, self.steps_per_epoch = total_steps, steps_per_epoch
        self.finished_steps = 0
        settings = config.trainer
        self.settings, self.folder = settings, record_folder(cfg.run_folder(settings))
        self.names = cfg.logger_names(settings.logger) if is_first() else []
        check_installed(self.names)
        self.display = display_of(
            settings.run_name, settings.watching.display, shown="console" in self.names
        )
        self.control, self.watch = TrainingControl(), CompilationWatch()
        self.alarms = Alarms(settings.watching.thresholds)
        self.profiler = Profiler(
            self.folder,
            settings.watching.trace_steps,
            settings.watching.memory_steps,
            every_memory=settings.policy.record_memory,
        )
        self.total: dict[str, float] = {}
        self.stopped_by_alarm = False
        self.ended_by: int | None = None
        self.cards: dict[str, str] = {}
        self.waits: float | None = None  # of `watchdog.watched`
        self.folders: RunFolders | None = None
        self._started = self._line = time.perf_counter()
        self._stack = contextlib.ExitStack()

    def start_clock(self) -> None:
        """Start the clock: the run begins here."""
        self._started = self._line = time.perf_counter()

    def open(self, first: int) -> Self:
        """Go on after `first` finished steps: cut the records to them, open the loggers.

        Raises:
            FolderError: see `RunFolders`; or the run folder cannot be written to.
        """
        settings, self.finished_steps = self.settings, first
        goes_on = first < self.total_steps  # else the records stay as they are
        if self.folders is None or self.folders.closed:
            self.folders = RunFolders(self.config)
        try:
            with timed(self.seconds, "log"):
                self.folders.own(first)
                self.logger = RunLogger(
                    self.folder,
                    self.names,
                    first,
                    config=cfg.get_config_as_dict(self.config) if goes_on else None,
                    project=settings.project_name,
                    run_name=settings.run_name,
                    read=self._read,
                )
                for name, text in self.cards.items() if is_first() and goes_on else ():
                    replace_text(self.folder / name, f"{text}\n")
        except FolderError:
            self.close()
            raise
        self.watch.warm_after = first + 1
        self.display.course.begin(first, self.total_steps)
        return self

    def _read(self, line: Mapping[str, float]) -> None:
        """Take in what was logged before a resumed run goes on."""
        step = int(line["step"])
        self.alarms.update(step, line)
        self.display.course.read(step, line)

    def show_card(self, name: str, whole: str, folded: Callable[[int], str]) -> None:
        """Show a card of what will be done, and keep it for the run folder.

        Args:
            name: of its file.
            folded: to so many columns; for who does not look into the log later.
        """
        self.cards[name] = whole
        self.display.card(whole, folded)

    def close(self) -> None:
        """Let go of the folders of the run."""
        if self.folders:
            self.folders.close()

    def check_folders(self) -> None:
        """Refuse to write checkpoints and exports into folders that another run has taken."""
        if self.folders:
            self.folders.check()

    def __enter__(self) -> Self:
        closed = map(contextlib.closing, (self, self.logger))
        stall = self.settings.cluster.stall_seconds
        noticed = watchdog.watched(stall, self.waits)
        for part in (*closed, self.display, self.watch, noticed):
            self._stack.enter_context(part)
        self._stack.callback(self.profiler.close)
        try:
            self.fire("on_train_start", self.finished_steps)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        try:
            if kind is None and self.ended_by is None:  # else the run goes on another time
                self.fire("on_train_end", self.finished_steps)
            if kind is None:
                with timed(self.seconds, "log"):
                    self.logger.plot()
            if kind is None and self.control.should_stop:
                activity.say("stopped early, as an alarm or a callback asked for")
        finally:
            self._stack.__exit__(kind, *error)
        self._say_times()

    # ---------------------------------------------------------------- the events of a step

    def begin_steps(self) -> None:
        """Have signals end the run after a step from now on, see `jaxrl.signals`."""
        saves = self.settings.ckpt_interval > 0
        ending = Ending(self.finished_steps + 1, self.total_steps, saves=saves)
        self.ending = self._stack.enter_context(ending)

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Keep records around the nine lines of a step while the block runs."""
        if self.folders:
            self.folders.refuse_if_lost()
        activity.begin_step(step)
        if (step - 1) % self.steps_per_epoch == 0:
            self.fire("on_epoch_start", step)
        self.fire("on_step_start", step)
        self.profiler.start(step)
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield
        self.profiler.stop(step)

    def end_step(self, step: int, metrics: dict[str, float], batch: TrainBatch | None) -> None:
        """Note that the weights are updated, and tell the callbacks."""
        self.finished_steps = step
        self.fire("on_step_end", step, metrics=metrics, batch=batch)
        if step % self.steps_per_epoch == 0:
            self.fire("on_epoch_end", step)

    def fire(self, event: str, step: int, **about: Any) -> None:
        """Tell the callbacks of an event."""
        if self.notify is None:
            return
        with timed(self.seconds, "callbacks"), activity.phase(event):
            per_epoch = self.steps_per_epoch
            epoch = max(step - 1, 0) // per_epoch
            what = CallbackInput(step, epoch, self.total_steps, per_epoch, **about)
            self.notify(event, what, self.control)

    def evaluate(
        self, step: int, evaluation: Callable[[int], dict[str, float]]
    ) -> dict[str, float]:
        """Evaluate, between the events of an evaluation."""
        self.fire("on_eval_start", step)
        metrics = evaluation(step)
        self.fire("on_eval_end", step, metrics=metrics)
        return metrics

    def print_example(
        self, step: int, batch: TrainBatch, output: GeneratorOutput, tokenizer: Any
    ) -> None:
        """Show the step's first trajectory."""
        with timed(self.seconds, "log"):
            reward = float(batch.rewards[0].sum())
            said = conversation_text(output, tokenizer)
            self.display.sample(f"--- step {step}, reward {reward:.3f}\n{said}")

    def flush(self) -> None:
        """Write the records to disk and draw the curve, before a checkpoint."""
        with timed(self.seconds, "log"):
            self.logger.plot()
            self.logger.flush()

    def take(self, request: str) -> bool:
        """Return whether `should_save` or `should_evaluate` was asked for since the last time.

        In the first process: all must do the same.
        """
        asked = getattr(self.control, request)
        setattr(self.control, request, False)
        return agree(asked)

    def stops(self) -> bool:
        """Return whether the run is to end after this step: of a signal any process may tell."""
        control, number = self.control, self.ending.asked_by(self.finished_steps)
        told = allgather((control.should_stop, self.stopped_by_alarm, number))
        control.should_stop, self.stopped_by_alarm, _ = told[0]
        self.ended_by = next((number for *_, number in told if number), None)
        return control.should_stop or self.ended_by is not None

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the numbers of a step: its own, the times since the last line, the alarms."""
        logs = {**metrics, **self._times(metrics), **self.watch.metrics(step), **memory_metrics()}
        alarms = self.alarms.update(step, logs)
        beyond = self.alarms.last_beyond
        logs |= {f"alarm/{name}": float(step == at) for name, at in beyond.items()}
        if alarms:
            self._heed(alarms, step, logs)
        self.fire("on_log", step, logs=logs)
        with timed(self.seconds, "log"):
            self.logger.log(step, logs)
            self.display.stepped(step, logs)

    def _heed(self, alarms: Sequence[Alarm], step: int, logs: dict[str, float]) -> None:
        """Print the alarms, and do what `on_alarm` asks for."""
        for alarm in alarms:
            self.display.alarm(str(alarm))
        asked = self.settings.watching.on_alarm
        self.stopped_by_alarm |= asked == "stop"
        self.control.should_save |= asked in ("checkpoint", "stop")
        self.control.should_stop |= asked == "stop"
        self.fire("on_alarm", step, metrics=logs, alarms=tuple(alarm.name for alarm in alarms))

    # ---------------------------------------------------------------- time

    def _times(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the phases since the last line, the time they were part of, and the rest of it."""
        now, seconds = time.perf_counter(), self.seconds
        wall, self._line = now - self._line, now
        keys = {name: f"timing/{name}" for name in PHASES}
        spent = {name: metrics.get(x, 0.0) + seconds.get(x, 0.0) for name, x in keys.items()}
        for name, value in spent.items():
            self.total[name] = self.total.get(name, 0.0) + value
        times = seconds | {"timing/wall": wall, "timing/other": wall - sum(spent.values())}
        seconds.clear()
        return times

    def _say_times(self) -> None:
        """Print where the time of the run went."""
        wall = max(time.perf_counter() - self._started, 1e-9)
        for name in PHASES:
            late = self.seconds.pop(f"timing/{name}", 0.0)  # after the last line
            self.total[name] = self.total.get(name, 0.0) + late
        shares = {name: x / wall for name, x in self.total.items() if x >= 0.01 * wall}
        shares["other"] = 1 - sum(shares.values())
        text = ", ".join(
            f"{name} {share:.0%}" for name, share in sorted(shares.items(), key=lambda x: -x[1])
        )
        activity.say(f"{wall:.1f} s: {text}")


def conversation_text(output: GeneratorOutput, tokenizer: Any) -> str:
    """Write the first trajectory as lines that say who speaks: "given | 3142>", "model | 12".

    Every line does: a model may write whatever a mark between two turns would be.
    """
    tokens = output["response_ids"][0]
    versions = output.get("token_versions")
    sampled = [version >= 0 for version in versions[0]] if versions else []
    if not any(sampled):  # nobody says; a mask is 0 also where nothing is to be learnt
        sampled = [bool(x) for x in output["loss_masks"][0]]
    if not any(sampled):
        sampled = [True] * len(tokens)
    pairs = zip(sampled, tokens, strict=True)
    parts = [("given", output["prompt_token_ids"][0])]
    for model, turn in itertools.groupby(pairs, lambda pair: pair[0]):
        parts.append(("model" if model else "given", [token for _, token in turn]))
    return "\n".join(
        f"{who} | {line}"
        for who, part in parts
        for line in tokenizer.decode(part).removesuffix("\n").split("\n")
    )
