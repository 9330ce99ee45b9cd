"""Name the phases of a step, as its metrics `timing/<phase>` have them."""

# Of `timing/<phase>`, those that do not hold one another; they are nearly all of `timing/wall`.
PHASES = (
    "load_checkpoints",
    "init_weight_sync_state",
    "warm_up",
    "generate",
    "postprocess_generator_output",
    "convert_to_training_input",
    "fwd_logprobs_values_reward",
    "compute_advantages_and_returns",
    "dump_data_batch",
    "critic_train",
    "policy_train",
    "sync_weights",
    "eval",
    "save_hf_model",
    "save_checkpoints",
    "ledger",
    "log",
    "callbacks",
)
