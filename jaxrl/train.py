"""Start a run: from config to trained policy.

    python -m jaxrl.train --config=configs/quickstart.py --config.trainer.seed=1

One process for each host makes one job where JAX_COORDINATOR_ADDRESS, JAXRL_NUM_PROCESSES and
JAXRL_PROCESS_ID are set, or with --distributed where JAX finds them out (TPU pods, SLURM).

Every field of docs/configuration.md can be set: --config.<path>=<value>. `trainer.py` has the
training step; this file puts its parts together.
"""

from jaxrl import cli, config as cfg

if __name__ == "__main__":
    cli.answer_early(__doc__, cfg.read_early)

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import jax
from jax.sharding import Mesh

from jaxrl import activity
from jaxrl.array_ops import DTYPES
from jaxrl.config.dataclass_config import flatten
from jaxrl.config.model_limits import check_ids, check_models, check_tokens
from jaxrl.config.objective_requirements import (
    estimator_row,
    needs_reference,
    updates_per_step,
)
from jaxrl.config.oddities import warn_of_scale
from jaxrl.config.platform_defaults import Settled, settle, settle_evaluation, settle_ids
from jaxrl.config_error import fail
from jaxrl.data.card import DataCard, data_card
from jaxrl.data.order import DataOrder
from jaxrl.data.prompts import check_files, is_file, load_prompts
from jaxrl.data.tokenizer import (
    check_vocabulary,
    known_ids,
    load_tokenizer,
    unknown_text,
    unknown_token,
)
from jaxrl.envs import NEED_TRUTH
from jaxrl.envs.json_request import RequestError
from jaxrl.envs.readiness import ServerAwayError, check_environments, refuse_code
from jaxrl.files import FolderError
from jaxrl.functions import says_all
from jaxrl.hub import check_folder
from jaxrl.models import hf
from jaxrl.models.adapter import AdaptedModel
from jaxrl.models.architecture import with_known_ids
from jaxrl.models.hf import ModelError
from jaxrl.models.transformer import TransformerConfig
from jaxrl.parallel import by_process, is_first, make_mesh, same_in_all
from jaxrl.parallel.chips import GIB
from jaxrl.parallel.compilation import enable_cache
from jaxrl.parallel.devices import check_devices, device_memory
from jaxrl.parallel.processes import agree, joined_main
from jaxrl.records.callbacks import TrainingCallback, load_callbacks
from jaxrl.records.checkpoint import (
    CheckpointError,
    UnreadableCheckpoint,
    UnsavedCheckpoint,
    recorded_settings,
    where_it_resumes,
)
from jaxrl.records.ledger import LedgerError
from jaxrl.records.run_folders import RunFolders
from jaxrl.registry.contracts import ContractError
from jaxrl.registry.trial import try_functions
from jaxrl.rollout.build import engine_kernel, engine_of_run
from jaxrl.rollout.build_jetstream import jetstream_engine
from jaxrl.rollout.build_sizes import Sizes, sizes_that_fit
from jaxrl.rollout.conversations.conversation import ConversationGenerator, demonstration_of
from jaxrl.rollout.conversations.dynamic_sampling import DynamicSamplingError
from jaxrl.rollout.conversations.environment_pool import EnvironmentPool
from jaxrl.rollout.conversations.reward_terms import RewardTermError, RewardTerms
from jaxrl.rollout.conversations.session import EnvironmentFailure
from jaxrl.rollout.conversations.trajectories import AllFailed
from jaxrl.rollout.conversations.trial import try_environments
from jaxrl.rollout.generator import GeneratorInterface
from jaxrl.rollout.native.recompute import RecomputeEngine
from jaxrl.rollout.protocol import Engine
from jaxrl.rollout.server.build import served_model
from jaxrl.rollout.server.server import AddressError, HttpServer
from jaxrl.signals import Ended, Terminated
from jaxrl.train_async import AsyncTrainer
from jaxrl.trainer import NothingLearnt, Trainer
from jaxrl.training.build import devices_of
from jaxrl.training.evaluation import check_sources
from jaxrl.training.reference import reference_model
from jaxrl.training.resident_memory import beside_the_engine
from jaxrl.types import Prompt

