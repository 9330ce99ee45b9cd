"""Find and load what an evaluation asks: a checkpoint, a model or adapter folder, or servers."""

import copy
import os
import re
from dataclasses import dataclass
from typing import Any

import jax

from jaxrl import config as cfg
from jaxrl.files import as_path, missing_packages_named
from jaxrl.hub import HUB_ID
from jaxrl.models.adapter import AdaptedModel
from jaxrl.models.lora import attach
from jaxrl.models.peft_format import CONFIG_FILE, load_adapter
from jaxrl.models.placement import model_shardings, placed_params
from jaxrl.models.transformer import Params, TransformerConfig
from jaxrl.parallel import Placement
from jaxrl.parallel.checksums import checksums
from jaxrl.parallel.offload import on_device
from jaxrl.records.checkpoint import (
    PREFIX,
    Checkpointer,
    CheckpointError,
    DamagedCheckpoint,
    differences,
)
from jaxrl.training.weights import Weights

_FLAG = "--subject"


@dataclass(frozen=True)
class EvalTarget:
    """Name what an evaluation asks.

    Attributes:
        kind: "checkpoint", "model" (a Hugging Face folder or hub id), "adapter" (a PEFT folder),
            "server", or "policy": what a run of the config starts from.
        where: folder, id, or addresses.
        step: of a checkpoint.
    """

    kind: str
    where: str
    step: int = 0

    @property
    def urls(self) -> list[str]:
        """Return the servers' addresses, without the "/v1" that OpenAI's API clients put there."""
        return [url.strip().rstrip("/").removesuffix("/v1") for url in self.where.split(",")]


def find_target(text: str) -> EvalTarget:
    """Return what a folder, a hub id, or addresses of servers (separated by commas) stand for.

    Raises:
        ValueError: nothing of it is there; says what is, and what could be given.
    """
    if text.startswith(("http://", "https://")):
        return EvalTarget("server", text)
    path = as_path(_FLAG, os.path.expanduser(text))
    with missing_packages_named(_FLAG, text):
        if (path / CONFIG_FILE).exists():
            return EvalTarget("adapter", str(path))
        if (path / "config.json").exists():
            return EvalTarget("model", str(path))
        step = re.fullmatch(rf"{PREFIX}_(\d+)", path.name)
        if step and (path / "state").exists() and (path / "meta").exists():
            return EvalTarget("checkpoint", str(path), int(step[1]))
        if path.exists():
            held = sorted(p.name for p in path.iterdir())[:8] if path.is_dir() else "no folder"
            raise ValueError(
                f"{_FLAG}={text!r} is neither a model folder (config.json), nor an adapter folder "
                f"({CONFIG_FILE}), nor a checkpoint ({PREFIX}_<N> with state and meta); it holds "
                f"{held}"
            )
    if HUB_ID.fullmatch(text):
        return EvalTarget("model", text)
    raise ValueError(
        f"{_FLAG}={text!r} does not exist; give a model folder or hub id, an adapter folder, a "
        f"checkpoint {PREFIX}_<N>, or the address of a server, http://host:port"
    )


def policy_of(config: cfg.TrainConfig) -> EvalTarget:
    """Return what a run of the config starts from, random or not."""
    return EvalTarget("policy", config.trainer.policy.model.path or "")


def config_for(config: cfg.TrainConfig, target: EvalTarget) -> cfg.TrainConfig:
    """Return a copy of an unresolved config in which the policy is the target.

    Of servers the config's policy remains the tokenizer; of checkpoints and adapters it is also the
    architecture, and the base.
    """
    config = copy.deepcopy(config)
    policy, engine = config.trainer.policy.model, config.generator.inference_engine
    engine.enable_http_endpoint = False
    config.trainer.ref.model.lora = cfg.SkyRLLoraConfig()  # no adapters of a reference are read
    if config.sft != cfg.SFTConfig():  # a supervised run's, whose batch is one minibatch
        config.sft = cfg.SFTConfig()
        config.trainer.policy_mini_batch_size = config.trainer.train_batch_size
    if target.kind != "server" and not engine.run_engines_locally:
        raise ValueError(
            "generator.inference_engine.run_engines_locally=False: the servers would lose the "
            f"weights that they have; set it to true, or give {_FLAG}=http://..."
        )
    if target.kind == "model":
        policy.path, policy.random_init = target.where, False
    if target.kind in ("model", "adapter"):
        policy.lora = cfg.SkyRLLoraConfig()
    if target.kind == "server":
        if engine.backend not in ("native", "vllm"):
            raise ValueError(
                f"{_FLAG}={target.where!r}: generator.inference_engine.backend="
                f"{engine.backend!r} must be the kind of the server: 'native' or 'vllm'"
            )
        engine.run_engines_locally, engine.remote_urls = False, target.urls
        engine.external_server_urls = engine.external_proxy_url = None
        engine.engine_init_kwargs, engine.engine_devices, engine.vllm_python = {}, None, None
    return config


def load_weights(
    target: EvalTarget,
    trainer: cfg.TrainerConfig,
    model: TransformerConfig | AdaptedModel,
    placement: Placement,
) -> Params:
    """Load all parameters of the target onto its devices; nothing of an optimizer is read.

    Args:
        trainer: of `config_for`, resolved.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model.
        ValueError, OSError: a folder is not what it should be.
    """
    policy = Weights(trainer, "policy", model, placement)
    policy.load_base()
    if target.kind == "checkpoint":
        abstract = placed_params(policy.trained, placement)
        return on_device(policy.whole(restore_params(target, abstract, policy.describe())))
    params = policy.initial()
    if target.kind != "adapter":
        return on_device(policy.whole(params))
    if isinstance(model, AdaptedModel):
        raise ValueError(f"{_FLAG}={target.where!r}: {model.name} is a flax module; no adapters")
    lora, adapters = load_adapter(target.where, model)
    adapters = jax.device_put(adapters, model_shardings(lora, placement))
    return attach(lora, params, adapters)


def restore_params(target: EvalTarget, abstract: Params, model: dict[str, Any]) -> Params:
    """Restore the trained parameters of a checkpoint and compare them with the saved checksums.

    Args:
        abstract: shapes, dtypes and shardings.
        model: what this policy is, `Weights.describe`.

    Raises:
        CheckpointError: it is damaged, or of another model.
    """
    path, step = target.where, target.step
    source = Checkpointer(os.path.dirname(path), read_only=True)
    try:
        saved = source.read_meta(step)
        policy = {key: x for key, x in saved["model"].items() if key != "critic"}  # not asked
        if different := differences(policy, model):
            raise CheckpointError(
                f"checkpoint {path} is of another model; (saved, this config's): {different}. Give "
                "the config of its run"
            )
        params = source.files.restore(step, "state", {"params": abstract}, partial=True)
        found = {f".params{name}": number for name, number in checksums(params["params"]).items()}
        recorded = saved["checksums"].items()
        recorded = {name: number for name, number in recorded if name.startswith(".params")}
        if wrong := differences(recorded, found):
            raise ValueError(f"the values of {sorted(wrong)} are not those that were saved")
    except CheckpointError:
        raise
    except Exception as error:  # whatever a reader of damaged files may raise
        raise DamagedCheckpoint(f"{path} is damaged ({type(error).__name__}: {error})") from error
    finally:
        source.close()
    return params["params"]
