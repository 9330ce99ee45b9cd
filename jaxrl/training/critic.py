"""The critic of a run: a transformer of its own weights that values states.

Schulman et al., 2017, https://arxiv.org/abs/1707.06347. Its values of a batch are made before the
advantages, from the weights at the start of the step; then it learns the returns, in minibatches of
its own.
"""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import config as cfg
from jaxrl.models import hf
from jaxrl.models.export import save_pretrained
from jaxrl.models.linear import merge
from jaxrl.models.lora import TRAINED_WHOLE, LoraConfig, attach, lora_config
from jaxrl.models.transformer import (
    Params,
    TransformerConfig,
    abstract_params,
    describe,
    init_params,
    logical_axes,
)
from jaxrl.parallel import Placement, param_shardings, replicated
from jaxrl.parallel.checksums import checksums
from jaxrl.parallel.offload import host_shardings, on_device
from jaxrl.training.build import assemble_critic_update, make_forward_pass, place_beside
from jaxrl.training.objective import step_metrics
from jaxrl.training.optim import init_state, new_critic_state
from jaxrl.training.update import minibatches_of_step
from jaxrl.types import CriticState, TrainBatch


class Critic:
    """Hold what is compiled or placed once for the critic; its state is the caller's.

    With adapters (`trainer.critic.model.lora`) these and the head are the state; `base` is read
    once and never changes.

    Args:
        config: resolved and validated, with a `trainer.critic.model.path`.
        policy: placement of the policy.
        tokens: in the tokenizer.
        total_steps: of the run.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: the critic has a smaller vocabulary, does not fit its mesh, or lacks the
            matrices that are to have adapters.
    """

    def __init__(
        self, config: cfg.TrainConfig, policy: Placement, tokens: int, total_steps: int
    ) -> None:
        self.trainer = trainer = config.trainer
        self.model = critic_model(trainer, tokens)
        self.lora = lora_config(trainer.critic.model.lora, self.model, "critic")
        self.trained = self.lora or self.model
        self.base: Params | None = None
        self.placement = place_beside("critic", trainer, self.model, policy)
        self.forward_pass = make_forward_pass(config, self.model, self.placement, "critic")
        self.optimizer, self.like, self.updater = assemble_critic_update(
            config, self.forward_pass, self.placement, total_steps, self.trained
        )
        self.minibatch_rows = trainer.critic_mini_batch_size * config.generator.n_samples_per_prompt

    def describe(self) -> dict[str, Any]:
        """Return what a checkpoint of this critic must agree with; read the base, if any."""
        if self.lora is None:
            return describe(self.model)
        self.base = self._load()
        return describe(self.lora) | {"base": checksums(self.base)}

    def size(self) -> str:
        """Say how much is trained, in words."""
        count, whole = (
            sum(x.size for x in jax.tree.leaves(abstract_params(model)))
            for model in (self.trained, self.model)
        )
        if self.lora is None:
            return f"all {whole:,} parameters"
        return (
            f"{count:,} parameters, the head and adapters of rank {self.lora.rank} for "
            f"{len(self.lora.modules)} matrices of a model of {whole:,}"
        )

    def initial(self) -> CriticState:
        """Return the state at the start of a run, from the folder of the config."""
        shardings, whole = self._shardings(self.trained), replicated(self.placement.mesh)
        if self.lora is None:
            params = on_device(self._load())
        else:
            assert self.base is not None  # read by `describe`
            head = jnp.copy(on_device(self.base[TRAINED_WHOLE]))  # the state is donated
            params = init_params(self.lora, self.trainer.seed, shardings) | {TRAINED_WHOLE: head}
        return init_state(self.optimizer, params, shardings, whole, new=new_critic_state)

    def whole(self, trained: Params) -> Params:
        """Return all parameters of the critic, from those that are trained; nothing is copied."""
        if self.lora is None:
            return trained
        assert self.base is not None  # read by `describe`
        return attach(self.lora, self.base, trained)

    def values(self, state: CriticState, batch: TrainBatch) -> np.ndarray:
        """Return the value of the state before each response token [B, T], 0 elsewhere."""
        (values,) = self.forward_pass(on_device(self.whole(state.params)), batch.replace(kept=None))
        return values * np.asarray(batch.response_mask)

    def update(
        self, state: CriticState, batch: TrainBatch, step: int
    ) -> tuple[CriticState, dict[str, float]]:
        """Make all updates of a step; `state` is donated.

        Args:
            batch: with values and returns.

        Returns:
            The state; metrics under SkyRL's names, and `critic/explained_variance`, 1 - var(returns
            - values) / var(returns) over the sampled tokens, of the values before the updates.
        """
        parts = minibatches_of_step(
            without_policy(batch),
            prompts=self.trainer.critic_mini_batch_size,
            passes=self.trainer.update_epochs_per_batch,
            names=(self.trainer.seed, step),
        )
        pending = []
        for minibatch, key, weights, fixed in self.updater.weighted(parts):
            params = self.whole(state.params)
            state, metrics, applied = self.updater.update(state, minibatch, weights, key, params)
            pending.append((metrics, applied | fixed))
        return state, step_metrics(pending, "critic") | explained_variance(batch)

    def warm_up(self, state: CriticState, minibatch: TrainBatch) -> None:
        """Compile what `update` runs; see `Updater.warm_up`."""
        self.updater.warm_up(on_device(self.whole(state.params)), without_policy(minibatch))

    def export(self, folder: str | os.PathLike[str], params: Params, tokenizer: Any) -> None:
        """Write a Hugging Face folder, adapters merged; `<value_head_prefix>.weight` is the head.

        Args:
            params: of the state.
        """
        whole = merge(on_device(self.whole(params)))
        save_pretrained(folder, self.model, whole, tokenizer, overwrite=True)

    def _load(self) -> Params:
        """Load the parameters from the folder of the config, or draw them.

        They go into host memory where the config asks for that.
        """
        role, shardings = self.trainer.critic, self._shardings(self.model)
        if role.fsdp_config.cpu_offload:
            shardings = host_shardings(shardings, "trainer.critic.fsdp_config.cpu_offload")
        return hf.load_or_init(
            role.model.path or "",  # validated
            self.model,
            overrides=cfg.model_overrides(self.trainer, role),
            random_init=role.model.random_init,
            seed=self.trainer.seed,
            shardings=shardings,
        )

    def _shardings(self, model: TransformerConfig | LoraConfig) -> Params:
        axes, shapes = logical_axes(model), abstract_params(model)
        return param_shardings(self.placement.mesh, axes, shapes, self.placement.rules)


