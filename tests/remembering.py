"""An estimator, a callback and a trainer that keep something between steps, for tests of runs."""

from jaxrl.records.callbacks import TrainingCallback
from jaxrl.registry import stateful
from jaxrl.train import BasePPOExp
from jaxrl.trainer import Trainer


@stateful(baseline=0.0, steps=0)
def running_baseline(state, batch, *, decay=0.5):
    """The reward of a row minus the mean of earlier steps, which is forgotten by halves."""
    rewards = (batch.token_level_rewards * batch.response_mask).sum(axis=-1)
    advantages = (rewards - state["baseline"])[:, None] * batch.response_mask
    baseline = decay * state["baseline"] + (1 - decay) * rewards.mean()
    return {"baseline": baseline, "steps": state["steps"] + 1}, advantages, advantages


class HalveEachStep(TrainingCallback):
    """Half the learning rate after each step; as if an evaluation had said so."""

    initial_state = {"lr_scale": 1.0, "best": [0.0, 0.0]}

    def on_step_end(self, trainer, callback_input, control):
        reward = callback_input.metrics["reward/avg_raw_reward"]
        best = trainer.memory["best"]
        trainer.remember(lr_scale=trainer.memory["lr_scale"] / 2, best=[best[1], reward])

    def on_log(self, trainer, callback_input, control):  # before a step's checkpoint, too
        callback_input.logs["lr_scale"] = float(trainer.memory["lr_scale"])


class RemembersWhileSaving(TrainingCallback):
    initial_state = {"saves": 0}

    def on_save(self, trainer, callback_input, control):
        trainer.remember(saves=trainer.memory["saves"] + 1)


class Curriculum(Trainer):
    """Prompts of the first rows, twice as many after each step."""

    initial_state = {"rows": 4}

    def next_prompts(self, step):
        rows, size = int(self.memory["rows"]), self.config.trainer.train_batch_size
        return [self.train_prompts[(self.batches_drawn + i) % rows] for i in range(size)]

    def add_advantages(self, batch):
        self.remember(rows=self.memory["rows"] * 2)
        return super().add_advantages(batch)


class CurriculumExp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        return Curriculum(*args, **kwargs)
