"""Hold what is examined: the user's run, made smaller, writing into a temporary folder."""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl import config as cfg
from jaxrl.data.packing import minibatches
from jaxrl.files import as_path
from jaxrl.rollout.protocol import Completion, Engine, Request
from jaxrl.tools.doctor.finding import BadInput, Unavailable, bad_input
from jaxrl.tools.doctor.smaller_config import BATCHES, WEIGHTS, choose, smaller, written_elsewhere
from jaxrl.train import BasePPOExp
from jaxrl.trainer import Trainer
from jaxrl.types import GeneratorOutput, TrainBatch

Program = tuple[str, tuple[str, ...]]  # its name, and the shapes that it is compiled for
# An engine's answers by the input of a turn and the key of a sample
Answers = dict[tuple[tuple[int, ...], tuple[int, int]], Completion]


class ExaminedRun:
    """Hold a run that checks may do with as they like; what they share is made once.

    Args:
        config: as the user wrote it.
        folder: for all that the run writes.
        experiment_class: its `get_` methods make the parts.
        programs: what XLA has compiled so far; see `recompilation.compiled_programs`.

    Attributes:
        full_config: that of the user's run, resolved; nothing is written where it says.
        full_experiment: the user's run, which writes to the folder and is never built.
        changes: what was made smaller for the examination, field -> (before, now).
        known: what checks have found out for others, by name.
        made: what they share, by name, or the exception instead.
        engine: notes what it answers to the generator.

    Raises:
        ValueError: the config is wrong.
    """

    def __init__(
        self,
        config: Any,
        folder: Path,
        experiment_class: type[BasePPOExp] = BasePPOExp,
        programs: Sequence[Program] = (),
    ) -> None:
        self.experiment_class, self.folder, self.programs = experiment_class, folder, programs
        resolved = cfg.resolve(cfg.to_train_config(config))
        self.full_config = experiment_class.settled(resolved).config
        # validated here, and warned of
        self.full_experiment = experiment_class(written_elsewhere(self.full_config, folder))
        self.changes: dict[str, tuple[Any, Any]] = {}
        self.known: dict[str, Any] = {}
        self.made: dict[str, Any] = {}

    # ---------------------------------------------------------------- its parts

    @functools.cached_property
    def experiment(self) -> BasePPOExp:
        """Return the experiment of the small run; it has chosen its prompts."""
        full = self.full_experiment
        full.tokenizer = full.get_tokenizer()
        prompts = full.get_prompts(full.config.data.train_data)
        evaluates = self.full_config.trainer.eval_interval > 0
        evaluation = full.get_prompts(full.config.data.val_data) if evaluates else []
        self.data_card = full.get_data_card(prompts, evaluation)
        devices = cfg.device_ranges(full.config, len(jax.devices())).policy
        groups = cfg.batch_groups(full.config, len(devices))
        batch_size = smaller(full.config, prompts[:1], groups)[0].trainer.train_batch_size
        chosen = choose(prompts, BATCHES * batch_size)
        config, self.changes = smaller(full.config, chosen, groups)
        if len(chosen) < len(prompts):
            self.changes["prompts"] = (len(prompts), len(chosen))
        experiment = self._unwarned(config)
        # every generator has fresh environments, in one pool: it may be processes
        pool = functools.cache(experiment.get_environment_pool)
        vars(experiment).update(
            get_prompts=lambda sources: chosen,
            get_environment_pool=pool,
            check_functions=lambda: type(experiment).check_functions(experiment, cuts=False),
            report_data=lambda trainer: None,  # the data card is that of all prompts
        )
        return experiment

    def _unwarned(self, config: cfg.TrainConfig) -> BasePPOExp:
        """Return an experiment of another config; the user was warned of his own."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.experiment_class(config)

    @property
    def config(self) -> cfg.TrainConfig:
        """Return the config of the small run."""
        return self.experiment.config

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer of the small run."""
        return self.experiment.tokenizer

    @property
    def trainer(self) -> Trainer:
        """Return the trainer of the small run, with a state.

        Raises:
            BadInput: the config, a file or a folder is wrong.
            Unavailable: it could not be built.
        """
        return self._made("trainer", self._build, see="build")

    def _build(self) -> Trainer:
        try:
            trainer = self.experiment.build()
            trainer.state = trainer.restore_or_init()
        except (ValueError, OSError) as error:
            raise bad_input(self.full_config, error) from error
        trainer.batches_drawn = int(trainer.state.batches_drawn)
        trainer.load_reference(trainer.state.ref_params)
        self.engine = RecordingEngine(trainer.engine)
        trainer.generator = self.generator(self.engine)
        return trainer

    def generator(self, engine: Any, config: cfg.TrainConfig | None = None) -> Any:
        """Return a fresh generator, with fresh environments, as the user's run makes it.

        Args:
            config: in place of the small run's.
        """
        experiment = self.experiment if config is None else self._unwarned(config)
        if config is not None:
            experiment.tokenizer = self.tokenizer
        return experiment.get_generator(engine, self.tokenizer)

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

    def restart(self) -> None:
        """Restore the run after a check that failed in the middle: the state may be gone."""
        trainer = self.trainer
        for step in trainer.checkpointer.files.steps():
            trainer.checkpointer.files.delete(step)
        trainer.state = trainer.restore_or_init()
        trainer.batches_drawn = int(trainer.state.batches_drawn)
        trainer.load_reference(trainer.state.ref_params)
        trainer.sync_weights(int(trainer.state.step))

    def close(self) -> None:
        """Stop the threads that write, and remove the weights that servers had."""
        if isinstance(trainer := self.made.get("trainer"), Trainer):
            trainer.checkpointer.close()
        if weights := self.full_experiment.config.generator.inference_engine.weights_folder:
            with contextlib.suppress(OSError):
                as_path(WEIGHTS, weights).rmtree(missing_ok=True)

    # ---------------------------------------------------------------- its first step

    @property
    def samples(self) -> int:
        """Return the number of samples of a prompt."""
        return self.config.generator.n_samples_per_prompt

    @property
    def rollouts(self) -> tuple[GeneratorOutput, list[str]]:
        """Return the trajectories of the first batch of prompts, and their uids.

        Raises:
            Unavailable: they could not be made.
        """
        return self._made("rollouts", self._sample, see="environment")

    def _sample(self) -> tuple[GeneratorOutput, list[str]]:
        trainer = self.trainer
        trainer.metrics, prompts = {}, trainer.prompts_of(0)
        trainer.sync_weights(int(trainer.state.step))
        return trainer.generate(prompts, 1), [p.uid for p in prompts for _ in range(self.samples)]

    @property
    def collated(self) -> TrainBatch:
        """Return the first batch, as the trainer makes it of the rollouts."""
        return self._made("collated batch", self._collate, see="batch")

    def _collate(self) -> TrainBatch:
        output, uids = self.rollouts
        shaped = self.trainer.postprocess_generator_output(GeneratorOutput({**output}), uids)
        return self.trainer.collate(shaped)

    @property
    def batch(self) -> TrainBatch:
        """Return the first batch with all that the update needs."""
        return self._made("batch", self._complete, see="batch")

    def _complete(self) -> TrainBatch:
        return self.trainer.add_advantages(self.trainer.add_log_probs(self.collated))

    @property
    def minibatch(self) -> TrainBatch:
        """Return the first minibatch of the batch; its advantages are drawn at random.

        Short responses of a new model often earn all the same: no advantage, no gradient.
        """
        return self._made("minibatch", self._first_minibatch, see="batch")

    def _first_minibatch(self) -> TrainBatch:
        trainer = self.config.trainer
        first = minibatches(self.batch, trainer.policy_mini_batch_size)[0]
        if not np.asarray(first.loss_mask).any():
            raise Unavailable("no token of the first minibatch is trained; see 'environment'")
        rng, shape = np.random.default_rng(trainer.seed), first.tokens.shape
        drawn = rng.normal(size=(shape[0], 1)) + 0.3 * rng.normal(size=shape)
        return first.replace(advantages=(drawn * first.response_mask).astype(np.float32))

    def train(self) -> None:
        """Train one step on the batch, by the trainer's own updates of policy and critic."""
        trainer, step = self.trainer, int(self.trainer.state.step) + 1
        batch, trainer.metrics = self.batch, {}
        trainer.batches_drawn += 1
        trainer.update_critic(batch, step)
        trainer.update(batch, step)


class RecordingEngine:
    """Serve as the `Engine` of a run, and keep what it answers.

    Attributes:
        engine: of the run.
        answers: its completions so far.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: Answers = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def submit(self, requests: Sequence[Request]) -> list[list[Future[Completion]]]:
        """Submit requests and note their completions; see `Engine`."""
        submitted = self.engine.submit(requests)
        for request, futures in zip(requests, submitted, strict=True):
            for key, future in zip(request.keys, futures, strict=True):
                future.add_done_callback(functools.partial(self._keep, request, key))
        return submitted

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Submit requests and wait for their completions; see `Engine`."""
        return [[future.result() for future in futures] for futures in self.submit(requests)]

    def _keep(self, request: Request, key: tuple[int, int], done: Future[Completion]) -> None:
        if not done.cancelled() and done.exception() is None:
            with self._lock:
                self.answers[request.prompt_tokens, key] = done.result()
