"""Config of a model and its optimizer."""

from dataclasses import dataclass, field

import jax.numpy as jnp

from jaxrl.config.dataclass_config import BaseConfig

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
SCHEDULERS = ("constant", "constant_with_warmup", "linear", "cosine")


@dataclass
class SkyRLLoraConfig(BaseConfig):
    """Describe low-rank adapters: y = x W + (alpha / rank) dropout(x) A B.

    Only A and B are trained.
    """

    rank: int = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: int = 16
    """Adapter scale: the update is multiplied by alpha / rank."""
    dropout: float = 0.0
    """Dropout probability on the adapter input, in the passes that are differentiated."""
    lora_sync_path: str | None = None
    """Folder of this run alone through which adapters reach vLLM servers, which must see it under
    the same path; None = the servers get all weights, adapters merged."""
    target_modules: str | list[str] = "all-linear"
    """Matrices with an adapter, one pattern or several: the end of a Hugging Face module name
    ("q_proj"), a regular expression for a whole one, or "all-linear", all but embed_tokens and
    lm_head."""
    exclude_modules: str | list[str] | None = None
    """Which of the target modules get none, as the same patterns."""
    init_method: str = "kaiming"
    """"kaiming": A uniform in +-1 / sqrt(inputs); "gaussian": A normal, deviation 1 / rank; B 0."""


@dataclass
class ModelConfig(BaseConfig):
    """Describe where a model comes from."""

    path: str | None = None
    """Hugging Face model folder, or the id of a hub model, OWNER/NAME."""
    lora: SkyRLLoraConfig = field(default_factory=SkyRLLoraConfig)
    """Low-rank adapters."""
    random_init: bool = False
    """Random weights for the architecture in `path`/config.json, drawn from `trainer.seed`."""


@dataclass
class OptimizerConfig(BaseConfig):
    """Hold the settings of AdamW with clipping by the global gradient norm."""

    lr: float = 1e-6
    """Peak learning rate."""
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of the first and second moments."""
    weight_decay: float = 1e-2
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    offload_after_step: bool = False
    """Keep the optimizer state in host memory between steps."""
    num_warmup_steps: int = 0
    """Optimizer updates (minibatches) of linear warm-up."""
    scheduler: str = "constant_with_warmup"
    """"constant", "constant_with_warmup", "linear" or "cosine" (the last two decay to 0)."""
