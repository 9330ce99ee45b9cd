"""Wrong inputs, through the real commands: one line with the thing, its value and the remedy.

Each ends with exit status 2 and no traceback, and what was there before is as it was.
"""

import importlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.models.export import save_pretrained
from jaxrl.models.hf import load_config
from jaxrl.models.transformer import init_params

# Its handler keeps the stderr of its first message, which must not be that of a test.
transformers.logging.get_verbosity()
CONFIGS = Path(__file__).parent.parent / "configs"
TINY, POLICY = CONFIGS / "tiny_char_model", "trainer.policy.model.path"
RECIPE = f"""
from jaxrl.config import load_config_file

def get_config():
    config = load_config_file({str(CONFIGS / "quickstart.py")!r})
    config.data.train_data = ["jaxrl.envs.toys.sort_digits:prompts(size=16, seed=0)"]
    config.data.val_data = []
    config.trainer.max_training_steps = 1
    config.trainer.train_batch_size = config.trainer.policy_mini_batch_size = 4
    config.trainer.micro_train_batch_size_per_gpu = 1
    config.trainer.micro_forward_batch_size_per_gpu = 2
    config.generator.n_samples_per_prompt = 4
    config.trainer.policy.optimizer_config.scheduler = "constant"
    config.trainer.policy.optimizer_config.num_warmup_steps = 0
    config.trainer.eval_interval = config.trainer.ckpt_interval = -1
    config.trainer.hf_save_interval = -1
    config.trainer.print_example_interval = -1
    config.trainer.logger = []
    {{changes}}
    return config
"""
MINE = """
import numpy as np

def no_return(action):
    len(action)

def raises(action):
    return {}["points"]

def one_array(token_level_rewards, **_):
    return token_level_rewards

def a_row(token_level_rewards, **_):
    return token_level_rewards.sum(-1), token_level_rewards.sum(-1)

def loops(token_level_rewards, index, **_):
    if index[0] > 0:
        return token_level_rewards, token_level_rewards

def in_numpy(token_level_rewards, **_):
    return np.asarray(token_level_rewards), np.asarray(token_level_rewards)

def other_order(old_log_probs, log_probs, advantages, config):
    return log_probs, {}

def rows(size):
    for i in range(size):
        yield {"prompt": {}["question"]}
"""


