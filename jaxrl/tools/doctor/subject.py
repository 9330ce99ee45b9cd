"""What is examined: the user's run, cut down, with all that it writes in a temporary folder."""

import functools
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl import config as cfg
from jaxrl.data.packing import minibatches
from jaxrl.tools.doctor.compilations import Compilations
from jaxrl.tools.doctor.cut import BATCHES, choose, cut, elsewhere
from jaxrl.tools.doctor.finding import BadInput, Unavailable, bad_input
from jaxrl.tools.doctor.recording import RecordingEngine
from jaxrl.train import BasePPOExp
from jaxrl.trainer import Trainer
from jaxrl.types import GeneratorOutput, TrainBatch


class Subject:
    """Hold a run that checks may do with as they like; what they share is made once.

    Args:
        config: as the user wrote it.
        folder: for all that the run writes.
        experiment: whose `get_` methods make the parts.
        compilations: what has been compiled so far.

    Attributes:
        given: the whole config, resolved; nothing is written where it says.
        cuts: what was made smaller for the examination, field -> (given, now).
        known: what checks have found out for others, by name.
        made: what they share, or the exception instead.
        engine: notes what the generator asks of it.

    Raises:
        ValueError: the config is wrong.
    """

    def __init__(
        self,
        config: Any,
        folder: Path,
        experiment: type[BasePPOExp] = BasePPOExp,
        compilations: Compilations | None = None,
    ) -> None:
        self.experiment, self.folder = experiment, folder
        whole = experiment.settled(cfg.resolve(cfg.to_train_config(config))).config
        self.whole = experiment(elsewhere(whole, folder))  # validated, and warned of
        self.given = whole
        self.cuts: dict[str, tuple[Any, Any]] = {}
        self.compilations = Compilations() if compilations is None else compilations
        self.known: dict[str, Any] = {}
        self.made: dict[str, Any] = {}

    # ---------------------------------------------------------------- the run

    @functools.cached_property
    def run(self) -> BasePPOExp:
        """Return the small run; it has chosen its prompts."""
        whole = self.whole
        whole.tokenizer = whole.get_tokenizer()
        data, evaluates = whole.config.data, self.given.trainer.eval_interval > 0
        prompts = whole.get_prompts(data.train_data)
        evaluation = whole.get_prompts(data.val_data) if evaluates else []
        self.data_card = whole.get_data_card(prompts, evaluation)
        shares = cfg.device_ranges(whole.config, len(jax.devices()))
        groups = cfg.batch_groups(whole.config, len(shares.policy))
        size, _ = cut(whole.config, prompts[:1], groups)
        chosen = choose(prompts, BATCHES * size.trainer.train_batch_size)
        config, self.cuts = cut(whole.config, chosen, groups)
        if len(chosen) < len(prompts):
            self.cuts["prompts"] = (len(prompts), len(chosen))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said already
            run = self.experiment(config)
        # every generator has fresh environments, in one pool: it may be processes
        pool = functools.cache(run.get_environment_pool)
        vars(run).update(get_prompts=lambda sources: chosen, get_environment_pool=pool)
        vars(run).update(report_data=lambda trainer: None)  # its card is that of the whole
        return run

    def _made(self, name: str, make: Callable[[], Any], see: str) -> Any:
        """Return what `make` gives, made once; where that failed it is not tried again.

        Args:
            see: the check that says why.
        """
        if name not in self.made:
            try:
                self.made[name] = make()
            except (BadInput, Unavailable):
                raise
            except Exception as error:
                self.made[name] = error
        if isinstance(error := self.made[name], Exception):
            raise Unavailable(f"there is no {name} ({error!r}); see '{see}'", see) from error
        return self.made[name]

    @property
    def trainer(self) -> Trainer:
        """Return the trainer of the small run, with a state.

        Raises:
            BadInput: the config, a file or a folder is wrong.
            Unavailable: it could not be built.
        """
        return self._made("trainer", self._build, "build")

    def _build(self) -> Trainer:
        try:
            trainer = self.run.build()
            trainer.state = trainer.restore_or_init()
        except (ValueError, OSError) as error:
            raise bad_input(self.given, error) from error
        trainer.batches_drawn = int(trainer.state.batches_drawn)
        trainer.load_reference(trainer.state.ref_params)
        self.engine = RecordingEngine(trainer.engine)
        trainer.generator = self.generator(self.engine)
        return trainer

    def restart(self) -> None:
        """Restore the run after a check that failed in the middle: the state may be gone."""
        trainer = self.trainer
        for step in trainer.checkpointer.manager.all_steps():
            trainer.checkpointer.manager.delete(step)
        trainer.state = trainer.restore_or_init()
        trainer.batches_drawn = int(trainer.state.batches_drawn)
        trainer.load_reference(trainer.state.ref_params)
        trainer.sync_weights(int(trainer.state.step))

    def close(self) -> None:
        """Stop the threads that write, and remove the weights that servers had."""
        if isinstance(trainer := self.made.get("trainer"), Trainer):
            trainer.checkpointer.close()
        if weights := self.whole.config.generator.inference_engine.weights_folder:
            shutil.rmtree(weights, ignore_errors=True)

    # ---------------------------------------------------------------- its rollouts

    def generator(self, engine: Any, config: cfg.TrainConfig | None = None) -> Any:
        """Return a fresh generator, with fresh environments, as the user's run makes it.

        Args:
            config: in place of the run's.
        """
        if config is None:
            return self.run.get_generator(engine, self.run.tokenizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other = self.experiment(config)
        other.tokenizer = self.run.tokenizer
        return other.get_generator(engine, self.run.tokenizer)

    @property
    def rollouts(self) -> tuple[GeneratorOutput, list[str]]:
        """Return the trajectories of the first batch of prompts, and their uids.

        Raises:
            Unavailable: they could not be made.
        """
        return self._made("rollouts", self._sample, "environment")

    def _sample(self) -> tuple[GeneratorOutput, list[str]]:
        trainer = self.trainer
        trainer.metrics, prompts = {}, trainer.prompts_of(0)
        trainer.sync_weights(int(trainer.state.step))
        return trainer.generate(prompts, 1), [p.uid for p in prompts for _ in range(self.samples)]

    @property
    def samples(self) -> int:
        """Return the number of samples of a prompt."""
        return self.run.config.generator.n_samples_per_prompt

    @property
    def collated(self) -> TrainBatch:
        """Return the first batch, as the trainer makes it of the rollouts."""
        return self._made("collated batch", self._collate, "batch")

    def _collate(self) -> TrainBatch:
        output, uids = self.rollouts
        shaped = self.trainer.postprocess_generator_output(GeneratorOutput({**output}), uids)
        return self.trainer.collate(shaped)

    @property
    def batch(self) -> TrainBatch:
        """Return the first batch with all that the update needs."""
        return self._made("batch", self._complete, "batch")

    def _complete(self) -> TrainBatch:
        return self.trainer.add_advantages(self.trainer.add_log_probs(self.collated))

    @property
    def minibatch(self) -> TrainBatch:
        """Return the first minibatch of the batch; its advantages are drawn at random.

        Short responses of a new model often earn all the same: no advantage, no gradient.
        """
        return self._made("minibatch", self._cut, "batch")

    def _cut(self) -> TrainBatch:
        trainer = self.run.config.trainer
        part = minibatches(self.batch, trainer.policy_mini_batch_size)[0]
        if not np.asarray(part.loss_mask).any():
            raise Unavailable("no token of the first minibatch is trained; see 'environment'")
        rng, shape = np.random.default_rng(trainer.seed), part.tokens.shape
        drawn = rng.normal(size=(shape[0], 1)) + 0.3 * rng.normal(size=shape)
        return part.replace(advantages=(drawn * part.response_mask).astype(np.float32))

    def train(self) -> None:
        """Train one step on the batch, by the trainer's own updates of policy and critic."""
        trainer, step = self.trainer, int(self.trainer.state.step) + 1
        batch, trainer.metrics = self.batch, {}
        trainer.batches_drawn += 1
        trainer.update_critic(batch, step)
        trainer.update(batch, step)
