"""Code of the user's at the events of a run, under SkyRL's names.

A callback gets `(trainer, callback_input, control)` at every event and may ask for a checkpoint, an
evaluation or the end of the run by `control`. It runs on the host, between the parts of a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl.functions import import_function
from jaxrl.types import TrainBatch

FIELD = "trainer.watching.callbacks"


@dataclass(frozen=True)
class CallbackInput:
    """Describe what an event is about; a field that is not of the event is None."""

    global_step: int  # finished steps; at on_step_start the step that begins
    epoch: int  # from 0
    total_steps: int
    steps_per_epoch: int
    batch: TrainBatch | None = None  # on_step_end
    metrics: dict[str, float] | None = None  # on_step_end, on_eval_end, on_alarm
    logs: dict[str, float] | None = None  # on_log: about to be written; it may be added to
    ckpt_path: str | None = None  # on_save
    alarms: tuple[str, ...] = ()  # on_alarm: their names


@dataclass
class TrainingControl:
    """Hold what callbacks ask for; heeded after the step, and should_save, should_evaluate once."""

    should_save: bool = False
    should_evaluate: bool = False
    should_stop: bool = False


class TrainingCallback:
    """React to the events of a run: derive from it and override those that you want.

    An exception of a callback ends the run: it is the user's code, as a loss is.

    Attributes:
        initial_state: what it keeps between steps, by name, with the first values (numbers or
            arrays): read by `trainer.memory`, changed by `trainer.remember`, in every checkpoint.
    """

    initial_state: Mapping[str, Any] = {}

    def on_train_start(self, trainer: Any, callback_input: CallbackInput, control: Any) -> None:
        """Run when weights are loaded and nothing is compiled."""

    def on_train_end(self, trainer: Any, callback_input: CallbackInput, control: Any) -> None:
        """Run after the last step, or a stop; not after an error or a signal."""

    def on_epoch_start(self, trainer: Any, callback_input: CallbackInput, control: Any) -> None:
        """Run before the first step over the prompts, once more."""

    def on_epoch_end(self, trainer: Any, callback_input: CallbackInput, control: Any) -> None:
        """Run after the last step of an epoch."""

    def on_step_start(self, trainer: Any, callback_input: CallbackInput, control: Any) -> None:
        """Run before the prompts are drawn."""

    def on_step_end(self, trainer: Any, callback_input: CallbackInput, control: Any) -> None:
        """Run when the weights are updated; evaluation, log and checkpoint of the step follow."""

    def on_eval_start(self, trainer: Any, callback_input: CallbackInput, control: Any) -> None:
        """Run before an evaluation."""

    def on_eval_end(self, trainer: Any, callback_input: CallbackInput, control: Any) -> None:
        """Run after an evaluation, with its metrics."""

    def on_save(self, trainer: Any, callback_input: CallbackInput, control: Any) -> None:
        """Run while a checkpoint is being written; its arrays are on the host."""

    def on_log(self, trainer: Any, callback_input: CallbackInput, control: Any) -> None:
        """Run before the numbers of a step go to the loggers."""

    def on_alarm(self, trainer: Any, callback_input: CallbackInput, control: Any) -> None:
        """Run when an alarm went off in this step (jaxrl only)."""


EVENTS = tuple(name for name in vars(TrainingCallback) if name.startswith("on_"))


def load_callbacks(paths: Sequence[str]) -> list[TrainingCallback]:
    """Make one of each class "my_pkg.my_module:MyCallback".

    Raises:
        ValueError: it cannot be imported or made, or is no `TrainingCallback`; names the path.
    """
    return [_load(path) for path in paths]


def _load(path: str) -> TrainingCallback:
    cls = import_function(path, FIELD)
    try:
        callback = cls()
    except Exception as error:
        raise ValueError(
            f"{FIELD}: {path!r}() raised {type(error).__name__}: {error}. It is made without "
            "arguments; one that needs some can be given by BasePPOExp.get_callbacks"
        ) from error
    if not isinstance(callback, TrainingCallback):
        raise ValueError(
            f"{FIELD}: {path!r} is a {type(callback).__name__}, not a "
            "jaxrl.records.callbacks.TrainingCallback; derive it from that"
        )
    return callback
