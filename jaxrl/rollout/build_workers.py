"""The rollout workers that a config asks for: what each is told, and what starts it."""

import secrets
import sys
from pathlib import Path
from typing import Any

from jaxrl import config as cfg
from jaxrl.rollout.build import weights_root
from jaxrl.rollout.remote.server_process import LOOPBACK, ServerStarter
from jaxrl.rollout.remote.worker import OwnServer

STEPS_PER_DISPATCH = 32  # as of an engine in the process: nobody reads a stream
_MESH = {"data": 1, "fsdp": -1, "tensor": 1, "context": 1, "expert": 1}  # of what a host has


def rollout_workers(config: cfg.TrainConfig) -> tuple[list[ServerStarter], str]:
    """Return a worker for each of `trainer.placement.rollout_num_nodes`, and their token.

    They are not started yet. Where Ray is initialised each is an actor in a bundle of its own; else
    they are processes of this machine.

    Raises:
        ValueError: Ray has not got the hosts.
    """
    token, told = secrets.token_urlsafe(32), worker_config(config)
    number, folder = config.trainer.placement.rollout_num_nodes, cfg.run_folder(config.trainer)
    devices = config.generator.inference_engine.engine_devices or [None] * number
    environments = [
        {config.serve.token_env: token} | ({"CUDA_VISIBLE_DEVICES": of_one} if of_one else {})
        for of_one in devices
    ]
    folders = [Path(str(folder), "rollout_workers", str(n)) for n in range(number)]
    given = list(zip(folders, environments, strict=True))
    ray = sys.modules.get("ray")  # not imported: then nobody has initialised it
    if ray is not None and ray.is_initialized():
        from jaxrl.cluster.rollout_worker import ray_workers

        hosts = config.trainer.placement.policy_num_nodes
        seconds = config.trainer.cluster.start_seconds
        return list(ray_workers(told, given, hosts, seconds)), token
    return [OwnServer(told, folder, environment) for folder, environment in given], token


def worker_config(config: cfg.TrainConfig) -> dict[str, Any]:
    """Return the config of each worker: the run's, with the settings of a server.

    All have the same number of slots, and blocks always run over all of them: so the bits of a
    sample do not depend on which worker draws it, nor on what else that one is asked for.
    """
    placement, rows = config.trainer.placement, cfg.rows_at_once(config)
    engine, path = config.generator.inference_engine, config.trainer.policy.model.path
    assert path is not None  # validated
    share = -(-min(engine.max_num_seqs, rows) // placement.rollout_num_nodes)
    generator = config.generator
    most = max(generator.n_samples_per_prompt, generator.eval_n_samples_per_prompt)
    own = {
        "http_endpoint_host": LOOPBACK,
        "http_endpoint_port": 0,
        "enable_http_endpoint": False,
        "weight_transport": "folder",  # of who gives
        "engine_devices": None,
        "engine_init_kwargs": {"shrink": False, **engine.engine_init_kwargs},
    }
    serve = {
        "receive_weights": engine.weight_transport == "transfer",
        "weights_root": str(weights_root(config)),
        "token_file": None,
        "grpc_port": None,
        "max_num_seqs": share,
        "max_model_len": cfg.longest_row(config),
        "steps_per_dispatch": STEPS_PER_DISPATCH,
        "max_samples": max(config.serve.max_samples, rows),
        "max_samples_per_request": max(config.serve.max_samples_per_request, most),
        "request_seconds": engine.request_timeout_seconds,
    }
    changes = {
        "trainer.placement.rollout_num_nodes": 0,
        "trainer.placement.colocate_all": True,
        "trainer.placement.colocate_policy_ref": True,
        "trainer.ref.mesh": None,
        "trainer.critic.mesh": None,
        "trainer.policy.model.path": str(Path(path).absolute()) if Path(path).is_dir() else path,
        **{f"trainer.policy.mesh.{axis}": size for axis, size in _MESH.items()},
        **{f"generator.inference_engine.{name}": value for name, value in own.items()},
        **{f"serve.{name}": value for name, value in serve.items()},
    }
    return cfg.get_config_as_dict(cfg.apply_overrides(config, changes))