def files(folder):
    """Return the files of a folder, with their content."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path: path.read_bytes() for path in found if "__pycache__" not in path.parts}


def check(capsys, folder, module, words, expected):
    """Call a command as a shell would; check what it says, and that nothing was changed."""
    before = files(folder)
    assert importlib.import_module(f"jaxrl.{module}").main(words) == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    lines = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, printed
    missing = [word for word in expected if word not in printed]
    assert not missing, printed
    after = files(folder)
    assert {path: after.get(path) for path in before} == before


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a recipe, a module of functions, and work of before."""
    (tmp_path / "recipe.py").write_text(RECIPE.format(changes="pass"))
    (tmp_path / "mine_wrong.py").write_text(MINE)
    (tmp_path / "runs/before").mkdir(parents=True)
    (tmp_path / "runs/before/metrics.jsonl").write_text('{"step": 1}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


TRAIN = [
    # the command line
    (["--config.trainer.sed=1"], ["unknown config field 'trainer.sed'", "Did you mean"]),
    (["--config.trainer.epochs=many"], ["trainer.epochs='many'", "expected int"]),
    (["--config.trainer.epochs"], ["--config.trainer.epochs has no value"]),
    (["trainer.epochs=2"], ["trainer.epochs", "write --config.trainer.epochs=2"]),
    (["--learning-rate=1"], ["unknown argument '--learning-rate=1'", "usage"]),
    (["--config.trainer.seed.first=1"], ["trainer.seed.first", "trainer.seed is a value"]),
    # fields
    (["--config.trainer.seed=-1"], ["trainer.seed=-1", "must be 0 or more"]),
    ([f"--config.trainer.seed={2**70}"], [f"trainer.seed={2**70}", "below 2**63"]),
    (['--config.data.train_data=["a.jsonl"'], ["data.train_data", "a bracket or a quote is miss"]),
    (["--config.trainer.trian=1"], ["'trainer.trian'", "Fields of Tr", "more (docs/configuration"]),
    (["--config.trainer.epochs=0"], ["trainer.epochs=0", "set it to 1 or more"]),
    (["--config.trainer.logger=wandbb"], ["trainer.logger", "'wandbb'", "did you mean 'wandb'"]),
    (
        ["--config.generator.sampling_params.temperature=-1"],
        ["generator.sampling_params.temperature=-1"],
    ),
    (["--config.generator.sampling_params.top_p=7"], ["generator.sampling_params.top_p=7"]),
    (["--config.trainer.policy.optimizer_config.lr=-1"], ["optimizer_config.lr=-1", "negative"]),
    (
        ["--config.trainer.policy.optimizer_config.scheduler=cosin"],
        ["scheduler='cosin'", "did you mean 'cosine'"],
    ),
    (["--config.trainer.resume_mode=newest"], ["trainer.resume_mode='newest'", "'latest'"]),
    # arithmetic
    (["--config.trainer.policy_mini_batch_size=3"], ["policy_mini_batch_size", "3", "4"]),
    (["--config.trainer.train_batch_size=64"], ["trainer.train_batch_size=64", "has 16"]),
    (
        ["--config.trainer.policy.mesh.fsdp=3"],
        ["mesh={'fsdp': 3}", "8, the number of devices", "fsdp: 8 would fit"],
    ),
    (
        ["--config.trainer.policy.mesh.fsdp=16"],
        ["mesh={'fsdp': 16}", "fsdp: 8 would fit", "xla_force_host_platform_device_count=16"],
    ),
    (["--config.trainer.policy.mesh.context=3"], ["'context': 3", "1, 2, 4 or 8 would fit"]),
    (["--config.trainer.max_prompt_length=2"], ["longer than max_prompt_length=2", "has 5"]),
    # losses and estimators
    (
        ["--config.trainer.algorithm.policy_loss_type=gpso"],
        ["policy_loss_type='gpso'", "Did you mean 'gspo'?"],
    ),
    (
        ["--config.trainer.algorithm.policy_loss_type=grpo"],
        ["'grpo': is an advantage estimator", "advantage_estimator='grpo'", "'regular'"],
    ),
    (
        ["--config.trainer.algorithm.advantage_estimator=gspo"],
        ["'gspo': is a policy loss", "policy_loss_type='gspo'"],
    ),
    (["--config.trainer.algorithm.policy_loss_type=nowhere:f"], ["cannot import module 'nowhere'"]),
    (
        ["--config.trainer.algorithm.policy_loss_type=mine_wrong:other_order"],
        ["parameter 1 is 'old_log_probs'", "in this order"],
    ),
    (
        ["--config.trainer.algorithm.advantage_estimator=mine_wrong:one_array"],
        ["mine_wrong:one_array", "return advantages, advantages"],
    ),
    (
        ["--config.trainer.algorithm.advantage_estimator=mine_wrong:a_row"],
        ["mine_wrong:a_row", "a number for each token"],
    ),
    (
        ["--config.trainer.algorithm.advantage_estimator=mine_wrong:loops"],
        ["mine_wrong:loops", "jnp.where"],
    ),
    (
        ["--config.trainer.algorithm.advantage_estimator=mine_wrong:in_numpy"],
        ["mine_wrong:in_numpy", "jax.numpy"],
    ),
    # rewards and environments
    (
        ["--config.environment.reward_functions=['mine_wrong:no_return']"],
        ["reward function 'no_return'", "gave None", "is a `return` missing?", "mine_wrong.py:4"],
    ),
    (
        ["--config.environment.reward_functions=['mine_wrong:raises']"],
        ["reward function 'raises'", "KeyError('points')", "mine_wrong.py:8"],
    ),
    (["--config.environment.reward_functions=['mine_wrong:absent']"], ["no function 'absent'"]),
    # places
    (
        ["--config.trainer.log_path=recipe.py"],
        ["recipe.py/quickstart", "Not a directory", "Choose another"],
    ),
    (["--config.trainer.ckpt_path=ftp://x/y"], ["trainer.ckpt_path='ftp://x/y'", "gs://"]),
    (
        [
            "--config.trainer.resume_mode=from_path",
            "--config.trainer.resume_path=runs/global_step_3",
        ],
        ["trainer.resume_path='runs/global_step_3' does not exist", "none"],
    ),
    (
        ["--config.trainer.resume_mode=from_path", "--config.trainer.resume_path=runs/before"],
        ["trainer.resume_path='runs/before' must end in global_step_<N>"],
    ),
    (["--config.trainer.resume_mode=from_path"], ["trainer.resume_path=None", "set the folder"]),
    (
        ["--config.trainer.policy.model.path=nowhere"],
        [f"{POLICY}='nowhere': nowhere is not a folder", "OWNER/NAME"],
    ),
    (["--config.trainer.policy.model.path=no/model"], [f"{POLICY}='no/model'", "hub gives"]),
    (
        [
            "--config.trainer.ref.model.path=no/model",
            "--config.trainer.algorithm.use_kl_loss=True",
        ],
        ["trainer.ref.model.path='no/model'", "hub gives"],
    ),
    (
        [
            "--config.trainer.critic.model.path=no/model",
            "--config.trainer.algorithm.advantage_estimator=gae",
            "--config.trainer.critic_mini_batch_size=4",
        ],
        ["trainer.critic.model.path='no/model'", "hub gives"],
    ),
]


@pytest.mark.parametrize(("words", "expected"), TRAIN, ids=lambda value: str(value)[:60])
def test_training(words, expected, place, capsys):
    check(capsys, place, "train", ["--config=recipe.py", *words], expected)


RECIPES = [
    ("config.trainer.lr = 1", ["unknown config field 'lr'", "'policy.optimizer_config.lr'"]),
    ("config.trainer.epochs = 'a'", ["recipe wrong.py: trainer.epochs='a': expected int"]),
    ("return None", ["wrong.py", "None"]),
    ("if", ["wrong.py", "syntax"]),
    ("config.trainer.epochs = undefined", ["NameError: name 'undefined'", "wrong.py:19"]),
    ("import not_there", ["wrong.py", "not_there"]),
]


@pytest.mark.parametrize(("line", "expected"), RECIPES)
def test_a_recipe(line, expected, place, capsys):
    (place / "wrong.py").write_text(RECIPE.format(changes=line))
    check(capsys, place, "train", ["--config=wrong.py"], expected)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["no recipe given", "usage"]),
        (["--config=nowhere.py"], ["nowhere.py", "no such file"]),
        (["--config=runs"], ["runs"]),
        (["--config=mine_wrong.py"], ["defines no function get_config()"]),
    ],
)
def test_a_recipe_that_is_none(words, expected, place, capsys):
    check(capsys, place, "train", ["--config.trainer.seed=1", *words], expected)


