"""Config of a model and its optimizer."""

from dataclasses import dataclass, field
from typing import Annotated

from jaxrl.config.constraints import between, must, named, not_negative, one_in, one_of, positive
from jaxrl.config.dataclass_config import BaseConfig
from jaxrl.config.status import implemented, new

DECAYING = ("linear", "cosine")  # to 0 at the last update of the run
SCHEDULERS = ("constant", "constant_with_warmup", *DECAYING)
STATE_DTYPES = ("float32", "bfloat16", "int8")


@dataclass
class SkyRLLoraConfig(BaseConfig):
    """Describe low-rank adapters: y = x W + (alpha / rank) dropout(x) A B.

    Only A and B are trained.
    """

    rank: Annotated[int, not_negative] = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: Annotated[int, positive] = 16
    """Adapter scale: the update is multiplied by alpha / rank."""
    dropout: Annotated[float, between("[0, 1)", "0.0 is off")] = 0.0
    """Dropout probability on the adapter input, in the passes that are differentiated."""
    lora_sync_path: Annotated[
        str | None,
        named,
        implemented(
            "the policy's, with backend='vllm'; None: adapters are merged into the weights",
            only_with="lora.rank > 0",
            skyrl_default="/tmp/skyrl_lora_sync",
        ),
    ] = None
    """Folder of this run alone through which adapters reach vLLM servers, which must see it under
    the same path; None = the servers get all weights, adapters merged."""
    target_modules: Annotated[str | list[str], implemented("also a list")] = "all-linear"
    """Matrices with an adapter, one pattern or several: the end of a Hugging Face module name
    ("q_proj"), a regular expression for a whole one, or "all-linear", all but embed_tokens and
    lm_head."""
    exclude_modules: Annotated[str | list[str] | None, implemented("also a list")] = None
    """Which of the target modules get none, as the same patterns."""
    init_method: Annotated[
        str, one_in("jaxrl.models.lora:INIT_METHODS", later=("xavier", "normal", "zero"))
    ] = "kaiming"
    """"kaiming": A uniform in +-1 / sqrt(inputs); "gaussian": A normal, deviation 1 / rank; B 0."""
    merge_exports: Annotated[bool, new("the policy's; a critic's are always merged")] = False
    """Write exports as whole models, the adapters merged; false = as PEFT folders of the adapters
    alone, which are refused where PEFT would not read them."""


@dataclass
class ModelConfig(BaseConfig):
    """Describe where a model comes from."""

    path: Annotated[str | None, named] = None
    """Hugging Face model folder, or the id of a hub model, OWNER/NAME."""
    lora: SkyRLLoraConfig = field(default_factory=SkyRLLoraConfig)
    """Low-rank adapters."""
    random_init: Annotated[bool, new()] = False
    """Random weights for the architecture in `path`/config.json, drawn from `trainer.seed`."""


def _are_decay_rates(betas: list[float]) -> bool:
    return len(betas) == 2 and all(0 <= beta < 1 for beta in betas)


@dataclass
class OptimizerConfig(BaseConfig):
    """Hold the settings of AdamW with clipping by the global gradient norm."""

    lr: Annotated[float, not_negative] = 1e-6
    """Peak learning rate."""
    adam_betas: Annotated[
        list[float], must(_are_decay_rates, "must be two numbers in [0, 1), e.g. [0.9, 0.999]")
    ] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of the first and second moments."""
    weight_decay: Annotated[float, not_negative] = 1e-2
    """Decoupled weight decay."""
    max_grad_norm: Annotated[
        float,
        must(
            lambda norm: norm > 0, "must be positive; a large number such as 1e9 turns clipping off"
        ),
    ] = 1.0
    """Gradients are scaled down to this global norm."""
    offload_after_step: Annotated[
        bool,
        implemented(
            "off: two transfers an update, wasted where the memory suffices; also between the "
            "minibatches of a step; no effect without pinned_host memory",
            skyrl_default=True,
        ),
    ] = False
    """Keep the optimizer state in host memory between steps."""
    state_dtype: Annotated[str, one_of(*STATE_DTYPES), new()] = "float32"
    """How AdamW's two moments rest between updates: "float32", 8 bytes per parameter; "bfloat16",
    4; "int8", 2, and 8 for each row of a matrix. Stochastically rounded (docs/scaling.md)."""
    num_warmup_steps: Annotated[int, not_negative] = 0
    """Optimizer updates (minibatches) of linear warm-up."""
    scheduler: Annotated[
        str, one_of(*SCHEDULERS), implemented("linear and cosine end at the last update")
    ] = "constant_with_warmup"
    """"constant", "constant_with_warmup", "linear" or "cosine" (the last two decay to 0)."""
