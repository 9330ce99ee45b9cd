"""What the engine must hold, where it is, and what it cannot be asked for."""

import math
import warnings
from typing import Any, NoReturn

from jaxrl.config.generator import (
    GeneratorConfig,
    InferenceEngineConfig,
    SamplingParams,
    engine_hosts,
    engine_tensor,
)
from jaxrl.config.train_config import TrainConfig
from jaxrl.config_error import fail

_ENGINE = "generator.inference_engine"
_OF_STEPS = (
    "what is known of earlier answers follows from finished steps, and an asynchronous trainer "
    "(trainer.fully_async.enabled) samples while they go on"
)


def rows_at_once(config: TrainConfig, num_processes: int = 1) -> int:
    """Count the trajectories of the larger of a training and an evaluation batch.

    Of both where they are sampled side by side. Until it is known how many prompts there are to be
    evaluated (`platform_defaults.settle_evaluation`) they count as many as a batch may have.

    Args:
        num_processes: that share the prompts of a batch; the largest share counts.
    """
    generator, trainer = config.generator, config.trainer
    under_way = trainer.train_batch_size + generator.partial_rollouts.extra_prompts
    evaluation = generator.inference_engine.eval_prompts_at_once
    if evaluation is None:
        evaluation = trainer.eval_batch_size if evaluates(config) else 0
    prompts, evaluated = (-(-size // num_processes) for size in (under_way, evaluation))
    evaluated *= generator.eval_n_samples_per_prompt
    if not overlaps(config):
        return max(prompts * generator.n_samples_per_prompt, evaluated)
    workers = trainer.fully_async.num_parallel_generation_workers
    groups = -(-workers // num_processes) if runs_free(config) else prompts
    return groups * generator.n_samples_per_prompt + evaluated * (trainer.eval_interval > 0)


def evaluates(config: TrainConfig) -> bool:
    """Return whether there is an evaluation."""
    return config.trainer.eval_interval > 0 and bool(config.data.val_data)


def exact_parts(config: TrainConfig) -> int:
    """Return the logical parts of the exact mode: the devices that split a matrix divide them."""
    sampler = engine_tensor(config.generator.inference_engine)
    return math.lcm(config.trainer.policy.mesh.tensor, sampler)


def exact_rows(config: TrainConfig) -> int:
    """Return the rows by which sampler and trainer choose the tile of the exact mode."""
    return min(config.generator.inference_engine.max_num_seqs, rows_at_once(config, 1))


def overlaps(config: TrainConfig) -> bool:
    """Return whether sampling goes on while the trainer trains and evaluates."""
    settings = config.trainer.fully_async
    return settings.enabled and settings.max_staleness_steps > 0


def runs_free(config: TrainConfig) -> bool:
    """Return whether the clock decides what makes a batch."""
    return overlaps(config) and config.trainer.fully_async.schedule == "free"


def _check_history(config: TrainConfig) -> None:
    """Refuse to keep earlier answers where nobody would use them."""
    engine = config.generator.inference_engine
    for name in ("speculative_history", "speculative_least"):
        value = getattr(engine, name)
        if value and not engine.speculative_tokens:
            _fail(
                name, value, "is of use only with speculative_tokens; set that, e.g. 3, or this 0"
            )
        if value and not in_process(config):
            _fail(name, value, "is for our engine in the trainer's processes; set it to 0")
        if value and config.trainer.fully_async.enabled:
            _fail(name, value, f"{_OF_STEPS}; set it to 0")
    # whether it pays must follow from tokens, not from who was beside them or where blocks ended
    others = {
        "enable_http_endpoint": engine.enable_http_endpoint,
        "generator.sampling_params.stop": config.generator.sampling_params.stop,
        "generator.partial_rollouts": carries(config),
    }
    if engine.speculative_least and any(others.values()):
        name = next(name for name, value in others.items() if value)
        fix = f"cannot be judged with {name}; set it to 0, which always guesses"
        _fail("speculative_least", engine.speculative_least, fix)
    if config.generator.longest_first and config.trainer.fully_async.enabled:
        fail("generator.longest_first", True, f"{_OF_STEPS}; set it to False")


def carries(config: TrainConfig) -> bool:
    """Return whether samples that are not at their end go on in the next step."""
    return config.generator.partial_rollouts.max_tokens_per_step is not None


def longest_row(config: TrainConfig) -> int:
    """Return the most tokens of a turn's prompt and response together."""
    generator = config.generator
    assert generator.max_input_length is not None  # resolved
    phases = (generator.sampling_params, generator.eval_sampling_params)
    return generator.max_input_length + max(p.max_generate_length for p in phases if p is not None)


def keeps_pages(generator: GeneratorConfig) -> bool:
    """Tell whether a conversation keeps its pages of the engine while its environment thinks."""
    return generator.max_turns > 1


def in_process(config: TrainConfig) -> bool:
    """Return whether the engine shares this process and its devices."""
    engine = config.generator.inference_engine
    started = engine.backend == "vllm" or config.trainer.placement.rollout_num_nodes > 0
    return engine.run_engines_locally and not started


def longest_wait(config: TrainConfig) -> float | None:
    """Return the seconds after which a run gives up what it waits for while it samples.

    That is one call of an environment, or one of a server; None = it waits for ever.
    """
    gym = config.environment.skyrl_gym
    limit = gym.env_timeout_seconds if gym.max_env_workers else None
    if limit is None or in_process(config):
        return limit
    return max(limit, config.generator.inference_engine.request_timeout_seconds)


def leaves_out_ids(config: TrainConfig) -> bool:
    """Return whether what samples is jaxrl's own head, which can leave ids of the model out."""
    engine = config.generator.inference_engine
    ours = engine.run_engines_locally and "engine" not in engine.engine_init_kwargs
    return engine.backend == "native" or (engine.backend == "jetstream" and ours)


def by_transfer(config: TrainConfig) -> bool:
    """Return whether servers pull their weights from the processes of the trainer."""
    workers = config.trainer.placement.rollout_num_nodes > 0  # whatever the config names
    return workers or config.generator.inference_engine.weight_transport == "transfer"


def by_versions(config: TrainConfig) -> bool:
    """Return whether servers read versions that may be changes, not Hugging Face folders."""
    engine = config.generator.inference_engine
    if in_process(config) or by_transfer(config):
        return False
    return engine.weight_delta or "://" in (engine.weights_folder or "").removeprefix("file://")


def starts_own_engine(config: TrainConfig) -> bool:
    """Return whether the run starts engines of jaxrl, here or in rollout workers."""
    engine = config.generator.inference_engine
    own = engine.backend == "native" or (
        engine.backend == "jetstream" and "engine" not in engine.engine_init_kwargs
    )
    return engine.run_engines_locally and own


def group_bytes(config: TrainConfig) -> int:
    """Return the most bytes of weights that are on their way to an engine at a time."""
    return int(config.generator.inference_engine.weight_transfer_threshold_cuda_ipc_GB * 1e9)


def sends_adapters(config: TrainConfig) -> bool:
    """Return whether servers get the adapters alone; they have, or are started with, the base."""
    lora = config.trainer.policy.model.lora
    on_vllm = config.generator.inference_engine.backend == "vllm"
    return on_vllm and lora.rank > 0 and lora.lora_sync_path is not None


def server_urls(config: TrainConfig) -> list[str]:
    """Return the addresses of the servers that run already; a router alone counts as one."""
    engine = config.generator.inference_engine
    urls = engine.remote_urls or engine.external_server_urls or []
    return urls or [u for u in [engine.external_proxy_url] if u]


def check_engines(config: TrainConfig, num_devices: int, num_processes: int = 1) -> None:
    """Check that engines and tensor parallelism fit the devices; remote ones have an address.

    Args:
        num_devices: of the sampler in a process.
        num_processes: of the job.
    """
    engine = config.generator.inference_engine
    if engine_hosts(engine) > 1:
        _check_hosts(config, num_processes)
    if in_process(config):
        hosts = engine.hosts_per_engine
        if hosts is None:
            hosts = least_hosts(config, num_devices, num_processes)
        _check_in_process(engine, num_devices * hosts)
    else:
        _check_sampling_mask(config)
    if not in_process(config) or engine.backend != "native":
        _check_replay(config)
    _check_workers(config)
    _check_transport(config)
    _warn_of_adapter_folder(config)
    if engine.expert_parallel_size > 1 and engine.backend not in ("native", "vllm"):
        fix = f"is for the backends 'native' and 'vllm', not {engine.backend!r}; set it to 1"
        _fail("expert_parallel_size", engine.expert_parallel_size, fix)
    if engine.speculative_tokens and engine.backend != "native":
        fix = f"is for the backend 'native', not {engine.backend!r}; set it to 0"
        _fail("speculative_tokens", engine.speculative_tokens, fix)
    _check_history(config)
    if engine.backend == "jetstream":
        _check_jetstream(config)
    elif engine.run_engines_locally:
        _check_started(config)
    else:
        _check_remote(config)


def engine_parts(engine: InferenceEngineConfig) -> int:
    """Return a number that the devices of all engines must be a multiple of."""
    return engine.num_engines * max(engine_tensor(engine), engine.expert_parallel_size)


def spans_hosts(config: TrainConfig) -> bool:
    """Return whether an engine may have the devices of several processes."""
    return _only_one_host(config) is None


def least_hosts(config: TrainConfig, num_devices: int, num_processes: int) -> int:
    """Return the fewest processes whose devices the sizes of an engine part; 1 if there are none.

    Args:
        num_devices: of the sampler in a process.
        num_processes: of the job.
    """
    parts = engine_parts(config.generator.inference_engine)
    most = num_processes if spans_hosts(config) else 1
    divisors = (n for n in range(1, most + 1) if num_processes % n == 0)
    return next((n for n in divisors if num_devices * n % parts == 0), 1)


def _warn_of_adapter_folder(config: TrainConfig) -> None:
    lora, backend = config.trainer.policy.model.lora, config.generator.inference_engine.backend
    if lora.rank > 0 and lora.lora_sync_path is not None and backend != "vllm":
        warnings.warn(
            f"trainer.policy.model.lora.lora_sync_path={lora.lora_sync_path!r} has no effect with "
            f"generator.inference_engine.backend={backend!r}, which gets the adapters merged into "
            "the weights; set it to None",
            stacklevel=4,
        )


def _fail(name: str, value: Any, problem: str) -> NoReturn:
    fail(f"generator.inference_engine.{name}", value, problem)


def _check_in_process(engine: InferenceEngineConfig, num_devices: int) -> None:
    tensor, experts = engine_tensor(engine), engine.expert_parallel_size
    if experts > 1 and experts % tensor:
        fix = f"must be 1 or a multiple of tensor_parallel_size={tensor}"
        _fail("expert_parallel_size", experts, fix)
    parts = engine_parts(engine)
    if num_devices % parts:
        larger = "tensor" if tensor >= experts else "expert"
        _fail(
            "num_engines",
            engine.num_engines,
            f"times {larger}_parallel_size={max(tensor, experts)} is {parts}, which does not "
            f"divide {num_devices} devices; choose sizes whose product does",
        )
    if engine.pipeline_parallel_size != 1:
        stages = engine.pipeline_parallel_size
        _fail("pipeline_parallel_size", stages, "is for backend='vllm'; set it to 1")


def _check_hosts(config: TrainConfig, num_processes: int) -> None:
    """Check that a job can have engines over several of its processes."""
    hosts = engine_hosts(config.generator.inference_engine)
    problem = _only_one_host(config)
    if problem is None and num_processes % hosts:
        problem = f"does not divide the {num_processes} processes of the job; choose one that does"
    if problem:
        _fail("hosts_per_engine", hosts, problem)


def _only_one_host(config: TrainConfig) -> str | None:
    """Return why an engine cannot have the devices of several processes, or None."""
    engine = config.generator.inference_engine
    if not in_process(config) or engine.backend != "native":
        return "is for jaxrl's own engine in the processes of the run; set it to 1"
    if engine.num_engines != 1:
        return f"makes one engine of them, and num_engines={engine.num_engines}; set that to 1"
    if not config.trainer.placement.colocate_all:
        return "has the devices of the trainer; set trainer.placement.colocate_all=True, or 1"
    if engine.enable_http_endpoint:
        return "samples only while the run does; set enable_http_endpoint=False, or 1"
    return None


def _check_workers(config: TrainConfig) -> None:
    """Check that rollout workers are jaxrl's servers, and no part of the trainer's devices."""
    placement, engine = config.trainer.placement, config.generator.inference_engine
    number = placement.rollout_num_nodes
    if number == 0:
        return
    problem = None
    if placement.colocate_all:
        problem = "are hosts that only sample; set trainer.placement.colocate_all=false, or 0 hosts"
    elif engine.backend != "native":
        problem = f"runs jaxrl's own engine; set backend='native' (it is {engine.backend!r}), or 0"
    elif not engine.run_engines_locally:
        problem = "starts servers, and run_engines_locally=false names others; set it to true, or 0"
    if problem:
        fail("trainer.placement.rollout_num_nodes", number, problem)


def _check_transport(config: TrainConfig) -> None:
    engine = config.generator.inference_engine
    if engine.weight_transport == "folder":
        if by_versions(config) and engine.backend != "native":
            reads = f"backend={engine.backend!r} reads whole Hugging Face folders on a disk"
            if engine.weight_delta:
                _fail("weight_delta", True, f"{reads}; set it to false")
            fix = "set a folder that trainer and servers see under the same path"
            _fail("weights_folder", engine.weights_folder, f"{reads}; {fix}")
        if engine.weight_delta and in_process(config):
            fix = "the engine is in this process, where nothing is sent; set it to false"
            _fail("weight_delta", True, fix)
        return
    if engine.backend != "native":
        fix = f"backend={engine.backend!r} cannot pull weights from a process; set 'folder'"
        _fail("weight_transport", engine.weight_transport, fix)
    if in_process(config):
        fix = "the engine is in this process, where nothing is transferred; set 'folder'"
        _fail("weight_transport", engine.weight_transport, fix)
    if server_urls(config) == [engine.external_proxy_url]:
        fix = (
            "a router cannot pull for the servers behind it; name them as remote_urls, or 'folder'"
        )
        _fail("weight_transport", engine.weight_transport, fix)


def _check_sampling_mask(config: TrainConfig) -> None:
    generator = config.generator
    for name in ("sampling_params", "eval_sampling_params"):
        if getattr(getattr(generator, name), "keep_sampling_mask", False):
            fail(
                f"generator.{name}.keep_sampling_mask",
                True,
                "is not sent over HTTP; set it to false, or use the engine in this process: "
                "generator.inference_engine.backend='native' and run_engines_locally=true",
            )


def _check_replay(config: TrainConfig) -> None:
    if (replay := config.trainer.policy.router_replay) != "off":
        fix = (
            "only the engine in this process tells the experts of a token; use that, "
            "generator.inference_engine.backend='native' and run_engines_locally=true, or set 'off'"
        )
        fail("trainer.policy.router_replay", replay, fix)


def _check_started(config: TrainConfig) -> None:
    """Refuse addresses, which are of servers that somebody else starts."""
    engine = config.generator.inference_engine
    for name in ("remote_urls", "external_server_urls", "external_proxy_url"):
        if getattr(engine, name):
            _fail(name, getattr(engine, name), "needs run_engines_locally=false; set it, or no url")
    devices = engine.engine_devices
    if devices is None:
        return
    number, name = config.trainer.placement.rollout_num_nodes, "trainer.placement.rollout_num_nodes"
    if engine.backend == "vllm":
        number, name = engine.num_engines, "num_engines"
    if len(devices) != number:
        problem = (
            f"gives the devices of each server that is started; with backend={engine.backend!r} "
            f"and {name}={number} set {f'{number} of them' if number else None}"
        )
        _fail("engine_devices", devices, problem)


def _check_remote(config: TrainConfig) -> None:
    engine, urls = config.generator.inference_engine, server_urls(config)
    if not urls:
        fix = "needs remote_urls, the addresses of the servers; set them, or start them here (true)"
        _fail("run_engines_locally", False, fix)
    if engine.remote_urls and engine.external_server_urls:
        fix = "means the same as external_server_urls, which is set too; set one of them"
        _fail("remote_urls", engine.remote_urls, fix)
    for url in [*urls, *filter(None, [engine.external_proxy_url])]:
        if not url.startswith(("http://", "https://")):
            _fail("remote_urls", url, "is no address; write it as http://host:port")
    if len(set(urls)) < len(urls):
        _fail("remote_urls", urls, "names a server twice; give each once")
    for name in ("engine_init_kwargs", "engine_devices", "vllm_python"):
        if getattr(engine, name):
            fix = "is for engines that are started here; set it where the remote ones start"
            _fail(name, getattr(engine, name), fix)


def _check_jetstream(config: TrainConfig) -> None:
    """Check that JetStream servers are told what they need and asked for what they can give."""
    generator = config.generator
    engine = generator.inference_engine
    for name in ("external_server_urls", "external_proxy_url"):
        if getattr(engine, name):
            fix = "is for HTTP servers; JetStream servers go into remote_urls"
            fail(f"{_ENGINE}.{name}", getattr(engine, name), fix)
    if engine.run_engines_locally:
        if engine.remote_urls:
            fix = "has no effect with run_engines_locally=True; set that to False"
            fail(f"{_ENGINE}.remote_urls", engine.remote_urls, fix)
        if "engine" in engine.engine_init_kwargs and engine.num_engines != 1:
            fix = "engine_init_kwargs['engine'] makes one engine; set it to 1"
            fail(f"{_ENGINE}.num_engines", engine.num_engines, fix)
        return
    _check_jetstream_servers(engine)
    if generator.sampling_params.logprobs is not None:
        fail(
            "generator.sampling_params.logprobs",
            generator.sampling_params.logprobs,
            "JetStream's wire carries no log-probs; set it to None: the trainer uses its own",
        )
    sampling = engine.engine_init_kwargs.get("sampling") or {}
    for name in ("sampling_params", "eval_sampling_params"):
        params = getattr(generator, name)
        if params is not None and (name == "sampling_params" or config.trainer.eval_interval > 0):
            _check_jetstream_sampling(f"generator.{name}", params, sampling)


def _check_jetstream_servers(engine: InferenceEngineConfig) -> None:
    if not engine.remote_urls or any("/" in url or ":" not in url for url in engine.remote_urls):
        fix = "set the addresses of the JetStream servers, e.g. ['10.0.0.5:9000']"
        fail(f"{_ENGINE}.remote_urls", engine.remote_urls, fix)
    if "control" not in engine.engine_init_kwargs:
        fail(
            f"{_ENGINE}.engine_init_kwargs",
            engine.engine_init_kwargs,
            "JetStream's wire has no weight update, so training needs another way: set 'control', "
            "a function 'module:name' that is called with a folder (under weights_folder) and its "
            "version and makes the servers load it",
        )


def _check_jetstream_sampling(field: str, params: SamplingParams, sampling: dict[str, Any]) -> None:
    """Check that the servers sample as the config asks, at the user's word."""
    defaults = SamplingParams(temperature=1.0)
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        declared = sampling.get(name, getattr(defaults, name))
        if getattr(params, name) != declared:
            fail(
                f"{field}.{name}",
                getattr(params, name),
                f"JetStream servers cannot be told how to sample, and they are said to use "
                f"{declared}; ask for that, or correct {_ENGINE}.engine_init_kwargs['sampling'] "
                "(evaluation alone: trainer.eval_interval=-1 turns it off)",
            )
    for name in ("additional_kwargs", "keep_sampling_mask"):
        if getattr(params, name):
            fix = "JetStream's wire has no such option; leave it off"
            fail(f"{field}.{name}", getattr(params, name), fix)
