"""Config of the rollouts: inference engine, sampling, chat template."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from jaxrl.config.constraints import (
    between,
    must,
    named,
    not_negative,
    not_negative_or_none,
    one_of,
    positive,
    positive_or,
    variable,
)
from jaxrl.config.dataclass_config import BaseConfig
from jaxrl.config.status import implemented, inert, later, mapped, new

_ONE_TEMPLATE = mapped(
    "nothing is tokenised again, so no named templates that rewrite earlier turns"
)
_VLLM_ONLY = inert("vLLM only")
_SHARED_WEIGHTS = inert("weights are shared in one process; to others see weight_transport")
_SLOTS = implemented(
    "rows over all engines, at most the trajectories of a batch; prompt tokens of a block; decode "
    "weights and pages, of which rows wait where there are too few"
)
_ENDPOINT = implemented("also of `python -m jaxrl.serve`", only_with="enable_http_endpoint")


def _is_min_tokens(kwargs: dict[str, Any] | None) -> bool:
    return not kwargs or (set(kwargs) == {"min_tokens"} and isinstance(kwargs["min_tokens"], int))


@dataclass
class SamplingParams(BaseConfig):
    """Describe how tokens are sampled."""

    max_generate_length: Annotated[int, positive] = 1024
    """Most tokens of one response."""
    repetition_penalty: Annotated[
        float, must(lambda penalty: penalty > 0, "must be > 0; 1.0 is off")
    ] = 1.0
    """Divides (multiplies, below 0) the logits of tokens that occurred before; 1 = off."""
    temperature: Annotated[
        float, must(lambda degree: degree >= 0, "must be 0 (greedy) or more")
    ] = 1.0
    """Sampling temperature; 0 = greedy, for evaluation only."""
    top_p: Annotated[float, between("(0, 1]", "1.0 is off")] = 1.0
    """Sample from the smallest set of tokens with this probability."""
    min_p: Annotated[float, between("[0, 1]", "0.0 is off")] = 0.0
    """Drop tokens less probable than this times the most probable one."""
    top_k: Annotated[int, positive_or(-1, "off")] = -1
    """Sample from this many most probable tokens; -1 = all."""
    logprobs: Annotated[
        int | None, one_of(None, 0, 1), implemented("None: the trainer's own are all there is")
    ] = 1
    """0 or 1: the log-prob of each sampled token is recorded; None: rollouts carry none, for
    engines that give none, and the trainer uses its own."""
    stop: Annotated[
        list[str] | None,
        must(lambda ends: "" not in (ends or ()), "would end at once; remove the ''"),
    ] = None
    """Strings that end a response."""
    additional_kwargs: Annotated[
        dict[str, Any] | None,
        must(
            _is_min_tokens,
            "the native engine takes 'min_tokens', a number of tokens, and nothing else",
        ),
        mapped("min_tokens alone"),
    ] = None
    """{"min_tokens": n}: nothing ends a response before it has n tokens."""
    keep_sampling_mask: Annotated[bool, new()] = False
    """Record the tokens that top_k, top_p and min_p left, and train on the distribution over
    these; needs top_k, which bounds them."""
    stop_token_ids: Annotated[list[int] | None, new()] = None
    """Token ids that end a response, besides the model's end-of-sequence ids."""


@dataclass
class ChatTemplateConfig(BaseConfig):
    """Name a chat template other than the tokenizer's own."""

    source: Annotated[str, one_of("name", "file"), _ONE_TEMPLATE] = "name"
    """"name" (with name_or_path unset: the tokenizer's own) or "file"."""
    name_or_path: Annotated[str | None, _ONE_TEMPLATE] = None
    """source "file": path of a jinja file."""


