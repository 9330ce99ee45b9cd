"""`jaxrl.train` with what goes wrong in process 1 alone; the run's name says what."""

import sys

import jax
import numpy as np

from jaxrl import train
from jaxrl.parallel.processes import joined_main
from jaxrl.rollout.conversations.conversation import ConversationGenerator
from jaxrl.trainer import Trainer


class Away(ConversationGenerator):
    async def generate(self, batch):
        if jax.process_index() == 1:
            raise RuntimeError("the judge of process 1 is away")
        return await super().generate(batch)


class OtherBits(Trainer):
    def add_advantages(self, batch):
        batch = super().add_advantages(batch)
        if jax.process_index() == 1:
            batch = batch.replace(advantages=np.asarray(batch.advantages) + 1)
        return batch


class Faulty(train.BasePPOExp):
    def get_generator(self, engine, tokenizer):
        generator = super().get_generator(engine, tokenizer)
        if self.config.trainer.run_name == "reward":
            generator.__class__ = Away
        return generator

    def get_trainer(self, *args, **kwargs):
        kind = OtherBits if self.config.trainer.run_name == "bits" else Trainer
        return kind(*args, **kwargs)


if __name__ == "__main__":
    train.BasePPOExp = Faulty
    sys.exit(joined_main(train.main, sys.argv[1:]))
