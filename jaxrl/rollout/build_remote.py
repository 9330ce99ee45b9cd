"""The engine over HTTP that a config asks for: its servers, and how weights get to them."""

import functools
import os
import secrets
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxrl import config as cfg
from jaxrl.array_ops import DTYPES
from jaxrl.config.rollouts import server_urls
from jaxrl.files import writable_folder
from jaxrl.models.adapter import AdaptedModel
from jaxrl.models.linear import base
from jaxrl.models.lora import lora_config, trained
from jaxrl.models.peft_format import check_adapter, save_adapter
from jaxrl.models.placement import place_model
from jaxrl.models.transformer import Params, TransformerConfig
from jaxrl.parallel import is_first
from jaxrl.rollout.build import model_writer, server_folder, weight_folder, weights_root
from jaxrl.rollout.conversations.across_processes import AbsentEngine
from jaxrl.rollout.protocol import MOST_COUNT, Sampling
from jaxrl.rollout.remote.engine import RemoteEngine
from jaxrl.rollout.remote.http_client import RemoteOptions
from jaxrl.rollout.remote.probe import Probe, make_score
from jaxrl.rollout.remote.server_process import LOOPBACK, ServerStarter
from jaxrl.rollout.remote.vllm_process import VllmServer, lora_flags
from jaxrl.rollout.remote.worker import OwnServer
from jaxrl.rollout.weights.folder import AdapterFolder
from jaxrl.rollout.weights.share import Shares, SharingEngine, open_shares
from jaxrl.rollout.weights.source import Source
from jaxrl.rollout.weights.transfer import WeightTransfer
from jaxrl.rollout.weights.version_folder import VersionFolder

PROBE_LENGTH = 8  # tokens of its prompt, and of its continuation
STEPS_PER_DISPATCH = 32  # of rollout workers: nobody reads a stream from them
# Each rollout worker spreads its weights over all devices of its host.
_WORKER_MESH = {"data": 1, "fsdp": -1, "tensor": 1, "context": 1, "expert": 1}


def assemble_remote_engine(
    config: cfg.TrainConfig,
    model: TransformerConfig | AdaptedModel,
    mesh: jax.sharding.Mesh,
    tokenizer: Any,
) -> RemoteEngine | AbsentEngine:
    """Build the engine over servers that are started here with the first weights, or run already.

    A collective of the job, whose first process has it.

    Args:
        config: resolved and validated.
        model: architecture of the policy.
        mesh: of the trainer, or where `local_copy` puts the weights.
        tokenizer: its files go into the weights' folders.

    Raises:
        ValueError: the model is a flax module, or a field cannot be what it is.
    """
    engine = config.generator.inference_engine
    if isinstance(model, AdaptedModel):
        raise ValueError(
            f"generator.inference_engine.backend={engine.backend!r}, run_engines_locally="
            f"{engine.run_engines_locally}: {model.name} has no Hugging Face form, in which "
            "weights go to other processes; set backend='native' and run_engines_locally=true"
        )
    probe, shares = _probe(config, model, mesh), None
    if cfg.by_transfer(config):
        share, streams = open_shares(delta=engine.weight_delta)
        if not is_first():
            return SharingEngine(share, streams[0], probe.score)
        shares = Shares(share, streams)
        probe = replace(probe, score=functools.partial(shares.score, probe.score))
    elif not is_first():
        return AbsentEngine()
    hosts: list[ServerStarter] = []  # none: the servers run already
    token = None
    if engine.run_engines_locally and engine.backend == "vllm":
        hosts = list(_vllm_servers(config))
    elif engine.run_engines_locally:
        hosts, token = rollout_workers(config)
    return RemoteEngine(
        [host.url for host in hosts] or server_urls(config),
        "vllm_lora" if cfg.sends_adapters(config) else engine.backend,
        weights=_source(config, model, tokenizer, shares),
        probe=probe,
        hosts=hosts,
        proxy_url=engine.external_proxy_url,
        options=_options(config, token),
    )