P = ParamSpec("P")
T = TypeVar("T")

# What ends a run and is the user's to mend; every checkpoint before it is whole.
_MENDABLE = (
    AddressError,
    AllFailed,
    CheckpointError,
    ContractError,
    DynamicSamplingError,
    FolderError,
    LedgerError,
    NothingLearnt,
    ModelError,
    RewardTermError,
)


class BasePPOExp:
    """Take a run from config to trained policy.

    Override a `get_` method to put in a part of your own.
    """

    tokenizer: Any  # of the policy, once `build` has loaded it
    server: HttpServer | None = None  # once `build` has made it

    def __init__(self, config: Any) -> None:
        resolved = cfg.resolve(cfg.with_row_files(config))
        if (type(self).run, type(self).get_prompts) != (BasePPOExp.run, BasePPOExp.get_prompts):
            cfg.write_row_files(resolved)  # they may open them; else `build` writes them
        self.too_long: dict[str, int] = {}  # prompts of each source that were left out
        check_devices()
        same_in_all("configs", flatten(resolved))
        self.config, self.chosen = self.settled(resolved)
        enable_cache(self.config.trainer.compilation_cache_path)
        cfg.check_nodes(self.config, jax.process_count())
        cfg.validate(self.config, num_devices=jax.device_count(), num_processes=jax.process_count())
        if type(self).get_model is BasePPOExp.get_model:
            self.config, lines = sized(self.config, self.get_model)
            self.chosen = [*self.chosen, *lines]

    @classmethod
    def settled(cls, config: cfg.TrainConfig) -> Settled:
        """Choose a value for every field of a resolved config that is "auto"; see `settle`."""
        return settle(
            config,
            own_model=cls.get_model is not BasePPOExp.get_model,
            recorded=recorded_settings(config.trainer),
        )

    def get_model(self) -> TransformerConfig | AdaptedModel:
        """Return the policy's architecture: that of `policy.model.path`, or a flax module of yours.

        With an `AdaptedModel` (`adapt_nnx`, `adapt_linen`) the path names only the tokenizer.
        """
        role = self.config.trainer.policy
        assert role.model.path is not None  # validated
        check_folder("trainer.policy.model.path", role.model.path)
        overrides = cfg.model_overrides(self.config.trainer, role)
        found = hf.load_config(role.model.path, overrides, random_init=role.model.random_init)
        return with_known_ids(found, role.known_ids)

    def get_tokenizer(self) -> Any:
        """Load the policy's tokenizer, with the chat template of `generator.chat_template`."""
        path, template = self.config.trainer.policy.model.path, self.config.generator.chat_template
        assert path is not None  # validated
        check_folder("trainer.policy.model.path", path)
        return load_tokenizer(path, template.name_or_path if template.source == "file" else None)

    def settle_ids(
        self, model: TransformerConfig | AdaptedModel
    ) -> TransformerConfig | AdaptedModel:
        """Choose the ids that are sampled and scored, and return the policy with these alone."""
        own = BasePPOExp
        parts = "get_model", "get_engine", "get_generator"
        if any(getattr(type(self), part) is not getattr(own, part) for part in parts):
            return model  # of the user's, as it is; and an engine of his draws what it likes
        assert isinstance(model, TransformerConfig)  # of a folder
        ends = hf.eos_token_ids(self.config.trainer.policy.model.path or "")
        known = max([known_ids(self.tokenizer), *(end + 1 for end in ends)])
        recorded = recorded_settings(self.config.trainer)
        self.config, lines = settle_ids(self.config, known, model.vocab_size, recorded)
        self.chosen = [*self.chosen, *lines]
        return with_known_ids(model, self.config.trainer.policy.known_ids)

    def get_prompts(self, sources: Sequence[str]) -> list[Prompt]:
        """Load the prompts of data sets, tokenised; note how many are too long."""
        if not sources:
            return []
        prompts, dropped = load_prompts(
            sources,
            self.tokenizer,
            max_prompt_length=self.config.trainer.max_prompt_length,
            default_env_class=self.config.environment.env_class,
            chat_template_kwargs=self.config.generator.chat_template_kwargs,
        )
        self.too_long |= dict(zip(sources, dropped, strict=True))
        if not (environment := self.config.environment).rows_may_name_code:
            files = [is_file(source) for source in sources]
            refuse_code(
                [prompt for prompt in prompts if files[prompt.source]], environment.env_class
            )
        return prompts

    def get_engine(self, model: TransformerConfig | AdaptedModel, mesh: Mesh) -> Engine:
        """Make the sampler, on the devices of `mesh`: the trainer's, or others in their place."""
        settings = self.config.generator.inference_engine
        if settings.backend == "jetstream":
            return jetstream_engine(self.config, model, mesh, self.tokenizer)
        if not cfg.in_process(self.config):
            from jaxrl.rollout.build_remote import assemble_remote_engine

            if cfg.by_transfer(self.config):  # of the parameters, where training has them
                mesh = meshes(self.config)[0]
            return assemble_remote_engine(self.config, model, mesh, self.tokenizer)
        if isinstance(model, AdaptedModel):
            if cfg.engine_hosts(settings) > 1:
                raise ValueError(
                    f"generator.inference_engine.hosts_per_engine={settings.hosts_per_engine}: "
                    f"{model.name} is a flax module, whose sampler is in each process; set it to 1"
                )
            for name, off in (("quantization", None), ("kv_cache_dtype", "auto")):
                if (value := getattr(settings, name)) != off:
                    raise ValueError(
                        f"generator.inference_engine.{name}={value!r}: {model.name} is a flax "
                        f"module, which has no matrices that are known; set {off!r}"
                    )
            rows = min(settings.max_num_seqs, cfg.rows_at_once(self.config, jax.process_count()))
            return RecomputeEngine(
                model,
                mesh,
                dtype=DTYPES[cfg.engine_dtype(settings)],
                max_num_seqs=rows,
                **settings.engine_init_kwargs,
            )
        trained, devices = meshes(self.config)[0], frozenset(mesh.devices.flat)
        resident = beside_the_engine(self.config, model, trained, devices)
        return engine_of_run(
            self.config, model, mesh, self.tokenizer.decode, resident_bytes=resident
        )

    def get_server(self, engine: Engine, model: TransformerConfig | AdaptedModel) -> HttpServer:
        """Make the HTTP endpoint beside the run."""
        config, settings = self.config, self.config.generator.inference_engine
        if isinstance(model, AdaptedModel):
            raise ValueError(
                f"generator.inference_engine.enable_http_endpoint=True: {model.name} is a flax "
                "module, whose sampler takes one batch at a time; set it to False"
            )
        return HttpServer(
            engine,
            served_model(config, self.tokenizer, model.vocab_size, cfg.longest_row(config)),
            config.serve,
            host=settings.http_endpoint_host,
            port=settings.http_endpoint_port,
        )

    def get_generator(self, engine: Engine, tokenizer: Any) -> GeneratorInterface:
        """Make what holds the conversations."""
        environment, gym = self.config.environment, self.config.environment.skyrl_gym
        return ConversationGenerator(
            engine,
            tokenizer,
            self.config.generator,
            env_config=cfg.get_config_as_dict(gym),
            max_env_workers=gym.max_env_workers,
            env_timeout_seconds=gym.env_timeout_seconds,
            reward_terms=RewardTerms(environment.reward_weights, environment.reward_functions),
            pool=self.get_environment_pool(),
            rejudge_fraction=environment.rejudge_fraction,
        )

    def _longest_wait(self, generator: Any) -> float | None:
        """Return the seconds after which a generator gives up what it waits for; None = any."""
        if type(self).get_generator is BasePPOExp.get_generator:
            return cfg.longest_wait(self.config)
        return getattr(generator, "longest_wait", None)

    def check_ids(
        self,
        model: TransformerConfig | AdaptedModel,
        train: Sequence[Prompt],
        evaluation: Sequence[Prompt],
    ) -> None:
        """Refuse tokens and ends of sequence that a model has no id for; see `model_limits`."""
        if isinstance(model, AdaptedModel):
            return  # whose ids nobody knows
        data, path = self.config.data, self.config.trainer.policy.model.path
        assert path is not None  # validated
        ends = hf.eos_sources(path)
        check_ids("trainer.policy.model.path", path, model.vocab_size, self.tokenizer, ends)
        check_tokens("data.train_data", data.train_data, train, model.vocab_size)
        check_tokens("data.val_data", data.val_data, evaluation, model.vocab_size)

    def check_environments(self, prompts: Sequence[Prompt]) -> None:
        """Refuse environments that cannot be made here or do not work, and such reward functions.

        See `envs.readiness`, `rollout.conversations.trial`.
        """
        if type(self).get_generator is not BasePPOExp.get_generator:
            return  # which may have environments of its own
        environment, max_turns = self.config.environment, self.config.generator.max_turns
        gym = environment.skyrl_gym
        terms = RewardTerms(environment.reward_weights, environment.reward_functions)
        row = estimator_row(self.config.trainer.algorithm)
        if row and row.needs_terms and terms.abstaining:
            fail(
                "environment.reward_functions",
                environment.reward_functions,
                f"'{terms.abstaining[0]}' may have no opinion, by its annotation, and the "
                f"estimator '{row.fn.__name__}' compares each term in its group: let it "
                "return a number",
            )
        settings = cfg.get_config_as_dict(gym)
        check_environments(prompts, settings, max_turns, make=not gym.ray_env_workers)
        if gym.ray_env_workers:
            return  # where these live
        try:
            try_environments(
                prompts,
                terms,
                self.tokenizer,
                env_config=settings,
                max_turns=max_turns,
                max_env_workers=gym.max_env_workers,
                timeout_seconds=gym.env_timeout_seconds,
                chat_template_kwargs=self.config.generator.chat_template_kwargs,
                use_conversation_multi_turn=self.config.generator.use_conversation_multi_turn,
            )
        except EnvironmentFailure as failure:
            kind = ServerAwayError if _is_of_server(failure) else ValueError
            raise kind(f"tried once before the run: {failure}") from failure

    def check_functions(self, *, cuts: bool = True) -> None:
        """Refuse a loss or an estimator of the user's that a run could learn nothing right from.

        See `registry.trial`; with cuts=False a loss may depend on its microbatch.
        """
        trainer = self.config.trainer
        try_functions(
            trainer.algorithm,
            prompts=trainer.train_batch_size,
            minibatch_prompts=trainer.policy_mini_batch_size,
            samples=self.config.generator.n_samples_per_prompt,
            tokens=cfg.longest_row(self.config),
            cuts=cuts,
        )

    def get_environment_pool(self) -> EnvironmentPool | None:
        """Return where environments live: in Ray actors, or None: in threads of this process."""
        if not self.config.environment.skyrl_gym.ray_env_workers:
            return None
        from jaxrl.cluster import environment_workers  # needs jaxrl[ray]

        return environment_workers.pool_of_run(self.config, jax.process_count())

    def report_data(self, trainer: Trainer) -> None:
        """Show the data card; it will also be in the run folder, once the run has it."""
        card = self.get_data_card(
            trainer.train_prompts, trainer.eval_prompts, trainer.order, trainer.total_steps
        )
        trainer.recorder.show_card("data_card.txt", str(card), lambda width: card.folded)

    def get_data_card(
        self,
        train: Sequence[Prompt],
        evaluation: Sequence[Prompt],
        order: DataOrder | None = None,
        steps: int = 0,
    ) -> DataCard:
        """Describe what is to be learned from, and what of it is also in the evaluation."""
        data = self.config.data
        return data_card(
            train,
            evaluation,
            sources=data.train_data,
            eval_sources=data.val_data if evaluation else (),
            too_long=self.too_long,
            need_truth=NEED_TRUTH,
            order=order,
            steps=steps,
            unknown_token=unknown_token(self.tokenizer),
            unknown_text=functools.partial(unknown_text, self.tokenizer),
        )

    def get_callbacks(self) -> list[TrainingCallback]:
        """Load what is told of the events of the run: `trainer.watching.callbacks`."""
        return load_callbacks(self.config.trainer.watching.callbacks)

    def get_trainer(self, *args: Any, **kwargs: Any) -> Trainer:
        """Make the training loop."""
        kind = AsyncTrainer if self.config.trainer.fully_async.enabled else Trainer
        return kind(*args, **kwargs)

    def run(self) -> Trainer:
        """Train to the end."""
        trainer = self.build()
        self.train(trainer)
        return trainer

    def train(self, trainer: Trainer) -> None:
        """Train to the end; the HTTP endpoint, if it is wanted, is there meanwhile."""
        with contextlib.closing(trainer.recorder):
            if self.server is None:
                trainer.train()
                return
            self.server.start()
            activity.say(f"serving {self.server.served.name} at {self.server.url}")
            try:
                trainer.train()
            finally:
                self.server.stop()

    def build(self) -> Trainer:
        """Hold the folders of the run, load everything, show what will be done.

        `train` lets go of the folders; without it, `trainer.recorder.close`.
        """
        checked = self._check()  # before there is a folder: a refused attempt leaves none
        folders = RunFolders(self.config)
        try:
            cfg.write_row_files(self.config)
            trainer = self._load(*checked)
        except BaseException:
            folders.close()
            raise
        trainer.recorder.folders = folders
        return trainer

    def _check(self) -> tuple[TransformerConfig | AdaptedModel, list[Prompt], list[Prompt]]:
        """Try what is the user's; return the model's architecture and the prompts."""
        config = self.config  # `settle_ids` gives it another one
        evaluates = config.trainer.eval_interval > 0
        if type(self).get_prompts is BasePPOExp.get_prompts:
            check_files([*config.data.train_data, *(config.data.val_data if evaluates else ())])
        check_models(config.trainer)
        model = self.get_model()
        self.tokenizer = tokenizer = self.get_tokenizer()
        model = self.settle_ids(model)
        config = self.config
        ref_path, path = config.trainer.ref.model.path, config.trainer.policy.model.path
        if ref_path not in (None, path) and needs_reference(config.trainer.algorithm):
            check_vocabulary(tokenizer, ref_path)
            reference = reference_model(config.trainer, model)
            if isinstance(reference, TransformerConfig):
                check_ids("trainer.ref.model.path", ref_path, reference.vocab_size, tokenizer)
        train_prompts = self.get_prompts(config.data.train_data)
        eval_prompts = self.get_prompts(config.data.val_data) if evaluates else []
        recorded = recorded_settings(config.trainer)
        self.config, _ = settle_evaluation(config, len(eval_prompts), recorded)
        self.check_ids(model, train_prompts, eval_prompts)
        check_sources(eval_prompts)
        _warn_of_a_judge_of_no_row(config, [*train_prompts, *eval_prompts])
        if config.generator.demonstrations:
            _check_demonstrations(train_prompts, config.data.train_data)
        self.check_environments([*train_prompts, *eval_prompts])
        self.check_functions()
        return model, train_prompts, eval_prompts

    def _load(
        self,
        model: TransformerConfig | AdaptedModel,
        train_prompts: list[Prompt],
        eval_prompts: list[Prompt],
    ) -> Trainer:
        config, tokenizer, path = self.config, self.tokenizer, self.config.trainer.policy.model.path
        mesh, engine_mesh = meshes(config)
        engine = self.get_engine(model, engine_mesh)
        if config.generator.inference_engine.enable_http_endpoint and is_first():
            self.server = self.get_server(engine, model)
            engine = self.server.host
        trainer = self.get_trainer(
            config,
            tokenizer=tokenizer,
            model=model,
            mesh=mesh,
            engine=engine,
            generator=self.get_generator(engine, tokenizer),
            train_prompts=train_prompts,
            eval_prompts=eval_prompts,
            callbacks=self.get_callbacks(),
        )
        trainer.recorder.waits = self._longest_wait(trainer.generator)
        _check_export(trainer)
        assert path is not None  # validated
        warn_of_scale(
            config,
            updates=trainer.total_steps * updates_per_step(config.trainer),
            positions=None if isinstance(model, AdaptedModel) else hf.max_positions(path),
            vocabulary=None if isinstance(model, AdaptedModel) else model.vocab_size,
            platform=jax.default_backend(),
            devices=mesh.size,
        )
        self.report_data(trainer)
        trainer.recorder.show_card(
            "objective_card.txt",
            cfg.objective_card(
                config,
                num_devices=mesh.size,
                platform=[*self.chosen, *_kernels(trainer, engine_mesh)],
            ),
            functools.partial(cfg.folded_card, config, mesh.size),
        )
        size = trainer.policy.size()
        if trainer.critic:
            size += f"; critic: {trainer.critic.weights.size()}"
        activity.say(f"trained: {size}")
        activity.detail(f"mesh {dict(mesh.shape)} of {jax.default_backend()}")
        activity.say(f"run folder {cfg.run_folder(config.trainer)}")
        return trainer


