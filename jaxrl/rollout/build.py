"""What a config asks for: the native engine, and the folder where others find the weights."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxrl import config as cfg
from jaxrl.array_ops import DTYPES
from jaxrl.files import writable_folder
from jaxrl.models.exact import choose_tiles
from jaxrl.models.export import save_pretrained, untied
from jaxrl.models.kernels.choice import Choice, facts_of
from jaxrl.models.kernels.delta_rule import DELTA_RULE
from jaxrl.models.kernels.grouped_product import GROUPED_PRODUCT
from jaxrl.models.kernels.paged_attention import PAGED_ATTENTION
from jaxrl.models.linear import merge
from jaxrl.models.transformer import Params, TransformerConfig
from jaxrl.parallel import engine_meshes
from jaxrl.rollout.native.balancer import Balancer
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.native.followed import FollowingEngine, spanning_engine
from jaxrl.rollout.native.kv_cache import page_dtype
from jaxrl.rollout.weights.folder import WeightFolder


def native_engine(
    settings: cfg.InferenceEngineConfig,
    model: TransformerConfig,
    mesh: jax.sharding.Mesh,
    *,
    rows: int,
    max_model_len: int,
    decode_text: Callable[[Sequence[int]], str],
    **options: Any,
) -> NativeEngine | Balancer | FollowingEngine:
    """Build one engine over the devices of `mesh`, or several over parts of them.

    Over devices of several processes it is a collective of the job.

    Args:
        settings: `engine_init_kwargs` outrank everything here.
        rows: most samples that decode together, over all engines; they share the pages that memory
            holds.
        max_model_len: most tokens of a row.
        decode_text: token ids to text.
        **options: further arguments of `NativeEngine`.
    """
    arguments = {
        "dtype": DTYPES[cfg.engine_dtype(settings)],
        "max_num_seqs": -(-rows // settings.num_engines),
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_model_len": max_model_len,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "recompute_kv_on_update": settings.recompute_kv_on_update,
        "speculative_tokens": settings.speculative_tokens,
        "speculative_history": settings.speculative_history,
        "quantization": settings.quantization,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "decode_text": decode_text,
    }
    arguments |= options | settings.engine_init_kwargs
    parts = meshes_of_engines(settings, model, mesh)
    if cfg.engine_hosts(settings) > 1 and jax.process_count() > 1:
        return spanning_engine(model, parts[0], **arguments)
    engines = [NativeEngine(model, part, **arguments) for part in parts]
    return engines[0] if len(engines) == 1 else Balancer(engines)


def meshes_of_engines(
    settings: cfg.InferenceEngineConfig, model: TransformerConfig, mesh: jax.sharding.Mesh
) -> list[jax.sharding.Mesh]:
    """Part the devices of a mesh among the engines.

    Raises:
        ValueError: the sizes do not part the devices, or the experts, of which a model may have
            none.
    """
    tensor, experts = cfg.engine_tensor(settings), settings.expert_parallel_size
    parts = engine_meshes(mesh.devices.flat, settings.num_engines, tensor, experts)
    field = f"generator.inference_engine.expert_parallel_size={experts}"
    if experts > 1 and model.experts is None:
        raise ValueError(f"{field}: the model has no experts; set it to 1")
    if model.experts is not None and model.experts.count % parts[0].shape["expert"]:
        raise ValueError(
            f"{field}, over tensor_parallel_size={tensor}, does not divide the model's "
            f"{model.experts.count} experts; set it to 1, or to a size that does"
        )
    return parts


def engine_kernel(config: cfg.TrainConfig, model: TransformerConfig, device: Any) -> Choice:
    """Choose the kernel of the attention of an engine of ours.

    Raises:
        ValueError: `trainer.kernels` names one that cannot run the model.
    """
    settings = config.generator.inference_engine
    facts = facts_of(device, DTYPES[cfg.engine_dtype(settings)], model)
    facts = facts._replace(pages=page_dtype(settings.kv_cache_dtype, facts.dtype))
    named = config.trainer.kernels.get(PAGED_ATTENTION.name)
    return PAGED_ATTENTION.choose(facts, named)


def engine_of_run(
    config: cfg.TrainConfig,
    model: TransformerConfig,
    mesh: jax.sharding.Mesh,
    decode_text: Callable[[Sequence[int]], str],
    processes: int | None = None,
    **options: Any,
) -> NativeEngine | Balancer | FollowingEngine:
    """Build the native engine of a training run.

    Args:
        decode_text: token ids to text.
        processes: of the job; None = this one's. Each engine samples a share of the prompts.
        **options: further arguments of `NativeEngine`.
    """
    settings = config.generator.inference_engine
    # environments, guests and evaluations come by the clock; the order in which they do must
    # change no bit, but of a run that follows the clock anyway
    by_clock = config.generator.max_turns > 1 or settings.enable_http_endpoint
    by_clock |= cfg.overlaps(config)
    repeats = not cfg.runs_free(config)
    shares = (processes or jax.process_count()) // cfg.engine_hosts(settings)
    replay = config.trainer.policy.router_replay
    if replay != "off" and model.experts is None:
        raise ValueError(
            f"trainer.policy.router_replay={replay!r} has no effect: the model has no experts; set "
            "it to 'off'"
        )
    return native_engine(
        settings,
        model,
        mesh,
        rows=min(settings.max_num_seqs, cfg.rows_at_once(config, shares)),
        max_model_len=cfg.longest_row(config),
        shrink=False if by_clock and repeats else None,
        decode_text=decode_text,
        group_bytes=cfg.group_bytes(config),
        kernel=engine_kernel(config, model, mesh.devices.flat[0]).name,
        experts_kernel=config.trainer.kernels.get(GROUPED_PRODUCT.name),
        rule_kernel=config.trainer.kernels.get(DELTA_RULE.name),
        keep_routes=replay != "off",
        tiles=choose_tiles(
            config.trainer.exact,
            mesh.devices.flat[0].platform,
            tokens=config.trainer.exact_tile,
            parts=cfg.exact_parts(config),
            rows=cfg.exact_rows(config),
        ),
        **options,
    )


def weight_folder(
    config: cfg.TrainConfig, model: TransformerConfig, tokenizer: Any
) -> WeightFolder:
    """Return what writes weights as whole Hugging Face folders, adapters merged.

    A server can also be started from one.
    """
    root, write = server_folder(*weights_root(config)), model_writer(config, model, tokenizer)
    return WeightFolder(root, lambda params, folder: write(merge(params), folder))


def weights_root(config: cfg.TrainConfig) -> tuple[str, str]:
    """Return the field that says where weights for servers are written, and its value."""
    folder = config.generator.inference_engine.weights_folder
    folder = folder or str(cfg.run_folder(config.trainer) / "weights")
    return "generator.inference_engine.weights_folder", folder


def server_folder(field: str, folder: str) -> Path:
    """Return a folder of this machine, which servers see under the same path.

    Raises:
        ValueError: it cannot be written to, or is a bucket; names the config field.
    """
    root = writable_folder(field, folder)
    if "://" in str(root):
        raise ValueError(f"{field}={folder!r} must be a folder that servers can open, not a bucket")
    return Path(root)


def model_writer(
    config: cfg.TrainConfig, model: TransformerConfig, tokenizer: Any
) -> Callable[[Params, Path], None]:
    """Write parameters without adapters as a Hugging Face folder.

    vLLM computes in one data type, in which it gets all of them; the native sampler keeps some in
    float32, and has no use for what its forward does not read. vLLM 0.32 does not reload a head
    that is the embeddings; it gets one of its own.
    """
    engine = config.generator.inference_engine
    is_vllm = engine.backend == "vllm"
    dtype = cfg.engine_dtype(engine) if is_vllm else "float32"
    save = functools.partial(
        save_pretrained, tokenizer=tokenizer, dtype=dtype, with_others=is_vllm, overwrite=True
    )

    def write(params: Params, folder: Path) -> None:
        save(folder, *(untied(model, params) if is_vllm else (model, params)))

    return write
