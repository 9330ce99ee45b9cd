"""Every recipe: its header, its checks, its plan, and two steps of its tiny version."""

import json
import math
import re
import threading
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

import jax
import numpy as np
import pytest

from benchmarks.shapes import write_model_folder
from docs.generate.recipes import PAGE, RECIPES, page, read_header
from jaxrl import config as cfg
from jaxrl.models.lora import trained
from jaxrl.records.callbacks import TrainingCallback
from jaxrl.sft import sft
from jaxrl.tools.plan.costs import estimated
from jaxrl.tools.plan.plan import make_plan
from jaxrl.tools.plan.topology import machine
from jaxrl.train import BasePPOExp
from tests.configs.tiny import Answers, database, prepared, tiny

pytestmark = pytest.mark.check
NAMES = sorted(path.stem for path in RECIPES.glob("*.py"))
CARDS = {  # what a recipe is for, in the words of the objective card of its tiny version
    "addition_grpo": ["grpo: A = (R - mean_G R) / (std_G R"],
    "arithmetic_smollm2_dr_grpo": ["dr_grpo: A = R - mean_G R", "seq_mean_token_sum_norm"],
    "arithmetic_smollm2_gmpo": ["gmpo:", "min(d, 0.4)", "2 minibatches"],
    "arithmetic_smollm2_grpo": ["grpo: A = (R - mean_G R) / (std_G R"],
    "arithmetic_smollm2_lora": ["grpo: A"],
    "calculator_grpo": ["grpo: A = (R - mean_G R) / (std_G R", "KL           off"],
    "cispo_async": [
        "cispo: l = -sg[clip(r, 0, 5)]",
        "exp(log_probs - rollout_log_probs)",
        "up to 4 steps ahead",
    ],
    "dapo_math": [
        "clip(r, 0.8, 1.28)",
        "filter: batches are drawn",
        "loss mask 0 unless stop_reason is 'stop'",
        "reward less 1",
        "token_mean",
        "KL           off",
    ],
    "distillation_addition": ["importance_sampling:", "on_policy_distillation: A = ref_log_probs"],
    "distillation_math": ["importance_sampling:", "on_policy_distillation: A = ref_log_probs"],
    "gsm8k_llm_judge": ["grpo: A"],
    "gsm8k_lora": ["grpo: A", "+ 0.001 KL"],
    "gsm8k_ppo": ["gae: A", "in the rewards: r_t - beta k1_t", "critic       minimise"],
    "gsm8k_qwen2_5_0_5b_grpo": ["grpo: A", "+ 0.001 KL", "2 minibatches"],
    "gsm8k_qwen2_5_1_5b_grpo": ["grpo: A", "+ 0.001 KL", "2 minibatches"],
    "gsm8k_qwen3_5_0_8b_grpo": ["grpo: A", "+ 0.001 KL", "2 minibatches"],
    "gsm8k_qwen3_gspo": ["gspo:", "0.9997, 1.0004", "sequence_mean", "2 minibatches"],
    "guess_number": ["grpo: A", "- 0.01 H"],
    "guess_number_ppo": ["gae: A", "critic       minimise"],
    "math_dr_grpo": ["dr_grpo: A = R - mean_G R", "seq_mean_token_sum_norm", "2 minibatches"],
    "math_gmpo": ["gmpo:", "min(d, 0.4)", "(std_G R", "sequence_mean"],
    "math_qwen3_30b_a3b": ["grpo: A = (R - mean_G R) / (std_G R", "clip(r, 0.8, 1.28)"],
    "quickstart": ["grpo_token:", "- 0.1 H"],
    "search_r1": ["+ 0.001 KL", "c = min(v, 2)"],
    "text2sql_multi_turn": ["grpo: A", "KL           off", "temperature  0.6"],
}
SHAPES = {
    "Qwen/Qwen2.5-0.5B-Instruct": "qwen2.5-0.5b",
    "Qwen/Qwen2.5-1.5B-Instruct": "qwen2.5-1.5b",
    "Qwen/Qwen2.5-3B-Instruct": "qwen2.5-3b",
    "Qwen/Qwen2.5-Math-7B": "qwen2.5-7b",
    "Qwen/Qwen2.5-Coder-7B-Instruct": "qwen2.5-7b",
    "Qwen/Qwen3-1.7B": "qwen3-1.7b",
    "Qwen/Qwen3-1.7B-Base": "qwen3-1.7b",
    "Qwen/Qwen3-4B": "qwen3-4b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen/Qwen3.5-0.8B": "qwen3.5-0.8b",
}
_PLANNED = re.compile(r"([\w-]+):([\dx]+), ([\d.]+) of ([\d.]+) GiB")
IN_SEVERAL_TURNS = dict.fromkeys(
    ("calculator_grpo", "guess_number", "search_r1", "text2sql_multi_turn"), 2
)


def planned(name):
    """Kind, size, peak and memory in GiB of every plan in the header."""
    return _PLANNED.findall(read_header(RECIPES / f"{name}.py").fields["Plan"])


ON_GPUS = [name for name in NAMES if any(kind == "h100" for kind, *_ in planned(name))]