def _kernels(trainer: Trainer, engine_mesh: Mesh) -> list[str]:
    """Say which kernels training, scoring and an engine of ours in this process have, and why.

    Of reference and critic what differs from the policy.
    """
    config, model, chosen = trainer.config, trainer.model, list(trainer.forward_pass.kernels)
    passes = {}
    if needs_reference(config.trainer.algorithm):
        passes["reference"] = trainer.ref_forward_pass
    if trainer.critic:
        passes["critic"] = trainer.critic.forward_pass
    others = [
        f"kernel of the {role}: {choice}"
        for role, forward_pass in passes.items()
        for choice in forward_pass.kernels
        if choice not in chosen
    ]
    ours = cfg.in_process(config) and cfg.starts_own_engine(config)
    if ours and isinstance(model, TransformerConfig):
        chosen.append(engine_kernel(config, model, engine_mesh.devices.flat[0]))
    return [*(f"kernel: {choice}" for choice in chosen), *others]


def meshes(config: cfg.TrainConfig, devices: Sequence[Any] | None = None) -> tuple[Mesh, Mesh]:
    """Return the mesh of training and the sampler's: the same, or one over other devices.

    In a job of several processes the first spans them all, and each has a sampler of its own, or
    shares one with its neighbours: `hosts_per_engine`.

    Args:
        devices: of the run; None = those of all its processes.
    """
    parts = devices_of(config, devices)
    mesh = make_mesh(devices=parts.policy, **dataclasses.asdict(config.trainer.policy.mesh))
    if parts.engine == parts.policy:
        return mesh, mesh
    return mesh, make_mesh(devices=parts.engine, data=-1)


