"""The rows of `trainer`, but its models and its algorithm."""

import os

from jaxrl.config.field_status.row import CRITIC, LATER, NEW, implemented, inert, mapped

ROWS = (
    implemented(
        "trainer.placement",
        "colocate_all",
        "of engines in this process; servers are never colocated",
    ),
    implemented("trainer.placement", "rollout_num_nodes", NEW, skyrl_only=False),
    implemented("trainer.placement", "colocate_policy_ref", "also with colocate_all"),
    mapped("trainer.placement", "policy_num_nodes", "of all parts; one process on each"),
    inert("trainer.placement", "ref_num_nodes critic_num_nodes", "all parts are on all hosts"),
    mapped(
        "trainer.placement",
        "policy_num_gpus_per_node ref_num_gpus_per_node",
        "counted only where parts have devices of their own; else all parts have all devices",
    ),
    inert("trainer.placement", "critic_num_gpus_per_node", "the critic lies with the policy"),
    inert("trainer", "sequence_parallel_backend", "one value only"),
    mapped("trainer", "strategy", "there is one backend", skyrl_default="fsdp2"),
    implemented("trainer.fully_async", "enabled", LATER, skyrl_only=False),
    implemented("trainer.fully_async", "schedule", NEW, skyrl_only=False),
    implemented(
        "trainer.fully_async",
        "max_staleness_steps",
        "also with an engine on the trainer's devices",
        only_with="trainer.fully_async.enabled",
    ),
    implemented(
        "trainer.fully_async",
        "num_parallel_generation_workers",
        "the default fits itself to the batch",
        only_with="trainer.fully_async.schedule='free'",
    ),
    inert("trainer", "gradient_checkpointing_use_reentrant", "torch only"),
    implemented("trainer", "sharding_rules", NEW, skyrl_only=False),
    implemented(
        "trainer",
        "gradient_checkpointing seed resume_mode resume_path ckpt_interval "
        "max_ckpts_to_keep hf_save_interval epochs "
        "train_batch_size policy_mini_batch_size eval_batch_size eval_before_train eval_interval "
        "max_prompt_length project_name run_name dump_data_batch dump_eval_results",
    ),
    implemented(
        "trainer",
        "ckpt_path",
        "unset, in the run folder; of one run alone",
        skyrl_default=os.path.expanduser("~/ckpts/"),
    ),
    implemented(
        "trainer",
        "export_path",
        "unset, in the run folder; of one run alone",
        skyrl_default=os.path.expanduser("~/exports/"),
    ),
    implemented("trainer", "update_epochs_per_batch", "minibatches are drawn anew for each"),
    implemented(
        "trainer",
        "micro_train_batch_size_per_gpu micro_forward_batch_size_per_gpu",
        "changes memory and speed, never the gradient",
    ),
    implemented(
        "trainer",
        "max_training_steps print_example_interval compilation_cache_path",
        NEW,
        skyrl_only=False,
    ),
    mapped(
        "trainer",
        "log_path",
        "the run's records, not logs of engines",
        skyrl_default="/tmp/skyrl-logs",
    ),
    mapped(
        "trainer",
        "bf16",
        "data type of the computation; off on CPUs",
        skyrl_default=True,
    ),
    implemented("trainer", "critic_mini_batch_size", only_with=CRITIC),
    implemented("trainer", "update_ref_every_epoch", "the reference is in the checkpoint"),
    implemented(
        "trainer",
        "use_sample_packing",
        "by segment ids; at most 16 trajectories per row; off on CPUs",
        skyrl_default=True,
    ),
    implemented("trainer", "packed_length few_shapes", NEW, skyrl_only=False),
    implemented(
        "trainer", "max_tokens_per_microbatch", f"{LATER}; counts all devices", skyrl_only=False
    ),
    implemented(
        "trainer",
        "flash_attn",
        "True: an error where the backend's kernel cannot run the model; plain attention on CPUs",
        skyrl_default=True,
    ),
    implemented("trainer", "remat_policy", NEW, skyrl_only=False),
    inert("trainer", "disable_fast_tokenizer", "transformers 5 has one kind"),
    implemented(
        "trainer",
        "logger",
        "a run needs no account unless it asks for one; no swanlab, which a callback can feed",
        skyrl_default="wandb",
    ),
    implemented("trainer.watching", "*", NEW, skyrl_only=False),
    implemented("trainer.ledger", "*", NEW, skyrl_only=False),
    implemented("trainer.cluster", "*", NEW, skyrl_only=False),
    implemented("trainer", "rope_scaling rope_theta", "of policy, reference and engine"),
)
