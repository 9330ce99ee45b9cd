"""A run whose parts are given as objects."""

import os
import signal
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import pytest

import jaxrl
from jaxrl import config as cfg
from jaxrl.data.prompts import load_rows
from jaxrl.envs import Env
from jaxrl.rollout.build_remote import worker_config
from jaxrl.train import BasePPOExp, for_scripts

ROOT = Path(__file__).parents[1]
ROWS = [{"prompt": str(n), "answer": str(n)[::-1]} for n in range(10, 20)]


def reward(action, extras):
    return float(action == extras["answer"])


def other_reward(action, extras):
    return float(len(action))


def own_loss(log_probs, old_log_probs, advantages, config, loss_mask=None):
    return -advantages * log_probs, {}


WEIGHT = 3.0


def weigh(text):
    return WEIGHT * len(text)


def weighted(action, weight=1.0):
    return weight * weigh(action)


class Scorer:
    weight = 2.0

    def __call__(self, action):
        return self.weight


twice, thrice, scorer = partial(weighted, weight=2.0), partial(weighted, weight=3.0), Scorer()


class OwnEnv(Env):
    def step(self, action):
        return {"observations": [], "reward": 1.0, "done": True, "metadata": {}}


@pytest.fixture
def config_of(monkeypatch, tmp_path):
    """The config that a call trains with."""
    monkeypatch.chdir(ROOT)  # where configs/ is
    monkeypatch.setattr(BasePPOExp, "run", lambda self: self)
    return lambda *args, **kw: jaxrl.fit(*args, **{"log_path": str(tmp_path), **kw}).config


def test_what_a_call_gives_is_what_is_trained(config_of, tmp_path):
    config = config_of(
        data=ROWS,
        reward=[reward, other_reward],
        reward_weights={"reward": 1.0, "other_reward": 0.1},
        eval_data=ROWS[:2],
        loss=own_loss,
        advantages="rloo",
        lr=1e-3,
        **{"trainer.seed": 7},
    )
    assert config.environment.env_class == "single_turn"
    here = [f"{__name__}:reward", f"{__name__}:other_reward"]
    assert config.environment.reward_functions == here
    assert config.environment.reward_weights == {"reward": 1.0, "other_reward": 0.1}
    assert config.trainer.algorithm.policy_loss_type == f"{__name__}:own_loss"
    assert config.trainer.algorithm.advantage_estimator == "rloo"
    assert config.trainer.policy.optimizer_config.lr == 1e-3
    assert config.trainer.critic.optimizer_config.lr == 5e-6  # of the same name, and not meant
    assert config.trainer.seed == 7
    (train,), (held_out,) = config.data.train_data, config.data.val_data
    assert [len(load_rows(file)) for file in (train, held_out)] == [10, 2]
    assert not list(tmp_path.iterdir())  # nothing is written before the checks are done


def test_batch_and_lengths_fit_the_rows(config_of):
    config = config_of(data=ROWS, reward=reward)
    trainer = config.trainer
    assert (trainer.train_batch_size, trainer.policy_mini_batch_size) == (10, 5)
    assert trainer.max_prompt_length == 3  # two digits, and the sign after them
    assert (trainer.max_training_steps, trainer.epochs) == (160, 160)  # a batch has all rows
    many = [{"prompt": str(n)} for n in range(10, 80)]  # 70: two batches of 32 an epoch
    trainer = config_of(data=many, reward=other_reward, max_training_steps=9).trainer
    assert (trainer.train_batch_size, trainer.max_training_steps, trainer.epochs) == (32, 9, 5)
    trainer = config_of(data=many, reward=other_reward, epochs=3, train_batch_size=7).trainer
    assert (trainer.train_batch_size, trainer.policy_mini_batch_size) == (7, 7)
    assert (trainer.max_training_steps, trainer.epochs) == (None, 3)


def test_the_engine_has_rows_for_what_is_sampled(config_of):
    """Not for SkyRL's evaluation of 1024 prompts, of which a call without eval_data has none."""
    config = config_of(data=ROWS, reward=reward, n_samples_per_prompt=4, train_batch_size=4)
    assert cfg.rows_at_once(config) == 4 * 4
    config.trainer.placement.rollout_num_nodes = 1
    assert worker_config(config)["serve"]["max_num_seqs"] == 4 * 4  # of a server for all of it