def sized(
    config: cfg.TrainConfig,
    get_model: Callable[[], TransformerConfig | AdaptedModel],
    devices: Sequence[Any] | None = None,
    memory: float | None = None,
    platform: str | None = None,
) -> Settled:
    """Choose the sizes of the native engine that are None, by memory; see `sizes_that_fit`.

    Those of the checkpoint that the run goes on from are kept where they fit. Where memory is not
    known, as on a CPU, they are the smallest that part the devices. A collective of a job.

    Args:
        config: settled and validated; is not changed.
        get_model: architecture of the policy, asked for where memory is known.
        devices: of the run; None = those of all its processes.
        memory: bytes of a device; None = as it says itself.
        platform: of the devices; None = as they say.
    """
    settings = config.generator.inference_engine
    asked = settings.hosts_per_engine, settings.tensor_parallel_size
    if None not in asked or not cfg.in_process(config) or settings.backend != "native":
        return Settled(config, [])
    processes = by_process(jax.devices() if devices is None else devices)
    samplers = cfg.device_ranges(config, len(processes[0])).engine
    processes = [[process[i] for i in samplers] for process in processes]
    device = processes[jax.process_index()][0]
    least = cfg.least_hosts(config, len(samplers), len(processes))
    sizes, why = Sizes(asked[0] or least, asked[1] or 1), "as few as the sizes part"
    known = (platform or device.platform) != "cpu"
    memory = device_memory(device) if memory is None else memory
    if known and memory < math.inf:
        model, (mesh, sampler) = get_model(), meshes(config, devices)
        assert isinstance(model, TransformerConfig)  # of a folder
        on = frozenset(sampler.devices.flat)
        beside = beside_the_engine(config, model, mesh, on, devices)
        recorded, source = recorded_settings(config.trainer)
        before = Sizes(*(recorded[name] or 1 for name in cfg.ENGINE_SIZES)) if source else None
        sizes = sizes_that_fit(
            config,
            model,
            processes,
            resident=beside,
            memory=memory,
            platform=platform,
            before=before,
        )
        why = f"by memory, beside {beside / GIB:.2f} of {memory / GIB:.2f} GiB of a device"
        why = f"as in {source}" if sizes == before else why
    sizes = agree(sizes) if devices is None else sizes
    pairs = zip(cfg.ENGINE_SIZES, sizes, asked, strict=True)
    chosen = {name: size for name, size, given in pairs if given is None and size > 1}
    if not chosen:
        return Settled(config, [])
    words = ", ".join(f"{name.rpartition('.')[2]}={size}" for name, size in chosen.items())
    return Settled(cfg.apply_overrides(config, chosen), [f"{words}: {why}"])


