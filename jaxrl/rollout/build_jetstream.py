"""`generator.inference_engine.backend="jetstream"`.

From config to engine. See docs/jetstream.md.
"""

import os
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl import config as cfg
from jaxrl.array_ops import DTYPES
from jaxrl.functions import import_function
from jaxrl.models.kernels.grouped_product import GROUPED_PRODUCT
from jaxrl.models.transformer import Params, TransformerConfig
from jaxrl.parallel import engine_meshes
from jaxrl.rollout.build import engine_kernel, weight_folder
from jaxrl.rollout.jetstream.driver import JetStreamDriver
from jaxrl.rollout.jetstream.engine import TransformerEngine
from jaxrl.rollout.native.balancer import Balancer
from jaxrl.rollout.protocol import Engine
from jaxrl.rollout.weights.folder import WeightFolder

TOKENS_PER_CALL = 8  # of our engine: refills wait for the end of a call


def jetstream_engine(config: cfg.TrainConfig, model: Any, mesh: Mesh, tokenizer: Any) -> Engine:
    """Build the engine that the config asks for: in this process, or over JetStream servers.

    Args:
        config: resolved and validated.
        model: architecture of the policy.
        mesh: devices of engines in this process.
        tokenizer: of the policy.

    Raises:
        ValueError: a function cannot be imported, or what it makes is no engine; a flax module
            without an engine of its own.
    """
    settings = config.generator.inference_engine
    engine_kwargs = dict(settings.engine_init_kwargs)
    options: dict[str, Any] = {
        "sampling": engine_kwargs.pop("sampling", None),
        "decode_text": tokenizer.decode,
        "max_model_len": cfg.longest_row(config),
    }
    if not settings.run_engines_locally:
        return _client(config, model, tokenizer, engine_kwargs, options)
    convert = engine_kwargs.pop("convert_params", None)
    if convert is not None:
        options["convert_params"] = import_function(convert, "convert_params")
    if "engine" in engine_kwargs:
        make = import_function(engine_kwargs.pop("engine"), "JetStream engine")
        return JetStreamDriver(make(**engine_kwargs), **options)
    tensor = cfg.engine_tensor(settings)
    meshes = engine_meshes(mesh.devices.flat, settings.num_engines, tensor)
    made = [_our_engine(config, model, part, tokenizer, engine_kwargs) for part in meshes]
    engines = [JetStreamDriver(engine, **options) for engine in made]
    return engines[0] if len(engines) == 1 else Balancer(engines)


def _our_engine(
    config: cfg.TrainConfig, model: Any, mesh: Mesh, tokenizer: Any, engine_kwargs: dict[str, Any]
) -> TransformerEngine:
    if not isinstance(model, TransformerConfig):
        raise ValueError(
            "generator.inference_engine.backend='jetstream' samples a flax module only with an "
            "engine of your own: name it in engine_init_kwargs['engine'], or use 'native'"
        )
    settings, longest = config.generator.inference_engine, config.generator.max_input_length
    assert longest is not None  # resolved
    rows = min(settings.max_num_seqs, cfg.rows_at_once(config, jax.process_count()))
    options: dict[str, Any] = {
        "dtype": DTYPES[cfg.engine_dtype(settings)],
        "slots": -(-rows // settings.num_engines),
        "max_prefill_length": longest,
        "max_target_length": cfg.longest_row(config),
        "tokens_per_call": TOKENS_PER_CALL,
        "tokenizer": tokenizer,
        "kernel": engine_kernel(config, model, mesh.devices.flat[0]).name,
        "experts_kernel": config.trainer.kernels.get(GROUPED_PRODUCT.name),
    }
    return TransformerEngine(model, mesh, **options | engine_kwargs)


def _client(
    config: cfg.TrainConfig,
    model: Any,
    tokenizer: Any,
    engine_kwargs: dict[str, Any],
    options: dict[str, Any],
) -> Engine:
    try:
        from jaxrl.rollout.jetstream.wire.client import JetStreamClient
    except ImportError as error:
        raise ValueError(
            f"JetStream servers need pip install 'jaxrl[jetstream]' ({error})"
        ) from error
    control = import_function(engine_kwargs.pop("control"), "control")
    if name := engine_kwargs.pop("token_env", None):
        if name not in os.environ:
            raise ValueError(
                f"engine_init_kwargs['token_env']={name!r}: there is no such environment variable"
            )
        options["token"] = os.environ[name]
    options["publish"] = _publisher(weight_folder(config, model, tokenizer), control)
    return JetStreamClient(config.generator.inference_engine.remote_urls, **options | engine_kwargs)


def _publisher(
    weights: WeightFolder, control: Callable[[str, int], None]
) -> Callable[[Params, int], None]:
    """Write each version to a folder, tell the servers, and delete the version before it."""

    def publish(params: Params, version: int) -> None:
        folder = weights.publish(params, version)
        control(str(folder), version)
        weights.keep_only(version)

    return publish
