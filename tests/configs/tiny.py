"""Recipes cut to two steps on a CPU: models of the same families with random weights, a few rows.

What a recipe is for stays: algorithm, environment, turns, adapters, critic, teacher, schedule.
"""

import json
import re
import shlex
import sqlite3
import zlib
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jaxrl import config as cfg
from jaxrl.config.dataclass_config import flatten
from jaxrl.data.prepare import main as prepare_main
from jaxrl.data.tokenizer import character_tokenizer
from jaxrl.models.export import save_pretrained
from jaxrl.models.families import config_from_hf
from jaxrl.models.transformer import init_params

ROOT = Path(__file__).parents[2]
FAMILIES = {
    "Qwen/Qwen2.5": "qwen2",
    "Qwen/Qwen3-30B-A3B": "qwen3_moe",
    "Qwen/Qwen3.5": "qwen3_5_text",
    "Qwen/Qwen3": "qwen3",
    "models/smollm2": "llama",
    "runs/": "qwen3",  # tiny_char_model, after an earlier recipe
}

# Tokens that environments understand, so that a random policy acts and earns now and then.
WORDS = (
    *(
        "#### 4",
        "Answer: 4<",
        "<Answer: 4<",
        "\\boxed{4}",
        "<answer>4</answer>",
        "<search>4</search>",
    ),
    *("<think>4</think><sql>SELECT 4</sql>", "<think>4</think><solution>SELECT 4</solution>"),
    *(f" {number} " for number in range(4, 14)),
)
CHARACTERS = "0123456789+-=><?.,:# abcdefghijklmnopqrstuvwxyz"
STOP = ["j", "q", "x", "z"]  # of no word: many responses end in time

SUPERVISED = re.compile(  # what `jaxrl.sft` reads
    r"data\.|trainer\.(policy\.|micro_|max_training|epochs|eval_|ckpt_|hf_|logg|log_|export_|"
    r"train_batch_size|packed)"
)

# For every recipe; a number is the most that is left.
CUTS = {
    "trainer.train_batch_size": 16,  # rows: less with several samples of a prompt
    "trainer.policy.optimizer_config.num_warmup_steps": 0,
    "trainer.critic.optimizer_config.num_warmup_steps": 0,
    "trainer.micro_train_batch_size_per_gpu": 1,
    "trainer.micro_forward_batch_size_per_gpu": 2,
    "trainer.max_prompt_length": 160,
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
    # No random policy ever adds two numbers, or calculates, and few say "#### 4": something else to
    # learn.
    **dict.fromkeys(
        ("addition_grpo", "gsm8k_qwen3_gspo"),
        {"environment.reward_functions": [f"{__name__}:digits"]},
    ),
    "calculator_grpo": {
        "environment.reward_functions": [f"{__name__}:digits"],
        "generator.max_input_length": 320,
    },
    "search_r1": {  # its prompt is long
        "trainer.max_prompt_length": 900,
        "generator.max_input_length": 1100,
        "trainer.packed_length": 1109,
    },
    "dapo_math": {"trainer.algorithm.overlong_buffer": {"len": 4}},  # of 8 tokens
}


def digits(action: str) -> float:
    """A reward that random weights earn."""
    return sum(character.isdigit() for character in action) / 4


def tiny(config: cfg.TrainConfig, folder: Path, server: str = "") -> cfg.TrainConfig:
    """The recipe, two steps long, with all that it reads and writes in `folder`.

    Args:
        server: address of `Answers`.
    """
    trainer, generator = config.trainer, config.generator
    flat = flatten(config)
    cuts = {name: min(flat[name], most) for name, most in CUTS.items() if flat[name] is not None}
    prompts = 16 // cuts["generator.n_samples_per_prompt"]
    several = trainer.policy_mini_batch_size < trainer.train_batch_size
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
    cuts["generator.sampling_params.stop"] = [*(generator.sampling_params.stop or []), *STOP]
    if generator.eval_sampling_params is not None:
        cuts["generator.eval_sampling_params.max_generate_length"] = 8
    for kind in ("train_data", "val_data"):
        sources = getattr(config.data, kind)
        cuts[f"data.{kind}"] = [
            str(folder / source) if source.startswith("data/") else source for source in sources
        ]
    for role in ("policy", "ref", "critic"):
        path = getattr(trainer, role).model.path
        if path is not None and not Path(path).is_relative_to(ROOT):
            cuts[f"trainer.{role}.model.path"] = _model(path, folder)
            cuts["trainer.max_prompt_length"] = CUTS["trainer.max_prompt_length"]  # characters
    if trainer.use_sample_packing:  # one shape of rows: one program
        longest = cuts.get("generator.max_input_length", cuts["trainer.max_prompt_length"])
        cuts["trainer.packed_length"] = longest + 9
    gym = "environment.skyrl_gym"
    cuts |= {
        f"{gym}.text2sql.db_path": str(folder / "databases"),
        f"{gym}.llm_as_a_judge.base_url": f"{server}/v1",
        f"{gym}.search.search_url": f"{server}/retrieve",
    }
    settings = {**cuts, **ALWAYS, **SPECIAL.get(trainer.run_name, {})}
    if trainer.run_name.startswith("sft_"):
        settings = {name: value for name, value in settings.items() if SUPERVISED.match(name)}
    return cfg.apply_overrides(config, settings)


