"""The top of the schema, and what its unset fields mean."""

import copy
import dataclasses
import os
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from jaxrl.config import overrides
from jaxrl.config.algorithm import AlgorithmConfig, OffPolicyCorrectionConfig
from jaxrl.config.backend import MeshConfig
from jaxrl.config.data import DataConfig, SFTConfig
from jaxrl.config.dataclass_config import BaseConfig, Config
from jaxrl.config.environment import EnvironmentConfig
from jaxrl.config.generator import GeneratorConfig, SamplingParams
from jaxrl.config.mesh import map_mesh
from jaxrl.config.serving import ServeConfig, TinkerConfig
from jaxrl.config.status import new
from jaxrl.config.trainer import FullyAsyncConfig, TrainerConfig, run_folder
from jaxrl.config_error import fail


@dataclass
class TrainConfig(BaseConfig):
    """Hold everything a run needs to know."""

    data: DataConfig = field(default_factory=DataConfig)
    """The prompts."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The training run."""
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    """Rollouts."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """Which environment scores a prompt."""
    serve: Annotated[ServeConfig, new()] = field(default_factory=ServeConfig)
    """Serving over HTTP."""
    sft: Annotated[SFTConfig, new()] = field(default_factory=SFTConfig)
    """Supervised fine-tuning."""
    tinker: Annotated[TinkerConfig, new()] = field(default_factory=TinkerConfig)
    """The training service."""

    @classmethod
    def from_cli_overrides(cls, args: list[str] | dict[str, Any]) -> Self:
        """Return the defaults with overrides applied.

        Args:
            args: ["trainer.seed=1", ...] or {"trainer.seed": 1, ...}; see `apply_overrides`.

        Raises:
            ValueError: unknown key, wrong type, no "=", or a leading "+".
        """
        pairs = args if isinstance(args, dict) else overrides.parse_assignments(args)
        return overrides.apply_overrides(cls(), pairs)


SkyRLTrainConfig = TrainConfig


def make_config(
    algorithm_cls: type[AlgorithmConfig] | None = None,
    trainer_cls: type[TrainerConfig] | None = None,
    generator_cls: type[GeneratorConfig] | None = None,
) -> type[TrainConfig]:
    """Make a TrainConfig class with your subclasses in it.

    Args:
        algorithm_cls: class of `trainer.algorithm`; not used when `trainer_cls` is given.
        trainer_cls: class of `trainer`.
        generator_cls: class of `generator`.

    Example:
        @dataclass
        class MyAlgorithmConfig(AlgorithmConfig):
            my_param: int = 42

        config = make_config(algorithm_cls=MyAlgorithmConfig).from_cli_overrides(sys.argv[1:])
    """
    if trainer_cls is None and algorithm_cls is not None:
        trainer_cls = _with_fields(TrainerConfig, {"algorithm": algorithm_cls})
    groups = {"trainer": trainer_cls, "generator": generator_cls}
    return _with_fields(TrainConfig, {k: v for k, v in groups.items() if v is not None})


def resolve(config: Config) -> Config:
    """Return a copy in which every field that follows from another one is set.

    ref.model = policy.model's path and random_init, with its model_config_kwargs, to which those of
    megatron_config are added; generator.max_input_length = trainer.max_prompt_length;
    algorithm.temperature = sampling temperature; algorithm.max_seq_len = max_input_length +
    max_generate_length (for one turn only);
    policy.mesh, ref.mesh, critic.mesh = what SkyRL's fields say where they do not;
    eval_sampling_params = greedy with the same length; generator.rope_* = trainer.rope_*;
    fully_async.num_parallel_generation_workers, if the default = what the batch can keep at work;
    ckpt_path, export_path = checkpoints and exports in the run folder;
    off_policy_correction = what its preset stands for, or token weights for the deprecated use_tis.
    What the user set stays, but
    for a leading `~` in a path, which becomes the home folder, and for another name or path of a
    built-in loss or estimator, which becomes the built-in's name.
    """
    from jaxrl.registry import AdvantageEstimatorRegistry, PolicyLossRegistry  # JAX: a second

    assert isinstance(config, TrainConfig)
    config = copy.deepcopy(config)
    trainer, generator = config.trainer, config.generator
    ref, policy, algorithm = trainer.ref.model, trainer.policy.model, trainer.algorithm
    for role in (trainer.policy, trainer.ref):
        megatrons = copy.deepcopy(role.megatron_config.model_config_kwargs)
        role.model_config_kwargs = megatrons | role.model_config_kwargs
    if ref.path is None:
        ref.path, ref.random_init = policy.path, policy.random_init
        kwargs = trainer.ref.model_config_kwargs or trainer.policy.model_config_kwargs
        trainer.ref.model_config_kwargs = copy.deepcopy(kwargs)
    trainer.policy.mesh = map_mesh(trainer.policy) or MeshConfig()
    own_devices = not trainer.placement.colocate_policy_ref
    trainer.ref.mesh = map_mesh(trainer.ref) or (MeshConfig() if own_devices else None)
    trainer.critic.mesh = map_mesh(trainer.critic)
    if generator.max_input_length is None:
        generator.max_input_length = trainer.max_prompt_length
    if algorithm.temperature is None:
        algorithm.temperature = generator.sampling_params.temperature
    algorithm.policy_loss_type = PolicyLossRegistry.builtin_name(algorithm.policy_loss_type)
    estimator = AdvantageEstimatorRegistry.builtin_name(algorithm.advantage_estimator)
    algorithm.advantage_estimator = estimator
    correction = algorithm.off_policy_correction
    _apply_preset(correction)
    if algorithm.use_tis and correction.tis_ratio_type is None:
        correction.tis_ratio_type = "token"
        correction.token_tis_ratio_clip_high = algorithm.tis_imp_ratio_cap
    length = generator.sampling_params.max_generate_length
    if algorithm.max_seq_len is None and generator.max_turns == 1:
        algorithm.max_seq_len = generator.max_input_length + length
    if generator.eval_sampling_params is None:
        generator.eval_sampling_params = SamplingParams(temperature=0.0, max_generate_length=length)
    _fit_workers(trainer)
    trainer.ckpt_path = trainer.ckpt_path or str(run_folder(trainer) / "checkpoints")
    trainer.export_path = trainer.export_path or str(run_folder(trainer) / "exports")
    generator.rope_scaling = generator.rope_scaling or copy.deepcopy(trainer.rope_scaling)
    generator.rope_theta = generator.rope_theta or trainer.rope_theta
    _expand_home(config)
    return config


def _apply_preset(correction: OffPolicyCorrectionConfig) -> None:
    """Set what the name of a correction stands for.

    Raises:
        ValueError: a field says otherwise.
    """
    from jaxrl.losses.off_policy import PRESETS  # JAX: a second

    usual = OffPolicyCorrectionConfig()
    for name, value in PRESETS.get(correction.preset or "", {}).items():
        if (found := getattr(correction, name)) not in (getattr(usual, name), value):
            fail(
                f"trainer.algorithm.off_policy_correction.{name}",
                found,
                f"preset={correction.preset!r} stands for {value!r}; leave that out, or set the "
                "preset's fields by themselves",
            )
        setattr(correction, name, value)


def _fit_workers(trainer: TrainerConfig) -> None:
    """Fit SkyRL's default number of workers, which is for large batches, to the batch."""
    settings, size = trainer.fully_async, trainer.train_batch_size
    default = FullyAsyncConfig.num_parallel_generation_workers
    if settings.enabled and settings.num_parallel_generation_workers == default:
        most = size * (max(settings.max_staleness_steps, 0) + 1)
        settings.num_parallel_generation_workers = min(max(default, size), most)


def _expand_home(config: TrainConfig) -> None:
    trainer = config.trainer
    paths = [
        *((trainer, name) for name in ("log_path", "ckpt_path", "export_path", "resume_path")),
        (trainer.policy.model, "path"),
        (trainer.ref.model, "path"),
        (trainer.critic.model, "path"),
        (config.generator.chat_template, "name_or_path"),
        (config.serve, "token_file"),
        (config.serve, "weights_root"),
    ]
    for group, name in paths:
        if path := getattr(group, name):
            setattr(group, name, os.path.expanduser(path))
    for name in ("train_data", "val_data"):
        setattr(
            config.data, name, [os.path.expanduser(path) for path in getattr(config.data, name)]
        )


def _with_fields(cls: type[Config], groups: dict[str, type[BaseConfig]]) -> type[Config]:
    fields = [(name, group, field(default_factory=group)) for name, group in groups.items()]
    return dataclasses.make_dataclass(cls.__name__, fields, bases=(cls,))
