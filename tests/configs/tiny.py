"""Recipes cut to two steps on a CPU: models of the same families with random weights, a few rows.

What a recipe is for stays: algorithm, environment, turns, adapters, critic, teacher, schedule.
"""

import json
import sqlite3
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jaxrl import config as cfg
from jaxrl.config.dataclass_config import flatten
from jaxrl.data.tokenizer import character_tokenizer
from jaxrl.models.export import save_pretrained
from jaxrl.models.families import config_from_hf
from jaxrl.models.transformer import init_params

ROOT = Path(__file__).parents[2]
FAMILIES = {
    "Qwen/Qwen2.5": "qwen2",
    "Qwen/Qwen3": "qwen3",
    "models/smollm2": "llama",
    "runs/": "qwen3",  # tiny_char_model, after an earlier recipe
}

# Tokens that environments understand, so that a random policy acts and earns now and then.
WORDS = (
    *("#### 4", "Answer: 4", "\\boxed{4}", "<answer>4</answer>", "<search>4</search>"),
    *("<think>4</think><sql>SELECT 4</sql>", "<think>4</think><solution>SELECT 4</solution>"),
    *(f" {number} " for number in range(4, 14)),
)
CHARACTERS = "0123456789+-=><?.,:# abcdefghijklmnopqrstuvwxyz"
STOP = ["j", "q", "x", "z"]  # of no word: many responses end in time

# For every recipe; a number is the most that is left.
CUTS = {
    "trainer.train_batch_size": 16,  # rows: less with several samples of a prompt
    "trainer.policy.optimizer_config.num_warmup_steps": 0,
    "trainer.critic.optimizer_config.num_warmup_steps": 0,
    "trainer.micro_train_batch_size_per_gpu": 1,
    "trainer.micro_forward_batch_size_per_gpu": 2,
    "trainer.max_prompt_length": 80,
    "trainer.algorithm.max_seq_len": 64,
    "trainer.eval_batch_size": 4,
    "generator.n_samples_per_prompt": 4,
    "generator.max_turns": 2,
    "generator.max_input_length": 320,
    "generator.sampling_params.max_generate_length": 8,
    "generator.eval_n_samples_per_prompt": 2,
    "environment.skyrl_gym.max_env_workers": 4,
}
ALWAYS = {
    "trainer.max_training_steps": 2,
    "trainer.epochs": 20,
    "trainer.eval_before_train": False,
    "trainer.eval_interval": 2,
    "trainer.ckpt_interval": -1,
    "trainer.hf_save_interval": -1,
    "trainer.print_example_interval": -1,
    "trainer.logger": "jsonl",
}
SPECIAL: dict[str, dict[str, Any]] = {
    # No random policy ever adds two numbers: something else to learn.
    "addition_grpo": {"environment.reward_functions": [f"{__name__}:digits"]},
    "dapo_math": {"trainer.algorithm.overlong_buffer": {"len": 4}},  # of 8 tokens
}


def digits(action: str) -> float:
    """A reward that random weights earn."""
    return sum(character.isdigit() for character in action) / 4