def _model(path: str, folder: Path) -> str:
    """A model of two layers of the same family; its weights are drawn for its name."""
    kind = next(kind for start, kind in FAMILIES.items() if path.startswith(start))
    target = folder / "models" / path.replace("/", "-")
    if not target.exists():
        sizes = json.loads((ROOT / "configs/tiny_char_model/config.json").read_text())
        tokens = [*CHARACTERS, *WORDS]
        tokenizer = character_tokenizer(tokens)
        sizes |= {"model_type": kind, "vocab_size": len(tokenizer), "num_hidden_layers": 2}
        sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        sizes |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
        sizes |= {"full_attention_interval": 2}
        model = config_from_hf(sizes)
        save_pretrained(target, model, init_params(model, zlib.crc32(path.encode())), tokenizer)
    return str(target)


def prepared(recipe: Path, folder: Path) -> None:
    """Runs the `jaxrl.data.prepare` commands of a recipe's header, on small copies."""
    for command in re.findall(r"python -m jaxrl.data.prepare (.*)", recipe.read_text()):
        name, *rest = shlex.split(command)
        copy = folder / "copies" / name
        for file, row in COPIES[name].items():
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            rows = [json.loads(json.dumps(row).replace("@", str(i))) for i in range(16)]
            pq.write_table(pa.Table.from_pylist(rows), copy / file)
        rest[rest.index("--output") + 1] = str(folder / rest[rest.index("--output") + 1])
        assert prepare_main([name, *rest, "--source", str(copy)]) == 0


_GSM8K = {"question": "@ eggs, @ eaten, four more?", "answer": "4 @\n#### 4"}
_MATH = {
    "problem": "What is $@ - @ + 4$?",
    "level": "Level 3",
    "type": "Algebra",
    "solution": "\\boxed{4}",
}
_DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": "How many @?", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "4", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "@"},
}
_SQL = {
    "data_source": "synsql",
    "prompt": [{"role": "user", "content": "Four @"}],
    "reward_spec": {"method": "rule", "ground_truth": "SELECT 4"},
    "db_id": "numbers",
    "data": "spider",
}
_SEARCH = {
    "id": "@",
    "question": "Which number is it @?",
    "golden_answers": ["4"],
    "data_source": "nq",
    "prompt": [{"role": "user", "content": ""}],
    "ability": "fact-reasoning",
    "reward_model": {"ground_truth": {"target": ["4"]}, "style": "rule"},
    "extra_info": {"index": 0, "split": "train"},
}
COPIES: dict[str, dict[str, Any]] = {  # the hub's files -> a row, @ is its number
    "gsm8k": {f"main/{split}-00000-of-00001.parquet": _GSM8K for split in ("train", "test")},
    "math": {f"data/{split}-00000-of-00001.parquet": _MATH for split in ("train", "test")},
    "dapo": {f"data/{name}.parquet": _DAPO for name in ("dapo-math-17k", "aime-2024")},
    "text2sql": {f"{split}.parquet": _SQL for split in ("train", "validation")},
    "searchr1": {f"{split}.parquet": _SEARCH for split in ("train", "test")},
}


def database(folder: Path) -> None:
    """The database of the text2sql rows, laid out as OmniSQL's."""
    file = folder / "databases/spider/database/numbers/numbers.sqlite"
    file.parent.mkdir(parents=True)
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE numbers (n INTEGER)")


class Answers(BaseHTTPRequestHandler):
    """A judge, which wants the words "#### 4", and a retriever with one passage."""

    def do_POST(self) -> None:
        """Answers any question."""
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.path.endswith("/retrieve"):
            found = {"document": {"contents": '"Four"\n4 it is'}, "score": 1.0}
            answer: Any = {"result": [[found]]}
        else:
            message = {"content": f"### Final Score: {int('#### 4' in asked)}"}
            answer = {"choices": [{"message": message}]}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Nothing."""