def served_engine(config: cfg.TrainConfig) -> RemoteEngine:
    """Return the engine over the servers at `remote_urls`, which keep the weights they have.

    Raises:
        ConnectionError: one is not there.
        ValueError: a field cannot be what it is.
    """
    backend = config.generator.inference_engine.backend
    return RemoteEngine(
        server_urls(config), backend, weights=None, probe=None, options=_options(config)
    )


def _source(
    config: cfg.TrainConfig, model: TransformerConfig, tokenizer: Any, shares: Shares | None
) -> Source:
    """Return the transport of the weights; `shares` of the trainer, where they are pulled."""
    engine = config.generator.inference_engine
    dtype, group = DTYPES[cfg.engine_dtype(engine)], cfg.group_bytes(config)
    if shares is not None:
        return WeightTransfer(dtype, group, shares=shares, delta=engine.weight_delta)
    if cfg.sends_adapters(config):
        return _adapter_folder(config, model, tokenizer)
    if cfg.by_versions(config):
        root = writable_folder(*weights_root(config))
        return VersionFolder(root, dtype, group, delta=engine.weight_delta)
    return weight_folder(config, model, tokenizer)


def _options(config: cfg.TrainConfig, token: str | None = None) -> RemoteOptions:
    engine = config.generator.inference_engine
    return RemoteOptions(
        model=engine.served_model_name,
        token=token or _token(engine.api_token_env),
        timeout_seconds=engine.request_timeout_seconds,
        max_model_len=cfg.longest_row(config),
    )


def _adapter_folder(
    config: cfg.TrainConfig, model: TransformerConfig, tokenizer: Any
) -> AdapterFolder:
    """Return what writes PEFT folders to `lora_sync_path`.

    For servers that are started here it writes the base, too.
    """
    policy = config.trainer.policy.model
    lora = lora_config(policy.lora, model, "policy")
    assert lora is not None and policy.lora.lora_sync_path is not None  # adapters are sent
    check_adapter(lora)
    field, path = "trainer.policy.model.lora.lora_sync_path", policy.path or ""  # validated

    def write(params: Params, folder: Path) -> None:
        save_adapter(folder, lora, trained(params), base=path, served=True, overwrite=True)

    root = server_folder(field, policy.lora.lora_sync_path)
    if not config.generator.inference_engine.run_engines_locally:
        return AdapterFolder(root, write)
    write_model = model_writer(config, model, tokenizer)
    return AdapterFolder(
        root,
        write,
        server_folder(*weights_root(config)) / "base",
        lambda params, folder: write_model(base(params), folder),
    )