def _check_demonstrations(prompts: Sequence[Prompt], sources: Sequence[str]) -> None:
    """Refuse data without an answer to any prompt, and answers that are no single message."""
    if {demonstration_of(prompt) for prompt in prompts} == {None}:
        raise ValueError(
            f"generator.demonstrations=True: no row of data.train_data={[*sources]} has a column "
            "'completion' with an answer; give some, or set False"
        )


def _warn_of_a_judge_of_no_row(config: cfg.TrainConfig, prompts: list[Prompt]) -> None:
    """Warn of an environment of the config beside rows that all name another one."""
    name, named = config.environment.env_class, {prompt.env_class for prompt in prompts}
    if name not in named | {cfg.EnvironmentConfig.env_class}:
        activity.warn(
            f"environment.env_class={name!r} judges no row: all {len(prompts)} name "
            f"{', '.join(map(repr, sorted(named)))} in their column env_class, which goes first. "
            "Take the column out, or write your environment into it"
        )


def _check_export(trainer: Trainer) -> None:
    """Refuse an export that cannot be made, now rather than when the first is due."""
    model, interval = trainer.model, trainer.config.trainer.hf_save_interval
    if interval <= 0 or type(trainer).export is not Trainer.export:
        return
    if isinstance(model, AdaptedModel):
        raise ValueError(
            f"trainer.hf_save_interval={interval}: {model.name} has no Hugging Face form; set it "
            "to -1, or override Trainer.export"
        )
    trainer.policy.check_export()