@dataclass
class InferenceEngineConfig(BaseConfig):
    """Describe the engine that samples."""

    model_dtype: Annotated[
        str,
        one_of("float32", "bfloat16", "auto"),
        implemented("the trainer's, for equal log-probs", skyrl_default="bfloat16"),
    ] = "auto"
    """Data type of the engine's weights: "float32" or "bfloat16"; "auto" = that in which the policy
    computes on TPUs and GPUs, else "float32"."""
    run_engines_locally: bool = True
    """Engines in this process, or started by it (backend "vllm", or rollout workers: see
    trainer.placement.rollout_num_nodes); false = they run already, at remote_urls."""
    num_engines: Annotated[int, positive, implemented("parts of the trainer's devices")] = 1
    """Number of engines."""
    backend: Annotated[
        str,
        one_of("native", "vllm", "jetstream", later=("sglang",)),
        implemented(
            "native: in this process, the trainer's layer functions and its weights",
            skyrl_default="vllm",
        ),
    ] = "native"
    """"native": jaxrl's engine, on the layer functions of the trainer; "vllm": vLLM servers;
    "jetstream": an engine of JetStream's protocol, or JetStream servers."""
    weight_sync_backend: Annotated[str, _SHARED_WEIGHTS] = "nccl"
    """Transport of weights to the engine."""
    weight_transport: Annotated[str, one_of("folder", "transfer"), new()] = "folder"
    """How weights come to servers: "folder", through weights_folder; "transfer", from process to
    process, with servers of jaxrl's own; rollout workers always get them so."""
    weight_delta: Annotated[bool, new()] = False
    """Send a server of jaxrl's own, or write for it, what changed in the weights since the version
    before, where that is less than the whole. Both sides keep a copy of them in host memory for
    it."""
    weight_transfer_threshold_cuda_ipc_GB: Annotated[
        float,
        must(lambda gb: int(gb * 1e9) > 0, "must be positive"),  # bytes
        mapped("size of the groups in which weights go to other devices and processes"),
    ] = 1.0
    """Most GB of weights that are on their way to an engine at a time."""
    tensor_parallel_size: Annotated[
        int | None,
        positive_or(None, "as memory asks"),
        implemented("parts of the trainer's devices", skyrl_default=1),
    ] = None
    """Devices of an engine that share each weight matrix; None = as few as hold the weights and a
    row beside the trainer, where the devices say what memory they have, else 1."""
    hosts_per_engine: Annotated[
        int | None,
        positive_or(None, "as memory asks"),
        new("of a job of several processes, on the trainer's devices"),
    ] = None
    """Processes of a job, neighbours, whose devices make one engine: for weights that those of one
    cannot hold. The first of them samples, the others follow it. None = as few as are enough."""
    pipeline_parallel_size: Annotated[int, positive, mapped("of vLLM servers started here")] = 1
    """Pipeline stages of an engine."""
    expert_parallel_size: Annotated[
        int, positive, implemented("each has whole experts; of vLLM, enable_expert_parallel")
    ] = 1
    """Devices of an engine that have all experts together, those that share each matrix among
    them; 1 = no others."""
    data_parallel_size: Annotated[
        int, mapped("an engine spreads its rows over all its devices")
    ] = 1
    """Replicas inside an engine; ours spreads its rows over all its devices."""
    async_engine: Annotated[bool, _VLLM_ONLY] = True
    """vLLM's asynchronous engine."""
    vllm_v1_disable_multiproc: Annotated[bool, _VLLM_ONLY] = True
    """vLLM in one process."""
    enable_prefix_caching: Annotated[
        bool,
        implemented(
            "off: a resumed run would not be bit-identical; for what was decoded, as what was "
            "prefilled is always shared",
            skyrl_default=True,
        ),
    ] = False
    """Reuse what was decoded between requests that begin alike; what was prefilled always is. What
    is reused then depends on timing, and with it the last bits: a resumed run is not
    bit-identical."""
    enable_chunked_prefill: Annotated[bool, mapped("always on", skyrl_default=True)] = False
    """Cut long prompts into chunks between decoding steps; ours always does."""
    recompute_kv_on_update: Annotated[bool, new()] = False
    """New weights compute the keys and values of samples in flight anew; false = these go on with
    the old ones."""
    speculative_tokens: Annotated[int, not_negative, new()] = 0
    """Tokens that a step of our engine guesses of each row, from how its prompt or answer went on
    where its last tokens stood before; kept as far as they are what would have been drawn, so that
    the tokens are the same, in fewer steps. docs/rollouts.md."""
    speculative_history: Annotated[int, not_negative, new()] = 0
    """Tokens of what a prompt was answered in its last epoch that are kept, in checkpoints too, to
    guess from them."""
    speculative_least: Annotated[float, not_negative, new()] = 0.0
    """Tokens that a step must draw of a row, where it guesses, for guessing to pay: after a batch
    with fewer nothing is guessed until the next step whose number ends in 0. 0 = always."""
    quantization: Annotated[str | None, one_of(None, "int8", "fp8"), new()] = None
    """8 bits for the matrices of the engine's layers: "int8" or "fp8" (e4m3), with a scale for each
    output channel; None = they are of model_dtype. The sampler is then another distribution than
    the policy: the objective must correct for it."""
    kv_cache_dtype: Annotated[str, one_of("auto", "fp8"), new()] = "auto"
    """Data type of keys and values in the pages: "fp8" (e4m3), half the memory of bfloat16;
    "auto" = as the engine computes. With "fp8" the objective must correct for it."""
    max_num_batched_tokens: Annotated[int, _SLOTS] = 8192
    """Most prompt tokens that a block of decoding steps prefills."""
    enforce_eager: Annotated[bool, mapped("of vLLM servers started here")] = True
    """No CUDA graphs."""
    fully_sharded_loras: Annotated[bool, _VLLM_ONLY] = False
    """Shard adapters fully in vLLM."""
    enable_ray_prometheus_stats: Annotated[bool, _VLLM_ONLY] = False
    """Engine statistics through Ray."""
    gpu_memory_utilization: Annotated[
        float, between("(0, 1]", "it is a share of the memory"), _SLOTS
    ] = 0.8
    """Share, for decode weights and cache, of the device memory that the trainer leaves free."""
    max_num_seqs: Annotated[int, positive, _SLOTS] = 1024
    """Most rows decoded together, over all engines; no more than a run samples at once."""
    eval_prompts_at_once: Annotated[int | None, not_negative_or_none, new()] = None
    """Evaluation prompts for which there are rows; None = those that data.val_data has, at most
    trainer.eval_batch_size, none without an evaluation. A run keeps what it began with."""
    remote_urls: list[str] = field(default_factory=list)
    """Addresses of the servers of remote engines, e.g. ["http://10.0.0.2:8000"]; of JetStream
    servers "host:port"."""
    enable_http_endpoint: Annotated[bool, implemented("also sessions; a token off loopback")] = (
        False
    )
    """Serve the engine over HTTP during training."""
    http_endpoint_host: Annotated[str, _ENDPOINT] = "127.0.0.1"
    """Host of that endpoint."""
    http_endpoint_port: Annotated[
        int, must(lambda port: port in range(65536), "must be 0 (any) to 65535"), _ENDPOINT
    ] = 8000
    """Port of that endpoint."""
    served_model_name: Annotated[str | None, named, _ENDPOINT] = None
    """Model name that requests to the endpoint must carry."""
    distributed_executor_backend: Annotated[str, _VLLM_ONLY] = "ray"
    """vLLM's executor."""
    engine_init_kwargs: Annotated[
        dict[str, Any], mapped("arguments of our engines, or flags of vLLM servers")
    ] = field(default_factory=dict)
    """Keyword arguments of the engine, e.g. {"steps_per_dispatch": 32}, the decode steps between
    two looks at the host (32 on CPUs, 16 on GPUs, 8 elsewhere); with backend "vllm" flags of
    its servers, e.g. {"max_model_len": 4096}; those of "jetstream" are in docs/jetstream.md."""
    override_existing_update_group: Annotated[str, _SHARED_WEIGHTS] = "auto"
    """Reuse of a weight-update group."""
    external_proxy_url: Annotated[str | None, implemented("of servers that run already")] = None
    """Address of a router before the servers: it gets the requests, they get the weights."""
    external_server_urls: Annotated[
        list[str] | None, implemented("of servers that run already")
    ] = None
    """The same as remote_urls."""
    vllm_python: Annotated[str | None, new()] = None
    """Interpreter that has vLLM, to start servers with; None = this one."""
    engine_devices: Annotated[list[str] | None, new()] = None
    """CUDA_VISIBLE_DEVICES of each server that is started, e.g. ["2,3", "4,5"]; None = as in this
    process."""
    weights_folder: Annotated[str | None, named, new()] = None
    """Where weights are written for remote engines, which must see it under the same path; for
    jaxrl's own servers also an address in a bucket ("gs://", "s3://"); None = "weights" in the
    run's folder."""
    probe_bound: Annotated[float, positive, new()] = 0.05
    """Largest difference between the log-probs of a remote engine and the trainer, of a short probe
    after every update; more with bfloat16 on either side, e.g. 0.2."""
    request_timeout_seconds: Annotated[float, positive, new()] = 1800.0
    """Longest wait for a remote engine: for all tokens of a request, or one update of weights."""
    api_token_env: Annotated[str | None, variable, new()] = None
    """Environment variable that holds the bearer token of remote engines."""