def tiny(config: cfg.TrainConfig, folder: Path) -> cfg.TrainConfig:
    """The recipe, two steps long, with everything that it reads and writes in `folder`."""
    trainer, generator = config.trainer, config.generator
    flat = flatten(config)
    cuts = {name: min(flat[name], most) for name, most in CUTS.items() if flat[name] is not None}
    prompts = 16 // cuts["generator.n_samples_per_prompt"]
    several = trainer.policy_mini_batch_size < trainer.train_batch_size
    if trainer.run_name.startswith("sft_"):
        prompts, several = 16, False
    mini = prompts // 2 if several else prompts
    cuts |= {
        "trainer.train_batch_size": prompts,
        "trainer.policy_mini_batch_size": mini,
        "trainer.critic_mini_batch_size": mini,
        "trainer.log_path": str(folder),
        "trainer.ckpt_path": str(folder / "checkpoints"),
        "trainer.export_path": str(folder / "exports"),
    }
    if trainer.fully_async.enabled:
        most = prompts * (trainer.fully_async.max_staleness_steps + 1)
        cuts["trainer.fully_async.num_parallel_generation_workers"] = most
    if not trainer.run_name.startswith("sft_"):
        cuts["generator.sampling_params.stop"] = [*(generator.sampling_params.stop or []), *STOP]
    if generator.eval_sampling_params is not None:
        cuts["generator.eval_sampling_params.max_generate_length"] = 8
    for kind in ("train_data", "val_data"):
        sources = getattr(config.data, kind)
        cuts[f"data.{kind}"] = [_rows(source, folder) for source in sources]
    for role in ("policy", "ref", "critic"):
        path = getattr(trainer, role).model.path
        if path is not None:
            cuts[f"trainer.{role}.model.path"] = _model(path, folder)
    cuts["environment.skyrl_gym.text2sql.db_path"] = str(_databases(folder))
    return cfg.apply_overrides(config, {**cuts, **ALWAYS, **SPECIAL.get(trainer.run_name, {})})


def _model(path: str, folder: Path) -> str:
    """A model of two layers of the same family; its weights are drawn for its name."""
    if Path(path).is_relative_to(ROOT):
        return path
    kind = next(kind for start, kind in FAMILIES.items() if path.startswith(start))
    target = folder / "models" / path.replace("/", "-")
    if not target.exists():
        sizes = json.loads((ROOT / "configs/tiny_char_model/config.json").read_text())
        tokens = [*CHARACTERS, *WORDS]
        tokenizer = character_tokenizer(tokens)  # type: ignore[arg-type]
        sizes |= {"model_type": kind, "vocab_size": len(tokenizer), "num_hidden_layers": 2}
        model = config_from_hf(sizes)
        save_pretrained(target, model, init_params(model, zlib.crc32(path.encode())), tokenizer)
    return str(target)


def _rows(source: str, folder: Path) -> str:
    """A file of eight rows with the columns of `jaxrl.data.prepare`."""
    if ":" in source:
        return source
    _, name, file = source.split("/")
    target = folder / source
    target.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([ROWS[name](i) for i in range(8)]), target)
    assert file in ("train.parquet", "validation.parquet")
    return str(target)


def _row(source: str, env_class: str, prompt: str, **columns: Any) -> dict[str, Any]:
    spec = {"method": "rule", "ground_truth": "4"}
    row = {"data_source": source, "env_class": env_class, "reward_spec": spec}
    return row | {"prompt": [{"role": "user", "content": prompt}], **columns}


ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "gsm8k": lambda i: _row(
        "openai/gsm8k", "gsm8k", f"{i} apples and {4 - i} more?", completion="#### 4"
    ),
    "gsm8k_judge": lambda i: _row("openai/gsm8k", "llm_as_a_judge", f"{i} and {4 - i}?"),
    "math": lambda i: _row("math", "math", f"what is {i} + {4 - i}?"),
    "dapo": lambda i: _row("math_dapo", "aime", f"what is {i} + {4 - i}?"),
    "aime": lambda i: _row("aime", "aime", f"what is {i} + {4 - i}?"),
    "text2sql": lambda i: _row(
        "synsql",
        "text2sql",
        f"select the number four, please {i}",
        db_id="numbers",
        data="spider",
        reward_spec={"method": "rule", "ground_truth": "SELECT 4"},
    ),
    "searchr1": lambda i: _row(
        "searchR1_nq",
        "search",
        f"which number is it {i}?",
        reward_spec={"method": "rule", "ground_truth": {"target": ["4"]}},
    ),
}


def _databases(folder: Path) -> Path:
    """The folder of one database, laid out as OmniSQL's."""


    target = folder / "databases"
    file = target / "spider/database/numbers/numbers.sqlite"
    if not file.exists():
        file.parent.mkdir(parents=True)
        connection = sqlite3.connect(file)
        connection.execute("CREATE TABLE numbers (n INTEGER)")
        connection.commit()
        connection.close()
    return target