def test_turns_have_room_as_far_as_the_model_goes(config_of):
    def longest_input(**fields):
        return config_of(data=ROWS, environment=OwnEnv, **fields).generator.max_input_length

    assert longest_input() == 3  # the prompts
    assert longest_input(max_turns=3, max_generate_length=4) == 3 + 2 * (4 + 64)
    assert longest_input(max_turns=2, max_generate_length=80) == 3 + 2 * 80
    assert longest_input(max_turns=9) == 256 - 16  # of the tiny model's positions
    assert longest_input(max_turns=9, max_input_length=50) == 50


def test_the_bonus_of_a_model_that_nobody_names_is_small(config_of):
    assert config_of(data=ROWS, reward=reward).trainer.algorithm.entropy_loss_coef == 0.03
    assert (
        config_of(
            data=ROWS, reward=reward, entropy_loss_coef=0.1
        ).trainer.algorithm.entropy_loss_coef
        == 0.1
    )


def test_a_name_says_what_judges(config_of):
    def name(**given):
        return config_of(data=ROWS, **given).trainer.run_name.rpartition("-")[0]

    assert name(reward=[reward, other_reward]) == "fit-reward"
    assert name(environment=OwnEnv) == "fit-OwnEnv"
    assert name(environment="gymnasium:FrozenLake-v1") == "fit-FrozenLake-v1"


def test_tuples_are_warned_of(config_of):
    rows = [{"prompt": "1", "pair": [(1, 2)]}, {"prompt": "2", "pair": []}]
    with pytest.warns(UserWarning, match="data.train_data: tuples in 'pair' become lists"):
        config_of(data=rows, reward=other_reward)


def test_the_run_is_named_by_what_must_be_the_same_for_it_to_go_on(config_of, tmp_path):
    def name(rows=ROWS, reward=reward, **fields):
        return config_of(data=rows, reward=reward, **fields).trainer.run_name

    first = name()
    assert first == name(max_training_steps=5) == name(log_path=str(tmp_path / "other"))
    others = [
        name(rows=ROWS[:9]),
        name(reward=other_reward),
        name(loss=own_loss),
        name(seed=1),
        name(**{"trainer.policy.model.path": "configs/tiny_tool_model"}),
    ]
    assert len({first, *others}) == 6
    written_otherwise = {"trainer.policy.model.lora.merge_exports": True}
    assert name(**written_otherwise) == first
    assert name(run_name="mine") == "mine"