def critic_model(trainer: cfg.TrainerConfig, tokens: int) -> TransformerConfig:
    """Return the architecture in the critic's folder, with a value head.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: it does not know all tokens.
    """
    role = trainer.critic
    assert role.model.path is not None  # asked before
    model = hf.load_config(role.model.path, cfg.model_overrides(trainer, role))
    if model.vocab_size < tokens:
        raise ValueError(
            f"trainer.critic.model.path={role.model.path!r} has a vocabulary of {model.vocab_size} "
            f"tokens, the policy's tokenizer {tokens}: set it to a model with that tokenizer"
        )
    return dataclasses.replace(model, value_head=trainer.algorithm.value_head_prefix)


def without_policy(batch: TrainBatch) -> TrainBatch:
    """Return the batch as the critic's loss sees it: nothing else need reach the devices."""
    of_policy = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages", "kept")
    return batch.replace(**dict.fromkeys(of_policy))


def explained_variance(batch: TrainBatch) -> dict[str, float]:
    """Measure how much of the returns the values know: 1 is all, 0 as much as a constant."""
    sampled = np.asarray(batch.loss_mask) > 0
    returns, values = (np.asarray(x)[sampled] for x in (batch.returns, batch.values))
    if not returns.size or not returns.var():
        return {}
    error = float((returns - values).var() / returns.var())
    return {"critic/explained_variance": 1 - error}