_within: ContextVar[bool] = ContextVar("within", default=False)  # `_says_it`


@contextlib.contextmanager
def _says_it() -> Iterator[None]:
    """Have the caller say what ends a run, and no `for_scripts` while the block runs."""
    token = _within.set(True)
    try:
        yield
    finally:
        _within.reset(token)


def for_scripts(body: Callable[P, T]) -> Callable[P, T]:
    """Make what a script calls warn in one line, and refuse without jaxrl's own frames.

    A Ctrl-C or SIGTERM that the script does not catch ends it with one line. Within a command, and
    within another such call, it changes nothing: these say it.
    """

    @functools.wraps(body)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if _within.get():
            return body(*args, **kwargs)
        try:
            with cli.plain_warnings(), _says_it():
                return body(*args, **kwargs)
        except Terminated as ended:
            cli.ended(str(ended), cli.AGAIN, ended.status)
            raise
        except KeyboardInterrupt as error:
            plain = KeyboardInterrupt(*error.args)  # of no other kind does Python make its own end
            cli.end_in_one_line(plain)
            raise plain from error
        except cli.MENDABLE_WITH_EXTRAS as error:
            if not says_all(error):
                raise
            vars(error).pop("__notes__", None)  # JAX's, of frames that it left out
            raise error.with_traceback(None) from None

    return call