def test_edited_rows_helpers_and_values_are_another_run(config_of, tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"

    def name(reward, rows="{}"):
        file.write_text(f'{{"prompt": "21", "extra": {rows}}}\n')
        return config_of(data=str(file), reward=reward).trainer.run_name

    first = name(weighted)
    assert name(weighted) == first
    others = [first, name(weighted, "[1]"), name(twice), name(thrice), name(scorer)]
    monkeypatch.setattr(scorer, "weight", 5.0)
    others.append(name(scorer))
    monkeypatch.setitem(globals(), "WEIGHT", 4.0)
    others.append(name(weighted))
    monkeypatch.setitem(globals(), "weigh", lambda text: 7.0)
    others.append(name(weighted))
    assert len(set(others)) == 8
    monkeypatch.undo()


def test_the_quickstart_is_the_one_that_came_with_jaxrl(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.py").write_text("raise KeyError\n")
    monkeypatch.setattr(BasePPOExp, "run", lambda self: self)
    assert jaxrl.fit().config.trainer.run_name == "quickstart"


def test_an_environment_a_model_and_a_recipe(config_of):
    config = config_of(data=ROWS, reward=reward, env_class="addition")  # which judges, too
    assert config.environment.env_class == "addition"
    config = config_of(data=ROWS, environment=OwnEnv)
    assert config.environment.env_class == f"{__name__}:OwnEnv"
    adapted = "gymnasium:FrozenLake-v1"  # is no path of a class
    assert config_of(data=ROWS, environment=adapted).environment.env_class == adapted
    config = config_of("configs/tiny_char_model", ROWS, reward)
    model = config.trainer.policy.model
    assert (model.path, model.random_init) == ("configs/tiny_char_model", False)
    assert config.trainer.policy.optimizer_config.lr == 1e-6  # the schema's
    recipe = "configs/quickstart.py"
    quickstart = cfg.apply_overrides(cfg.load_config_file(recipe), {"trainer.seed": 1})
    config = config_of(config=recipe, seed=1)
    assert config.data == quickstart.data
    assert config.trainer.algorithm.advantage_estimator == "grpo_token"
    assert jaxrl.fit().config.trainer.run_name == "quickstart"  # without any argument
    assert config_of(config=quickstart).trainer.seed == 1


WRONG = [
    ({}, "data=None: give rows"),  # the folder of the runs is given
    ({"loss": own_loss}, r"data=None: .*jaxrl.fit\(\) without any argument is the quickstart"),
    ({"reward": reward}, r"data=None: give rows, \[\{'prompt': ...\}, ...\]"),
    ({"data": ROWS}, "reward=None: nothing judges the responses; give a function, or environment"),
    ({"data": ROWS, "reward": 3}, "environment.reward_functions=3: expected list"),
    ({"data": ["What is 2+2?"], "reward": reward}, "data source 'What is 2.* is not a .parquet"),
    (
        {"data": ["0", "1"], "reward": reward},
        r"If these are prompts, write rows: data=\[\{'prompt': '0'\}, ...\]",
    ),
    ({"data": ROWS, "reward": reward, "steps": 5}, "did you mean max_training_steps?"),
    ({"data": [{"question": "1"}], "reward": reward}, "row 0.* no 'prompt'; the columns are"),
    ({"data": [], "reward": reward}, r"data=\[\]: give rows"),
    ({"data": ROWS, "reward": reward, "sead": 1}, "no argument 'sead', .*did you mean seed?"),
    (
        {"data": ROWS, "reward": reward, "temperature": 0.5},
        r"temperature is the name of trainer.algorithm.temperature and of generator.sampling_params"
        r".temperature: write \*\*\{'trainer.algorithm.temperature': ...\}",
    ),
    ({"data": ROWS, "reward": reward, "seed": "a"}, "trainer.seed='a': expected int"),
    (
        {"data": ROWS, "reward": lambda completions: 0.0},
        r"reward_functions\[0\]=.*<lambda>.*:.* has no name by which another start",
    ),
    ({"data": ROWS, "reward": own_loss}, "reward function .*'log_probs'"),
    ({"data": ROWS, "reward": reward, "loss": reward}, "policy loss .*takes .* by position"),
    ({"data": ROWS, "environment": OwnEnv({}, {})}, "env_class=.* is of type OwnEnv; give"),
    ({"model": "models/none", "data": ROWS, "reward": reward}, "'models/none' is neither"),
    ({"model": ROWS, "reward": reward}, "model is a list, .*: rows are data=rows"),
    ({"config": 3}, "TrainConfig=3: expected a mapping"),
    ({"config": "configs/quikstart.py"}, "configs/quikstart.py: no such file"),
]


@pytest.mark.parametrize(("arguments", "text"), WRONG)
def test_wrong_objects_are_one_clear_line(config_of, arguments, text):
    with pytest.raises(ValueError, match=text) as refused:
        config_of(**arguments)
    assert refused.value.__suppress_context__ and refused.value.__cause__ is None


def forgets(action):
    float(len(action))


def wrong_loss(log_probs, old_log_probs, advantages, config, loss_mask=None):
    return advantages * log_probs.reshape(-1, 3), {}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"reward": forgets}, "row 0 of the rows given, .*is a `return` missing"),
        ({"reward": reward, "loss": wrong_loss}, "wrong_loss' raised TypeError: cannot reshape"),
    ],
)
def test_what_a_trial_refuses_is_one_line_and_no_folder(tmp_path, arguments, text):
    with pytest.raises(ValueError, match=text) as refused:
        jaxrl.fit(data=ROWS, log_path=str(tmp_path / "runs"), **arguments)
    shown = "".join(traceback.format_exception(refused.value))
    assert "direct cause" not in shown and "JAX has removed" not in shown
    assert len(refused.traceback) == 2  # of this test, and of the call
    assert not list(tmp_path.iterdir())


def test_what_a_callback_raises_keeps_its_traceback():
    @for_scripts
    def call():
        raise_from_a_callback()

    def raise_from_a_callback():
        raise ValueError("of the user's")

    with pytest.raises(ValueError, match="of the user's") as error:
        call()
    assert error.traceback[-1].name == "raise_from_a_callback"


