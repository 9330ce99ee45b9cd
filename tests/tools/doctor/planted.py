"""Faults of a user's code, each of which one check of the doctor must name."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.records.checkpoint import Checkpointer
from jaxrl.rollout.conversations.conversation import ConversationGenerator
from jaxrl.train import BasePPOExp
from jaxrl.trainer import Trainer


def microbatch_mean(log_probs, old_log_probs, advantages, config, loss_mask=None):
    """Divides by the tokens of the microbatch it sees."""
    return -advantages * log_probs / loss_mask.sum(), {}


def neighbours(log_probs, old_log_probs, advantages, config, loss_mask=None):
    """Takes the old log-probs of the row before."""
    return -advantages * jnp.exp(log_probs - jnp.roll(old_log_probs, 1, axis=0)), {}


def unmasked_mean(log_probs, old_log_probs, advantages, config, loss_mask=None):
    """Divides by B x T, padding included."""
    return -(advantages * log_probs).mean(), 0.0


def unmasked_baseline(log_probs, old_log_probs, advantages, config, loss_mask=None):
    """Its baseline is that of all tokens, sampled or not."""
    centred = advantages - advantages.mean()
    return -(centred * log_probs * loss_mask).sum() / loss_mask.sum(), 0.0


def padded_estimator(token_level_rewards, response_mask, index, **kwargs):
    """Its mean is over the columns of the batch."""
    advantages = token_level_rewards - token_level_rewards.mean()
    return advantages * response_mask, advantages


def rolled_estimator(token_level_rewards, response_mask, index, **kwargs):
    """Its baseline is the reward of the row before."""
    total = token_level_rewards.sum(-1, keepdims=True)
    advantages = (total - jnp.roll(total, 1, axis=0)) * response_mask
    return advantages, advantages


def moody(action):
    """A judge that throws dice."""
    return random.random()


_CALLS = itertools.count()


def alternating(action):
    """A judge that is generous every second time: a batch is a whole number of its periods."""
    return float(next(_CALLS) % 2)


_COUNTER = itertools.count()


def counting(action):
    """A judge that remembers how often it was asked."""
    return float(next(_COUNTER))


class StaleExp(BasePPOExp):
    """Its engine takes over the first weights and no others."""

    def get_engine(self, model, mesh):
        engine = super().get_engine(model, mesh)
        stale(engine)
        return engine


def stale(engine):
    take, held = engine.update_weights, []

    def update_weights(params, version):
        if not held:  # the trainer may donate them
            held.append(jax.tree.map(jnp.copy, params))
        take(held[0], version)

    engine.update_weights = update_weights


class LossyCheckpointer(Checkpointer):
    """Saves the optimizer's moments in bfloat16."""

    def save(self, step, state, meta, buffer=None):
        def rounded(x):
            return x.astype(jnp.bfloat16).astype(x.dtype) if x.dtype == jnp.float32 else x

        state = state.replace(opt_state=jax.tree.map(rounded, state.opt_state))
        return super().save(step, state, meta, buffer)


class ForgetfulCheckpointer(Checkpointer):
    """Leaves a field out."""

    def save(self, step, state, meta, buffer=None):
        zero = jax.device_put(np.int32(0), state.batches_drawn.sharding)
        return super().save(step, state.replace(batches_drawn=zero), meta, buffer)


class LossyTrainer(Trainer):
    def _build(self):
        super()._build()
        self.checkpointer.close()
        self.checkpointer = LossyCheckpointer(self.config.trainer.ckpt_path)


class LossyExp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        return LossyTrainer(*args, **kwargs)


class ExactTrainer(Trainer):
    """Its rows are as wide as the longest trajectory: a shape for every batch."""

    def collate(self, output):
        return exact(super().collate(output))


def exact(batch):
    longest = int(batch.lengths.max())
    return jax.tree.map(lambda x: x[:, :longest] if x.ndim > 1 else x, batch)


class ExactExp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        return ExactTrainer(*args, **kwargs)


class EverythingGenerator(ConversationGenerator):
    """Trains what the environment said, too."""

    async def generate(self, batch):
        output = await super().generate(batch)
        return {**output, "loss_masks": [[1] * len(r) for r in output["response_ids"]]}


class EverythingExp(BasePPOExp):
    def get_generator(self, engine, tokenizer):
        generator = super().get_generator(engine, tokenizer)
        generator.__class__ = EverythingGenerator
        return generator


class BrokenTrainer(Trainer):
    """Raises where advantages are made."""

    def add_advantages(self, batch):
        raise RuntimeError("no advantages today")


class BrokenExp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        return BrokenTrainer(*args, **kwargs)


class WrongScaleExp(BasePPOExp):
    """The sampler's scales of one matrix are a tenth too large, at every update alike."""

    def get_engine(self, model, mesh):
        engine = super().get_engine(model, mesh)
        programs = engine.programs
        load = programs.functions.load

        def wrong(params, *given):
            held = load(params, *given)
            first, *others = held["layers"]
            wo = first["wo"]
            first = first | {"wo": wo.replace(scale=1.1 * wo.scale)}
            return held | {"layers": (first, *others)}

        class Functions(type(programs.functions)):
            load = staticmethod(wrong)

        programs.functions = Functions(*programs.functions)
        return engine