@for_scripts
def train(config: Any) -> Trainer:
    """Run a `TrainConfig`, `ml_collections.ConfigDict` or nested dict to the end.

    Returns:
        The trainer: `.state` holds the parameters, `.config` what was resolved.

    Raises:
        ValueError: the config, a data file, the model folder or a checkpoint is wrong; no earlier
            result was touched.
    """
    return BasePPOExp(config).run()


@cli.command(__doc__, mendable=())  # `exit_status` knows which errors are the user's
def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.train [--distributed] --config=FILE [--config.a.b=value ...]`."""
    try:
        config = cfg.read_command_line(argv)
    except cli.MENDABLE as error:
        return cli.refuse(error)
    return exit_status(BasePPOExp, config)


def exit_status(experiment: type[BasePPOExp], config: Any) -> int:
    """Run an experiment; 0 = done, 1 = stopped by an alarm, 2 = what the user must mend.

    70 = a server of an environment is away, a checkpoint cannot be read or written now, or memory
    ran out after some updates: to be started again, as after a crash. Other errors are raised. An
    error of a `run` method of its own is the user's if `train` would end with it.
    """
    try:
        run = experiment(config)
        overridden = experiment.run is not BasePPOExp.run
        trainer = None if overridden else run.build()
    except ServerAwayError as error:
        cli.refuse(error)
        return cli.CRASHED
    except cli.MENDABLE_WITH_EXTRAS as error:
        return cli.refuse(error)
    try:
        with _says_it():
            if trainer is None:
                trainer = run.run()
            else:
                run.train(trainer)
    except Ended as ended:
        return cli.ended(str(ended), where_it_resumes(run.config.trainer), ended.status)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(where_it_resumes(run.config.trainer)) from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        cli.refuse(MemoryError(_out_of_memory(error)))
        went_well = trainer is not None and trainer.updates  # so it may again, from a checkpoint
        return cli.CRASHED if went_well else cli.REFUSED
    # others are not the user's: they keep their traceback
    except _MENDABLE as error:
        cli.refuse(error)
        passes = isinstance(error, UnreadableCheckpoint | UnsavedCheckpoint) or _is_of_server(error)
        return cli.CRASHED if passes else cli.REFUSED
    stopped = trainer is not None and trainer.recorder.stopped_by_alarm
    return cli.FAILED if stopped else cli.DONE


def _out_of_memory(error: Exception) -> str:
    what = (str(error).partition("RESOURCE_EXHAUSTED: ")[2] or str(error)).partition("\n")[0]
    return (
        f"no memory left: {what.rstrip('.')}. Lower trainer.micro_train_batch_size_per_gpu, "
        "trainer.micro_forward_batch_size_per_gpu, or the longest row (trainer.max_prompt_length, "
        "generator.sampling_params.max_generate_length); `jaxrl plan` shows what each part takes"
    )


def _is_of_server(error: BaseException | None) -> bool:
    """Return whether a judge or another server did not answer: it may at the next start."""
    while error is not None and not isinstance(error, RequestError):
        error = error.__cause__
    return error is not None


if __name__ == "__main__":
    sys.exit(joined_main(main, sys.argv[1:]))
