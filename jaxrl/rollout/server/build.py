"""From a config to a server: its engine, its weights, what clients are told of it."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from etils import epath

from jaxrl import config as cfg
from jaxrl.config.model_limits import check_ids, warn_of_positions
from jaxrl.config.platform_defaults import settle
from jaxrl.data.tokenizer import known_ids, load_tokenizer
from jaxrl.files import as_path, missing_packages_named
from jaxrl.hub import check_folder
from jaxrl.models import hf
from jaxrl.models.architecture import with_known_ids
from jaxrl.models.placement import place_model
from jaxrl.models.transformer import TransformerConfig, abstract_params, logical_axes
from jaxrl.parallel import make_mesh, param_shardings
from jaxrl.parallel.compilation import enable_cache
from jaxrl.rollout.build import engine_kernel, native_engine
from jaxrl.rollout.conversations.conversation import sampling_of
from jaxrl.rollout.protocol import Request, Sampling
from jaxrl.rollout.server.answer_formats import answer_format
from jaxrl.rollout.server.auth import read_token
from jaxrl.rollout.server.served_model import ServedModel
from jaxrl.rollout.server.server import HttpServer
from jaxrl.rollout.weights.incoming import Incoming
from jaxrl.rollout.weights.version_reader import VersionReader
from jaxrl.rollout.weights.versions import INDEX


def served_model(
    config: cfg.TrainConfig, tokenizer: Any, vocab_size: int, max_model_len: int
) -> ServedModel:
    """Return what clients are told of the policy of a config.

    Its name is the folder's, unless given.
    """
    path = config.trainer.policy.model.path
    assert path is not None  # checked
    return ServedModel(
        name=config.generator.inference_engine.served_model_name or Path(path).name,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=tuple(sorted({tokenizer.eos_token_id, *hf.eos_token_ids(path)})),
        variables=config.generator.chat_template_kwargs,
        answer_format=answer_format(config.serve.answer_format),
    )


def make_server(config: Any, devices: Sequence[Any] | None = None) -> HttpServer:
    """Build a server of the model that a config names, its weights loaded, to be started.

    Args:
        config: `TrainConfig`, `ml_collections.ConfigDict` or nested dict.
        devices: for the engine; None = all.

    Raises:
        ValueError: the config or the model folder is wrong, or no token protects the server.
    """
    config, _ = settle(cfg.resolve(cfg.to_train_config(config)))
    trainer, settings, serve = config.trainer, config.generator.inference_engine, config.serve
    path, template = trainer.policy.model.path, config.generator.chat_template
    if path is None:
        raise ValueError("trainer.policy.model.path=None: set a Hugging Face model folder")
    cfg.check_constraints(serve, "serve")
    cfg.check_engines(config, len(devices or jax.devices()))
    read_token(serve, settings.http_endpoint_host)  # before anything is loaded
    if serve.weights_root and "://" in serve.weights_root:
        with missing_packages_named("serve.weights_root", serve.weights_root):
            as_path("serve.weights_root", serve.weights_root).exists()
    enable_cache(trainer.compilation_cache_path)
    check_folder("trainer.policy.model.path", path)
    tokenizer: Any = load_tokenizer(
        path, template.name_or_path if template.source == "file" else None
    )
    model = hf.load_config(path, cfg.model_overrides(trainer, trainer.policy))
    ends = hf.eos_sources(path)
    check_ids("trainer.policy.model.path", path, model.vocab_size, tokenizer, ends)
    known = trainer.policy.known_ids or max([known_ids(tokenizer), *(end + 1 for end in ends)])
    model = with_known_ids(model, known)
    length = serve.max_model_len or cfg.longest_row(config)
    of_model = hf.max_positions(path), path
    warn_of_positions("serve.max_model_len", length, "a row may have", length, *of_model)
    mesh = make_mesh(devices=devices, **dataclasses.asdict(trainer.policy.mesh))
    engine = native_engine(
        settings,
        model,
        mesh,
        rows=serve.max_num_seqs,
        max_model_len=length,
        decode_text=tokenizer.decode,
        steps_per_dispatch=serve.steps_per_dispatch,
        kernel=engine_kernel(config, model, mesh.devices.flat[0]).name,
    )
    shardings = _shardings(config, model, mesh)
    reader = VersionReader(abstract_params(model), shardings)
    load, folder = functools.partial(_load, config, model, shardings, reader), hf.local_folder(path)
    server = HttpServer(
        engine,
        served_model(config, tokenizer, model.vocab_size, length),
        serve,
        host=settings.http_endpoint_host,
        port=settings.http_endpoint_port,
        weights=(load, folder, Incoming(abstract_params(model), shardings, serve.request_seconds)),
    )
    server.host.update_weights(load(folder), 0)
    server.host.warm_up([Request((0,) * (length - 1), ((0, 0),), Sampling(max_tokens=1))])
    return server


def serve_jetstream(config: Any, server: HttpServer) -> Any:
    """Answer JetStream's gRPC on `serve.grpc_port`, with the engine and the token of a server.

    Its wire has no sampling parameters: all is sampled with `generator.sampling_params`.

    Raises:
        ValueError: jaxrl[jetstream] is not installed, or the port is taken.
    """
    try:
        from jaxrl.rollout.jetstream.wire.server import serve_grpc
    except ImportError as error:
        raise ValueError(
            f"serve.grpc_port needs pip install 'jaxrl[jetstream]' ({error})"
        ) from error
    config = cfg.resolve(cfg.to_train_config(config))
    host, port = config.generator.inference_engine.http_endpoint_host, config.serve.grpc_port
    sampling = sampling_of(config.generator.sampling_params, server.served.eos_token_ids)
    try:
        return serve_grpc(
            server.host.guests,
            server.served.tokenizer,
            port,
            sampling,
            host=host,
            token=read_token(config.serve, host),
            max_samples=config.serve.max_samples_per_request,
            vocab_size=server.served.vocab_size,
        )
    except RuntimeError as error:
        raise ValueError(f"serve.grpc_port={port}: {error}; choose another one") from error


def _shardings(config: cfg.TrainConfig, model: TransformerConfig, mesh: jax.sharding.Mesh) -> Any:
    rules = cfg.sharding_rules(config.trainer.sharding_rules)
    placement = place_model(model, mesh, rules)
    return param_shardings(mesh, logical_axes(model), abstract_params(model), placement.rules)


def _load(
    config: cfg.TrainConfig,
    model: TransformerConfig,
    shardings: Any,
    reader: VersionReader,
    folder: Path | epath.Path,
) -> Any:
    """Load the parameters in a folder of the same architecture, or of a version, by its index.

    `random_init` is of the policy's own folder.
    """
    if folder.name == INDEX:
        return reader.read(epath.Path(folder).parent)
    policy = config.trainer.policy.model
    is_policy = policy.path is not None and folder == hf.local_folder(policy.path)
    return hf.load_or_init(
        folder,
        model,
        overrides=cfg.model_overrides(config.trainer, config.trainer.policy),
        random_init=policy.random_init and is_policy,
        seed=config.trainer.seed,
        shardings=shardings,
    )
