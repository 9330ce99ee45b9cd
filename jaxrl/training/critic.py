"""The critic of a run: a transformer of its own weights that values states.

Schulman et al., 2017, https://arxiv.org/abs/1707.06347. Its values of a batch are made before the
advantages, from the weights at the start of the step; then it learns the returns, in minibatches of
its own.
"""

import dataclasses

import numpy as np

from jaxrl import config as cfg
from jaxrl.data.packing import beside_tokens
from jaxrl.models import hf
from jaxrl.models.placement import model_shardings
from jaxrl.models.transformer import Params, TransformerConfig
from jaxrl.parallel import Placement, replicated
from jaxrl.parallel.offload import on_device
from jaxrl.training.build import assemble_update, make_forward_pass, place_beside
from jaxrl.training.objective import step_metrics
from jaxrl.training.optim import init_state, new_critic_state
from jaxrl.training.update import minibatches_of_step
from jaxrl.training.weights import Weights
from jaxrl.types import CriticState, TrainBatch


class Critic:
    """Hold what is compiled or placed once for the critic; its state is the caller's.

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
        model = critic_model(trainer, tokens)
        placement = place_beside("critic", trainer, model, policy)
        self.weights = Weights(trainer, "critic", model, placement)
        self.forward_pass = make_forward_pass(config, model, placement, "critic")
        self.optimizer, self.abstract_state, self.updater = assemble_update(
            config, self.forward_pass, placement, total_steps, self.weights.trained, "critic"
        )
        self.minibatch_rows = trainer.critic_mini_batch_size * config.generator.n_samples_per_prompt

    def initial(self) -> CriticState:
        """Return the state at the start of a run, from the folder of the config."""
        return init_state(
            self.optimizer,
            self.weights.initial(),
            model_shardings(self.weights.trained, self.weights.placement),
            replicated(self.weights.placement.mesh),
            new=new_critic_state,
        )

    def params(self, state: CriticState) -> Params:
        """Return all parameters of the critic, on its devices; adapters are on their base."""
        return on_device(self.weights.whole(state.params))

    def values(self, state: CriticState, batch: TrainBatch) -> np.ndarray:
        """Return the value of the state before each response token [B, T], 0 elsewhere."""
        (values,) = self.forward_pass(self.params(state), without_policy(batch))
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
            rng_path=(self.trainer.seed, step),
        )
        pending = []
        for minibatch, key, weights, fixed in self.updater.weighted(parts):
            params = self.weights.whole(state.params)
            state, metrics, applied = self.updater.update(state, minibatch, weights, key, params)
            pending.append((metrics, applied | fixed))
        return state, step_metrics(pending, "critic") | explained_variance(batch)

    def warm_up(self, state: CriticState, minibatch: TrainBatch) -> None:
        """Compile what `update` runs; see `Updater.warm_up`."""
        self.updater.warm_up(self.params(state), without_policy(minibatch))


def critic_model(trainer: cfg.TrainerConfig, tokens: int) -> TransformerConfig:
    """Return the architecture in the critic's folder, with a value head.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: it does not know all tokens.
    """
    role = trainer.critic
    assert role.model.path is not None  # asked before
    overrides = cfg.model_overrides(trainer, role)
    model = hf.load_config(role.model.path, overrides, random_init=role.model.random_init)
    if model.vocab_size < tokens:
        raise ValueError(
            f"trainer.critic.model.path={role.model.path!r} has a vocabulary of {model.vocab_size} "
            f"tokens, the policy's tokenizer {tokens}: set it to a model with that tokenizer"
        )
    return dataclasses.replace(model, value_head=trainer.algorithm.value_head_prefix)


def without_policy(batch: TrainBatch) -> TrainBatch:
    """Return the batch as the critic's loss sees it: nothing else need reach the devices."""
    return batch.replace(
        rollout_log_probs=None,
        old_log_probs=None,
        ref_log_probs=None,
        advantages=None,
        **dict.fromkeys(beside_tokens(batch)),
    )


def explained_variance(batch: TrainBatch) -> dict[str, float]:
    """Measure how much of the returns the values know: 1 is all, 0 as much as a constant."""
    sampled = np.asarray(batch.loss_mask) > 0
    returns, values = (np.asarray(x)[sampled] for x in (batch.returns, batch.values))
    if not returns.size or not returns.var():
        return {}
    error = float((returns - values).var() / returns.var())
    return {"critic/explained_variance": 1 - error}