@dataclass
class PartialRolloutsConfig(BaseConfig):
    """Say how samples go on in the next step, so that none waits for its longest answers.

    A step trains the train_batch_size oldest of the groups that are at their end. Long answers are
    trained later than short ones, and on tokens of several policies; none is left out.
    """

    max_tokens_per_step: Annotated[int | None, positive_or(None, "every answer is waited for")] = (
        None
    )
    """Most tokens that a sample draws in a step before it waits for the next one. Where too few
    groups are then at their end, the oldest go on. None = a step waits for all answers."""
    extra_prompts: Annotated[int, not_negative] = 0
    """Groups under way beside those of a batch; as many can be carried into the next step."""


@dataclass
class GeneratorConfig(BaseConfig):
    """Hold the settings of rollouts."""

    inference_engine: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    """The engine that samples."""
    n_samples_per_prompt: Annotated[int, positive] = 5
    """Samples per training prompt: the size of a group."""
    demonstrations: Annotated[bool, new()] = False
    """The last of them is the "completion" of the prompt's row in place of a sampled answer, where
    there is one. For the losses "luffy" and "chord"."""
    batched: Annotated[bool, implemented("a single-turn batch is always one call")] = False
    """One engine call for the whole batch; one turn."""
    max_turns: Annotated[
        int, positive, implemented("also ends conversations that the environment does not")
    ] = 1
    """Most turns of a conversation, which keeps its pages of the engine in between."""
    max_input_length: Annotated[int | None, positive_or(None, "as long as a prompt")] = None
    """Longest input of a turn, in tokens; None = trainer.max_prompt_length."""
    chat_template: ChatTemplateConfig = field(default_factory=ChatTemplateConfig)
    """Chat template other than the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, e.g. {"enable_thinking": False}."""
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    """Sampling for training."""
    longest_first: Annotated[bool, new()] = False
    """Sample first what had the longest answers in its last epoch, so that a step does not wait for
    a long answer that began last. Changes no token."""
    partial_rollouts: Annotated[PartialRolloutsConfig, new()] = field(
        default_factory=PartialRolloutsConfig
    )
    """Samples that go on in the next step."""
    use_conversation_multi_turn: Annotated[bool, implemented("an appended token is masked")] = True
    """Each turn is a message of its own."""
    append_eos_token_after_stop_str_in_multi_turn: Annotated[
        bool, implemented("an appended token is masked")
    ] = True
    """Append the end-of-sequence token after a stop string."""
    eval_sampling_params: SamplingParams | None = None
    """Sampling for evaluation; None = greedy with the training max_generate_length."""
    eval_n_samples_per_prompt: Annotated[int, positive] = 1
    """Samples per evaluation prompt."""
    eval_pass_at_k: Annotated[list[int] | None, new()] = None
    """k of the pass@k that an evaluation reports; None = powers of two up to
    eval_n_samples_per_prompt, and that number."""
    zero_reward_on_non_stop: bool = False
    """Reward 0 for responses whose stop_reason is not "stop"."""
    apply_overlong_filtering: Annotated[
        bool, implemented("by stop_reason, not by the last token")
    ] = False
    """Zero loss mask for responses whose stop_reason is not "stop" (DAPO)."""
    rope_scaling: Annotated[dict[str, Any] | None, implemented("must equal the trainer's")] = None
    """Rotary scaling of the engine; None = trainer.rope_scaling."""
    rope_theta: Annotated[float | None, implemented("must equal the trainer's")] = None
    """Rotary base of the engine; None = trainer.rope_theta."""
    step_wise_trajectories: Annotated[
        bool, implemented("the last row has the reward of all turns")
    ] = False
    """One row per turn."""
    merge_stepwise_output: Annotated[bool, later()] = False
    """Merge neighbouring turns where the later prompt begins with the earlier turn."""


def engine_hosts(settings: InferenceEngineConfig) -> int:
    """Return the processes whose devices make an engine; 1 where nothing asked for more."""
    return settings.hosts_per_engine or 1


def engine_tensor(settings: InferenceEngineConfig) -> int:
    """Return the devices that share each matrix of an engine; 1 where nothing asked for more."""
    return settings.tensor_parallel_size or 1


def engine_dtype(settings: InferenceEngineConfig) -> str:
    """Return the data type in which the engine computes, "bfloat16" or "float32"."""
    return "float32" if settings.model_dtype == "auto" else settings.model_dtype