DATA = {
    "absent.jsonl": (None, ["'absent.jsonl' does not exist"]),
    "half.jsonl": (b'{"prompt": "1"}\n{"prom\n', ["half.jsonl, line 2: malformed JSON"]),
    "empty.jsonl": (b"", ["'empty.jsonl' is empty"]),
    "latin.jsonl": (b'{"prompt": "\xe9"}\n', ["latin.jsonl", "UTF-8"]),
    "null.jsonl": (b'{"prompt": null}\n', ["row 0", "the prompt is null"]),
    "number.jsonl": (b'{"prompt": 3}\n', ["row 0", "neither text nor a list of messages but int"]),
    "no_prompt.jsonl": (b'{"question": "3"}\n', ["row 0", "no 'prompt'", "question"]),
    "text.parquet": (b"no parquet", ["text.parquet is not a readable parquet file"]),
    "table.csv": (b"prompt\n3\n", ["'table.csv' is not a .parquet, .jsonl or .json file"]),
    "list.json": (b'["1"]', ["row 0", "not a dict but str"]),
    "object.json": (b'{"prompt": "1",\n"n": }', ["object.json", "line 2", "malformed JSON"]),
    "environment.jsonl": (b'{"prompt": "1", "env_class": "sort_digit"}\n', ["sort_digit"]),
    "mine_wrong:rows()": (None, ["missing a required argument: 'size'", "rows(size)"]),
    "mine_wrong:row(size=3)": (None, ["has no function 'row'", "did you mean 'rows'?"]),
    "mine_wrong:rows(size=3)": (None, ["mine_wrong:rows(size=3)", "KeyError", "mine_wrong.py"]),
}


