"""A callback that asks the policy in every process of a job."""

import os
from pathlib import Path

import jax

from jaxrl.records.callbacks import CallbackInput, TrainingCallback, TrainingControl


class Asks(TrainingCallback):
    """Writes the answer after each step to ANSWERS/<process>."""

    def on_step_end(self, trainer, callback_input: CallbackInput, control: TrainingControl):
        with Path(os.environ["ANSWERS"], str(jax.process_index())).open("a") as file:
            file.write(f"{trainer.answer('sort 312')!r}\n")


ASKS = {"trainer.watching.callbacks": "['tests.answers:Asks']"}