INTERRUPTED = """
from jaxrl.train import for_scripts

@for_scripts
def run():
    raise KeyboardInterrupt

try:
    run()
except KeyboardInterrupt:
    print("caught", flush=True)
run()
"""


@pytest.mark.slow
def test_an_interrupt_of_a_script_is_one_line_and_its_caller_may_catch_it():
    argv = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "caught\n"
    line = "interrupted; the same script resumes from the last checkpoint, if there is one\n"
    assert done.stderr == line
    assert done.returncode == -signal.SIGINT  # of shells: 130


def test_a_python_without_the_packages_is_named():
    code = "import sys; sys.modules['ml_collections'] = None; import jaxrl; jaxrl.fit"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, cwd=ROOT)
    *_, last = done.stderr.splitlines()
    assert f"jaxrl's packages are not installed in this Python ({sys.executable}): source" in last
    assert "During handling" not in done.stderr


SCRIPT = """
import sys
import jaxrl
from jaxrl.records.callbacks import TrainingCallback

class Told(TrainingCallback):
    def on_train_end(self, trainer, callback_input, control):
        print("told of step", callback_input.global_step)

def backwards(action, extras):
    return sum(a == b for a, b in zip(action, extras["answer"])) / 2

def likely(log_probs, old_log_probs, advantages, config, loss_mask=None):
    return -advantages * log_probs, {}

trainer = jaxrl.fit(
    data=[{"prompt": str(n), "answer": str(n)[::-1]} for n in range(10, 18)],
    reward=backwards,
    loss=likely,
    callbacks=[Told()],
    log_path=sys.argv[1],
    max_training_steps=4,
    n_samples_per_prompt=2,
    max_generate_length=4,
    ckpt_interval=1,
    hf_save_interval=4,
)
print("answer", trainer.answer("12"))
"""


@pytest.mark.slow
def test_a_script_that_is_killed_and_started_again_ends_with_the_same_bits(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def start(folder):
        argv = [sys.executable, str(script), str(tmp_path / folder)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(argv, cwd=ROOT, env=environment, **pipes)

    def ended(process):
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
        (run,) = (tmp_path / Path(process.args[2]).name).iterdir()
        weights = run / "exports" / "global_step_4" / "policy" / "model.safetensors"
        return out, run.name, weights.read_bytes()

    whole = ended(start("whole"))
    process = start("killed")
    try:
        while process.poll() is None:
            time.sleep(0.05)
            if list((tmp_path / "killed").glob("*/checkpoints/global_step_2")):
                break
        assert process.poll() is None, process.communicate()
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    resumed = ended(start("killed"))
    assert "resuming after step" in resumed[0]
    assert "resuming after step" not in whole[0]
    assert resumed[1:] == whole[1:]
    for out in (whole[0], resumed[0]):
        assert "told of step 4\n" in out
        assert out.splitlines()[-1].startswith("answer ")


@pytest.mark.slow
def test_the_cells_of_a_notebook(tmp_path):
    import nbformat

    from tests.examples.notebook_kernels import run_notebook, streams

    arguments = (
        f"data=rows, reward=score, log_path={str(tmp_path / 'runs')!r}, n_samples_per_prompt=2, "
        "max_generate_length=4, max_training_steps=2"
    )
    code = [
        "import jaxrl\nrows = [{'prompt': str(n)} for n in range(10, 14)]\n"
        "def score(action):\n    return float('1' in action)",
        f"trainer = jaxrl.fit({arguments})\nprint(trainer.config.environment.reward_functions)",
        "def score(action):\n    return float('2' in action)",  # the cell was edited
        f"again = jaxrl.fit({arguments})\n"
        "print(again.config.trainer.run_name != trainer.config.trainer.run_name)",
        f"same = jaxrl.fit({arguments})\nprint(int(same.state.step), len(same.answer('12')) <= 4)",
    ]
    cells = [nbformat.v4.new_code_cell(part) for part in code]
    notebook = run_notebook(nbformat.v4.new_notebook(cells=cells), ROOT)
    last = [(streams(cell).get("stdout", "") or "\n").splitlines()[-1] for cell in notebook.cells]
    assert last == ["", "['__main__:score']", "", "True", "2 True"]