@pytest.mark.parametrize("name", DATA)
def test_data(name, place, capsys):
    content, expected = DATA[name]
    if content is not None:
        (place / name).write_bytes(content)
    words = ["--config=recipe.py", f'--config.data.train_data=["{name}"]']
    check(capsys, place, "train", words, expected)


def changed_json(name, **changes):
    def change(folder):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def changed_tensors(**tensors):
    def change(folder):
        path = folder / "model.safetensors"
        found = load_file(path) | {name.replace("__", "."): x for name, x in tensors.items()}
        save_file({name: x for name, x in found.items() if x is not None}, path)

    return change


def cut(name, to=0):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:to])


def pointer(name):
    """Leave of a file what git leaves of one that Git LFS keeps, where that is not installed."""
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
    return lambda folder: (folder / name).write_text(text)


MODELS = {
    "missing": (
        changed_tensors(model__norm__weight=None),
        ["lacks the tensors: model.norm.weight"],
    ),
    "extra": (changed_tensors(x=np.ones(3)), ["tensors that the config does not explain: x"]),
    "shape": (
        changed_tensors(model__norm__weight=np.ones(3)),
        ["model.norm.weight has shape (3,), expected (64,)"],
    ),
    "quantised": (
        changed_tensors(model__norm__weight=np.ones(64, np.int8)),
        ["quantised weights", "model.norm.weight is of I8", "bfloat16"],
    ),
    "cut": (cut("model.safetensors", 999), ["is not a whole safetensors file", "again"]),
    "no weights": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        ["neither model.safetensors nor", "save_pretrained"],
    ),
    "config cut": (cut("config.json", 9), ["config.json is not valid JSON"]),
    "config in another encoding": (
        lambda folder: (folder / "config.json").write_bytes(b'{"model_type": "\xe9"}'),
        ["config.json is not valid JSON in UTF-8", "again"],
    ),
    "config of a list": (
        lambda folder: (folder / "config.json").write_text("[1, 2]"),
        ["config.json holds a list, not an object"],
    ),
    "size as text": (
        changed_json("config.json", hidden_size="64"),
        ["config.json: hidden_size='64' is no whole number"],
    ),
    "number as text": (
        changed_json("config.json", rms_norm_eps="1e-6"),
        ["config.json: rms_norm_eps='1e-6' is text", "without quotes"],
    ),
    "config not fetched": (pointer("config.json"), ["config.json", "git lfs pull"]),
    "weights not fetched": (pointer("model.safetensors"), ["model.safetensors", "git lfs pull"]),
    "tokenizer not fetched": (pointer("tokenizer.json"), ["tokenizer.json", "git lfs pull"]),
    "family": (
        changed_json("config.json", model_type="llama4_text"),
        ["config.json: model_type='llama4_text' is not supported", "qwen3"],
    ),
    "vocabulary": (
        changed_json("config.json", vocab_size=64),
        ["has shape (48, 64), expected (64"],
    ),
    "tokenizer cut": (cut("tokenizer.json", 9), ["tokenizer", "again"]),
    "no tokenizer": (
        lambda folder: (folder / "tokenizer.json").unlink(),
        ["holds no tokenizer", "copy the tokenizer files"],
    ),
    "no template": (
        changed_json("tokenizer_config.json", chat_template=None),
        ["has no chat template", "generator.chat_template.name_or_path=FILE"],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_folder(name, place, capsys):
    change, expected = MODELS[name]
    model, architecture = place / "model", load_config(TINY)
    save_pretrained(model, architecture, init_params(architecture, 0), load_tokenizer(TINY))
    change(model)
    path = "--config.trainer.policy.model"
    words = ["--config=recipe.py", f"{path}.path={model}", f"{path}.random_init=False"]
    check(capsys, place, "train", words, [str(model), *expected])


# What a model has no id for, and what is said of it; before anything is loaded or compiled.
LACKS = {
    "tokens": (
        changed_json("config.json", vocab_size=43),
        ["the tokenizer has ids that the model with its 43 tokens", "'y' is 43, 'z' is 44"],
    ),
    "an end": (
        changed_json("generation_config.json", eos_token_id=[45, 999]),
        ["generation_config.json names is id 999", "from 0 to 47"],
    ),
    "an end of config.json": (
        changed_json("config.json", eos_token_id=999),
        ["config.json names is id 999", "from 0 to 47"],
    ),
}


LACKING = [
    (module, name)
    for module in ("train", "sft", "serve", "evaluate", "tinker", "plan", "doctor")
    for name in LACKS
    if (module, name) != ("plan", "tokens")  # it loads no tokenizer
]


@pytest.mark.parametrize(("module", "name"), LACKING)
def test_ids_that_a_model_has_not(module, name, place, capsys):
    change, expected = LACKS[name]
    shutil.copytree(TINY, place / "model")
    change(place / "model")
    recipe = CONFIGS / "sft_addition.py" if module == "sft" else "recipe.py"
    words = [f"--config={recipe}", f"--config.{POLICY}={place / 'model'}"]
    words += ['--config.data.val_data=["jaxrl.envs.toys.sort_digits:prompts(size=4, seed=1)"]'] * (
        module == "evaluate"
    )
    check(capsys, place, module, words, [POLICY, str(place / "model"), *expected])


COMMANDS = [
    ("audit", ["nowhere"], ["nowhere"]),
    ("audit", ["runs/before"], ["runs/before"]),
    ("replay", ["runs/before"], ["runs/before"]),
    ("replay", ["runs/before", "--step=last"], ["--step", "'last'"]),
    ("report", ["nowhere"], ["nowhere"]),
    ("report", ["recipe.py"], ["recipe.py"]),
    ("compare", ["runs/before", "--step=1", "--losses=regular"], ["runs/before"]),
    ("compare", ["runs/before", "--step=1"], ["--losses"]),
    ("sweep", ["--config=recipe.py", "--losses=regular", "--out=o"], ["--seeds"]),
    ("sweep", ["--config=recipe.py", "--losses=regulr", "--seeds=1", "--out=o"], ["regulr"]),
    ("sweep", ["--config=recipe.py", "--losses=regular", "--seeds=a", "--out=o"], ["--seeds='a'"]),
    ("evaluate", ["--config=recipe.py", "--checkpoint=nowhere"], ["nowhere"]),
    ("doctor", ["--config=recipe.py", "--only=gradiants"], ["did you mean 'gradients'"]),
    ("plan", ["--config=recipe.py", "--chip=v99"], ["v99"]),
    ("prove", ["--again=updates"], ["--again=updates", "there are machine, doctor"]),
    ("sft", ["--config=recipe.py"], ["has no effect in supervised", "configs/sft_*.py"]),
    ("serve", ["--config=recipe.py", "--port=99999"], ["99999"]),
    ("tinker", ["--config=recipe.py", "--config.tinker.max_rank=0"], ["tinker.max_rank=0"]),
    ("config.from_skyrl", ["nowhere.sh"], ["nowhere.sh"]),
    ("config.from_skyrl", ["trainer.seed", "--output=o.py"], ["'trainer.seed'", "key.path=value"]),
    ("new", ["class"], ["'class' is no name", "no word of the language"]),
    ("config.from_skyrl", ["trainer.seed"], ["'trainer.seed'", "key.path=value"]),
    ("data.prepare", ["gsm9k", "--output", "x"], ["gsm9k"]),
]


@pytest.mark.parametrize(("module", "words", "expected"), COMMANDS)
def test_other_commands(module, words, expected, place, capsys):
    check(capsys, place, module, words, expected)


def test_there_are_forty():
    rows = (TRAIN, RECIPES, DATA, MODELS, COMMANDS)
    assert sum(map(len, rows)) >= 40
