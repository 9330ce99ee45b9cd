"""The rows of `generator`, `environment` and `serve`."""

from jaxrl.config.field_status.row import LATER, NEW, implemented, inert, mapped, planned

_ENGINE = "generator.inference_engine"
_JUDGE = "llm_as_a_judge"

ROWS = (
    implemented(
        _ENGINE,
        "backend",
        "native: in this process, the trainer's layer functions and its weights",
        skyrl_default="vllm",
    ),
    implemented(
        _ENGINE,
        "model_dtype",
        "the trainer's, for equal log-probs",
        skyrl_default="bfloat16",
    ),
    implemented(
        _ENGINE,
        "max_num_seqs max_num_batched_tokens gpu_memory_utilization",
        "slots over all engines, at most the trajectories of a batch; prompt tokens between two "
        "blocks of decoding; decode weights and cache, fewer slots where it does not hold them",
    ),
    implemented(_ENGINE, "num_engines tensor_parallel_size", "parts of the trainer's devices"),
    mapped(_ENGINE, "data_parallel_size", "an engine spreads its slots over all its devices"),
    implemented(
        _ENGINE,
        "enable_prefix_caching",
        "off: a resumed run would not be bit-identical; between requests, as the samples of a "
        "prompt always share its prefill",
        skyrl_default=True,
    ),
    mapped(_ENGINE, "enable_chunked_prefill", "always on", skyrl_default=True),
    mapped(_ENGINE, "engine_init_kwargs", "arguments of our engines, or flags of vLLM servers"),
    implemented(_ENGINE, "run_engines_locally remote_urls"),
    implemented(_ENGINE, "external_proxy_url external_server_urls", "of servers that run already"),
    implemented(
        _ENGINE,
        "recompute_kv_on_update vllm_python engine_devices weights_folder probe_bound "
        "request_timeout_seconds api_token_env weight_transport",
        NEW,
        skyrl_only=False,
    ),
    mapped(_ENGINE, "pipeline_parallel_size enforce_eager", "of vLLM servers started here"),
    planned(_ENGINE, "expert_parallel_size", "mixture-of-experts models"),
    implemented(_ENGINE, "enable_http_endpoint", "also sessions; a token off loopback"),
    implemented(
        _ENGINE,
        "http_endpoint_host http_endpoint_port served_model_name",
        "also of `python -m jaxrl.serve`",
        only_with="enable_http_endpoint",
    ),
    inert(
        _ENGINE,
        "weight_sync_backend override_existing_update_group",
        "weights are shared in one process; to others see weight_transport",
    ),
    mapped(
        _ENGINE,
        "weight_transfer_threshold_cuda_ipc_GB",
        "size of the groups in which weights go to other devices and processes",
    ),
    inert(
        _ENGINE,
        "async_engine vllm_v1_disable_multiproc fully_sharded_loras "
        "enable_ray_prometheus_stats distributed_executor_backend",
        "vLLM only",
    ),
    implemented(
        "generator",
        "n_samples_per_prompt max_input_length chat_template_kwargs eval_sampling_params "
        "eval_n_samples_per_prompt zero_reward_on_non_stop",
    ),
    implemented("generator", "eval_pass_at_k", NEW, skyrl_only=False),
    implemented("generator", "apply_overlong_filtering", "by stop_reason, not by the last token"),
    implemented("generator", "batched", "a single-turn batch is always one call"),
    implemented("generator", "max_turns", "also ends conversations that the environment does not"),
    mapped(
        "generator.chat_template",
        "source name_or_path",
        "nothing is tokenised again, so no named templates that rewrite earlier turns",
    ),
    *(
        row
        for group in ("generator.sampling_params", "generator.eval_sampling_params")
        for row in (
            implemented(
                group, "max_generate_length temperature top_p top_k min_p stop repetition_penalty"
            ),
            implemented(group, "logprobs", "None: the trainer's own are all there is"),
            mapped(group, "additional_kwargs", "min_tokens alone"),
            implemented(group, "stop_token_ids keep_sampling_mask", NEW, skyrl_only=False),
        )
    ),
    implemented(
        "generator",
        "use_conversation_multi_turn append_eos_token_after_stop_str_in_multi_turn",
        "an appended token is masked",
    ),
    implemented("generator", "rope_scaling rope_theta", "must equal the trainer's"),
    implemented("generator", "step_wise_trajectories", "the last row has the reward of all turns"),
    implemented("generator", "merge_stepwise_output", LATER, skyrl_only=False),
    implemented("environment", "env_class", 'also "my_pkg.my_module:MyEnv"'),
    implemented("environment", "reward_weights reward_functions", NEW, skyrl_only=False),
    implemented("environment", "rejudge_fraction", NEW, skyrl_only=False),
    implemented("environment.skyrl_gym", "max_env_workers"),
    implemented(
        "environment.skyrl_gym", "env_timeout_seconds ray_env_workers", NEW, skyrl_only=False
    ),
    implemented("sft", "max_length overlong train_on_what", NEW, skyrl_only=False),
    implemented(
        "serve",
        "grpc_port token_env token_file weights_root receive_weights max_num_seqs max_model_len "
        "steps_per_dispatch max_body_bytes max_samples max_samples_per_request request_seconds "
        "max_sessions max_session_tokens session_seconds",
        NEW,
        skyrl_only=False,
    ),
    implemented("environment.skyrl_gym.text2sql", "db_path", only_with="text2sql"),
    implemented(
        "environment.skyrl_gym.text2sql",
        "query_seconds solution_seconds max_rows",
        NEW,
        only_with="text2sql",
        skyrl_only=False,
    ),
    implemented(
        "environment.skyrl_gym.sandbox",
        "seconds cpu_seconds memory_mb disk_mb files processes output_bytes",
        NEW,
        only_with="python_code or lcb",
        skyrl_only=False,
    ),
    implemented(
        "environment.skyrl_gym.search",
        "log_requests search_url topk timeout",
        only_with="search",
    ),
    implemented(
        "environment.skyrl_gym.search", "corpus", NEW, only_with="search", skyrl_only=False
    ),
    implemented("environment.skyrl_gym.llm_as_a_judge", "model base_url", only_with=_JUDGE),
    implemented(
        "environment.skyrl_gym.llm_as_a_judge",
        "api_key_env prompt max_score sampling_params timeout max_attempts max_requests",
        NEW,
        only_with=_JUDGE,
        skyrl_only=False,
    ),
)