def _probe(config: cfg.TrainConfig, model: TransformerConfig, mesh: jax.sharding.Mesh) -> Probe:
    trainer, length = config.trainer, min(PROBE_LENGTH, cfg.longest_row(config) // 2)
    placement = None
    if mesh.size > 1:
        placement = place_model(model, mesh, cfg.sharding_rules(trainer.sharding_rules))
    dtype = DTYPES[cfg.compute_dtype(trainer, "policy")]
    score = make_score(model, dtype, placement, 2 * length)
    bound = config.generator.inference_engine.probe_bound
    drawn = config.generator.sampling_params
    sampling = Sampling(length, drawn.temperature, drawn.top_k, drawn.top_p, drawn.min_p)
    return Probe(score, model.vocab_size, bound, length, sampling)


def _token(variable: str | None) -> str | None:
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise ValueError(
            f"generator.inference_engine.api_token_env={variable!r}: the environment has no such "
            "variable, or an empty one; set it to the servers' token"
        )
    return token


def _vllm_servers(config: cfg.TrainConfig) -> list[VllmServer]:
    """Return a vLLM server for each engine, not started yet."""
    engine, logs = config.generator.inference_engine, cfg.run_folder(config.trainer) / "vllm"
    flags = {
        "dtype": cfg.engine_dtype(engine),
        "max_model_len": cfg.longest_row(config),
        "max_num_seqs": -(
            -min(engine.max_num_seqs, cfg.rows_at_once(config)) // engine.num_engines
        ),
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "tensor_parallel_size": cfg.engine_tensor(engine),
        "pipeline_parallel_size": engine.pipeline_parallel_size,
        "enable_expert_parallel": engine.expert_parallel_size > 1,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "enforce_eager": engine.enforce_eager,
        "served_model_name": engine.served_model_name,
        **engine.engine_init_kwargs,
    }
    if cfg.sends_adapters(config):
        flags = lora_flags(config.trainer.policy.model.lora.rank) | flags
    python = engine.vllm_python or sys.executable
    devices = engine.engine_devices or [None] * engine.num_engines
    return [
        VllmServer(flags, logs / f"server_{number}.log", python, names)
        for number, names in enumerate(devices)
    ]


def rollout_workers(config: cfg.TrainConfig) -> tuple[list[ServerStarter], str]:
    """Return a worker for each of `trainer.placement.rollout_num_nodes`, and their token.

    They are not started yet. Where Ray is initialised each is an actor in a bundle of its own; else
    they are processes of this machine.

    Raises:
        ValueError: Ray has not got the hosts.
    """
    number, folder = config.trainer.placement.rollout_num_nodes, cfg.run_folder(config.trainer)
    folders = [Path(str(folder), "rollout_workers", str(n)) for n in range(number)]
    settings, token = worker_config(config), secrets.token_urlsafe(32)
    devices = config.generator.inference_engine.engine_devices or [None] * number
    environments = [
        {config.serve.token_env: token} | ({"CUDA_VISIBLE_DEVICES": names} if names else {})
        for names in devices
    ]
    ray = sys.modules.get("ray")  # not imported: then nobody has initialised it
    if ray is not None and ray.is_initialized():
        from jaxrl.cluster.rollout_worker import ray_workers

        workers = ray_workers(
            settings,
            folders,
            environments,
            trainer_hosts=config.trainer.placement.policy_num_nodes,
            start_seconds=config.trainer.cluster.start_seconds,
        )
        return list(workers), token
    pairs = zip(folders, environments, strict=True)
    return [OwnServer(settings, folder, environment) for folder, environment in pairs], token


def worker_config(config: cfg.TrainConfig) -> dict[str, Any]:
    """Return the config of each worker: the run's, with the settings of a server.

    All have the same number of slots, and blocks always run over all of them: so the bits of a
    sample do not depend on which worker draws it, nor on what else that one is asked for.
    """
    engine, path = config.generator.inference_engine, config.trainer.policy.model.path
    assert path is not None  # validated
    generator, rows = config.generator, cfg.rows_at_once(config)
    slots = -(-min(engine.max_num_seqs, rows) // config.trainer.placement.rollout_num_nodes)
    samples = max(generator.n_samples_per_prompt, generator.eval_n_samples_per_prompt)
    engine_settings = {
        "http_endpoint_host": LOOPBACK,
        "http_endpoint_port": 0,
        "enable_http_endpoint": False,
        "weight_transport": "folder",  # its own engine is in its process, where nothing is moved
        "engine_devices": None,
        "engine_init_kwargs": {"shrink": False, **engine.engine_init_kwargs},
    }
    serve = {
        "receive_weights": True,
        "weight_networks": ["0.0.0.0/0", "::/0"],  # who knows the token is this run
        "weights_root": None,
        "token_file": None,
        "grpc_port": None,
        "max_num_seqs": slots,
        "max_model_len": cfg.longest_row(config),
        "steps_per_dispatch": STEPS_PER_DISPATCH,
        "max_samples": max(config.serve.max_samples, rows),
        "max_samples_per_request": max(config.serve.max_samples_per_request, samples),
        "request_seconds": engine.request_timeout_seconds,
    }
    changes = {
        "trainer.placement.rollout_num_nodes": 0,
        "trainer.placement.colocate_all": True,
        "trainer.placement.colocate_policy_ref": True,
        "trainer.ref.mesh": None,
        "trainer.critic.mesh": None,
        "trainer.policy.model.path": str(Path(path).absolute()) if Path(path).is_dir() else path,
        cfg.KNOWN_IDS: config.trainer.policy.known_ids or MOST_COUNT,  # as the trainer
        **{f"trainer.policy.mesh.{axis}": size for axis, size in _WORKER_MESH.items()},
        **{f"generator.inference_engine.{name}": value for name, value in engine_settings.items()},
        **{f"serve.{name}": value for name, value in serve.items()},
    }
    return cfg.get_config_as_dict(cfg.apply_overrides(config, changes))