def load(name):
    return cfg.load_config_file(str(RECIPES / f"{name}.py"))


def check_recipe(name):
    config, header = load(name), read_header(RECIPES / f"{name}.py")
    assert config.trainer.run_name == name
    assert config.trainer.log_path == "runs"
    assert config.trainer.ckpt_path == config.trainer.export_path == ""  # in the run folder
    command = "sft" if name.startswith("sft_") else "train"
    assert f"python -m jaxrl.{command} --config=configs/{name}.py" in header.commands
    numbers = [math.prod(map(int, size.split("x"))) for _, size, _, _ in planned(name)]
    for devices in {8, *numbers}:
        if command == "sft":
            cfg.validate_sft(config, num_devices=devices)
            continue
        resolved = cfg.resolve(config)
        cfg.validate(resolved, num_devices=devices)
        card = cfg.objective_card(resolved, num_devices=devices)
        assert all(text in card for text in CARDS[name] if not text.endswith("minibatches"))
    # Every data file comes from a command of the header.
    made = {line.split()[-1] for line in header.commands if "jaxrl.data.prepare" in line}
    files = [*config.data.train_data, *config.data.val_data]
    assert {file.rpartition("/")[0] for file in files if file.startswith("data/")} == made


@pytest.mark.filterwarnings("ignore:generator")
def test_every_recipe_is_valid_where_it_is_meant_to_run():
    wrong = []
    for name in NAMES:
        try:
            check_recipe(name)
        except Exception as error:
            wrong.append(f"{name}: {error!r}")
    assert not wrong, "\n".join(wrong)


def test_the_page_has_every_recipe():
    assert PAGE.read_text() == page(), "run python -m docs.generate"


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """Folders of the published shapes."""
    folder, made = tmp_path_factory.mktemp("shapes"), {}

    def of(path):
        shape = SHAPES[path]
        if shape not in made:
            made[shape] = folder / shape
            write_model_folder(made[shape], shape)
        return str(made[shape])

    return of


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_GPUS)
def test_the_plan_in_the_header_is_what_the_planner_says(name, shapes):
    config = load(name)
    for role in ("policy", "ref", "critic"):
        model = getattr(config.trainer, role).model
        model.path = model.path and shapes(model.path)
    for kind, size, peak, memory in planned(name):
        if kind != "h100":
            continue  # its compiler is not installed with the tests
        here = machine(f"{kind}:{size}")
        made = make_plan(cfg.to_train_config(config), here, estimated, lambda text: None)
        assert made.fits
        assert (f"{made.peak.peak / 2**30:.1f}", f"{here.memory / 2**30:.1f}") == (peak, memory)


@contextmanager
def serving():
    """Address of a judge and retriever on loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class Watcher(TrainingCallback):
    """Keeps what was there before the first step."""

    def on_train_start(self, trainer, given, control):
        state = trainer.state
        self.params = jax.device_get(state.params)
        self.critic = jax.device_get(state.critic.params) if state.critic else None


class Watched(BasePPOExp):
    def get_callbacks(self):
        self.watcher = Watcher()
        return [self.watcher]


def differ(before, after):
    """Whether each leaf changed."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(jax.device_get(after)), strict=True)
    return [not np.array_equal(a, b) for a, b in pairs]


def metrics_of(folder, name):
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["step"] > 0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:generator")
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("sft_")])
def test_two_steps_of_the_tiny_version(name, tmp_path):
    prepared(RECIPES / f"{name}.py", tmp_path)
    database(tmp_path)
    with serving() as server:
        run = Watched(tiny(load(name), tmp_path, server))
        trainer = run.run()
    config, card = run.config, (tmp_path / name / "objective_card.txt").read_text()
    for fragment in CARDS[name]:
        assert fragment in card
    lines = metrics_of(tmp_path, name)
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert all(np.isfinite(value) for value in line.values() if isinstance(value, float)), line
        assert line["generate/env_errors"] == 0
    assert any("eval/all/avg_score" in line for line in lines)
    params = trainer.state.params
    changed = differ(trained(run.watcher.params), trained(params))
    if config.trainer.policy.model.lora.rank:
        assert sum(differ(run.watcher.params, params)) == sum(changed)  # the base did not
        assert sum(changed) >= len(changed) / 2  # B is 0 before the first update, so A waits
    else:
        assert all(changed)
    if config.trainer.critic.model.path is not None:
        assert all(differ(run.watcher.critic, trainer.state.critic.params))
    if name in IN_SEVERAL_TURNS:
        assert max(line["generate/max_turns"] for line in lines) == IN_SEVERAL_TURNS[name]
    if config.trainer.fully_async.enabled:
        assert all(line["async/staleness_max"] >= 0 for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("sft_")])
def test_two_supervised_steps(name, tmp_path):
    prepared(RECIPES / f"{name}.py", tmp_path)
    assert int(sft(tiny(load(name), tmp_path)).state.step) == 2
    lines = metrics_of(tmp_path, name)
    assert [line["step"] for line in lines] == [1, 2]
    assert all(math.isfinite(line["train/loss"]) for line in lines)
