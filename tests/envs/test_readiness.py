"""What is refused before a model is loaded: environments of the data that cannot be made."""

import asyncio
import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrl import config as cfg, envs
from jaxrl.config_error import ConfigError
from jaxrl.envs import Env
from jaxrl.envs.json_request import RequestError
from jaxrl.envs.protocol import conversation_extras
from jaxrl.envs.readiness import ServerAwayError, check_environments, refuse_code
from jaxrl.envs.sandbox import sandbox
from jaxrl.rollout.conversations.session import EnvironmentFailure
from jaxrl.rollout.conversations.trajectories import refuse_all_failed
from jaxrl.train import BasePPOExp, exit_status
from jaxrl.types import Prompt
from tests.envs.json_server import closed_url
from tests.test_train import QUICKSTART

RULE = {"reward_spec": {"method": "rule", "ground_truth": "[1]"}}


class CountingEnv(Env):
    made, asked, closed = 0, 0, 0

    def __init__(self, env_config=None, extras=None):
        super().__init__(env_config, extras)
        CountingEnv.made += 1

    def ready(self):
        CountingEnv.asked += 1
        if self.extras.get("broken"):
            raise ConnectionError("nobody there")

    def close(self):
        CountingEnv.closed += 1


class PlainEnv:
    """No subclass: a method `ready` of its own means something else."""

    def __init__(self, env_config=None, extras=None):
        assert extras["max_turns"] == 3

    def ready(self, something):
        raise AssertionError

    def step(self, action): ...

    def close(self): ...


class AsyncEnv(CountingEnv):
    """Opens in one coroutine what it closes in another."""

    async def ready(self):
        self.lock, self.loop = asyncio.Lock(), asyncio.get_running_loop()
        super().ready()

    async def close(self):
        async with self.lock:
            assert asyncio.get_running_loop() is self.loop
        super().close()


COUNTING = "tests.envs.test_readiness:CountingEnv"


def prompt(number, env_class, **extras):
    return Prompt(f"0:{number}", [{"role": "user", "content": "1"}], (1,), env_class, extras)


def test_one_of_each_kind_is_made_asked_and_closed(monkeypatch):
    monkeypatch.setattr(CountingEnv, "made", 0)
    prompts = [prompt(i, COUNTING, broken=i > 0) for i in range(3)]  # the first is asked
    check_environments([*prompts, prompt(3, "tests.envs.test_readiness:PlainEnv")], {}, 3)
    assert (CountingEnv.made, CountingEnv.asked, CountingEnv.closed) == (1, 1, 1)


def test_coroutines_are_waited_for_where_a_loop_runs_too(monkeypatch):
    monkeypatch.setattr(CountingEnv, "closed", 0)
    env_class = "tests.envs.test_readiness:AsyncEnv"

    async def in_a_notebook():
        check_environments([prompt(0, env_class)], {}, 3)

    asyncio.run(in_a_notebook())
    with pytest.raises(ValueError, match="AsyncEnv' of prompt 0:0: ConnectionError: nobody there"):
        check_environments([prompt(0, env_class, broken=True)], {}, 3)
    assert CountingEnv.closed == 2


@pytest.mark.parametrize("env_class", ["gsm8k", "search", "addition"])
def test_a_column_that_other_rows_have_is_none_here(env_class):
    config = {"search": {"search_url": closed_url()}}
    columns = {**RULE, "max_turns": None, "seed": None}
    env = envs.make(env_class, conversation_extras(columns, 7), config)
    assert env.max_turns == 7 and env.extras["seed"] is None
    if env_class != "search":  # whose server is asked
        check_environments([prompt(0, env_class, **columns)], config, 7)


def test_a_server_that_is_away_may_be_back_at_the_next_start(monkeypatch):
    monkeypatch.setattr("jaxrl.envs.json_request.FIRST_WAIT", 0.001)
    config = {"search": {"search_url": closed_url()}}
    search, unknown = prompt(6, "search", **RULE), prompt(1, "gsm8")
    with pytest.raises(ServerAwayError, match="'search' of prompt 0:6: RequestError"):
        check_environments([search], config, 1)
    with pytest.raises(ValueError, match="unknown environment 'gsm8'"):
        check_environments([search, unknown], config, 1)

    class Away(BasePPOExp):
        def __init__(self, config):
            raise ServerAwayError("search")

    assert exit_status(Away, {}) == 70  # a job is started again


@pytest.mark.parametrize(("cause", "status"), [(RequestError("503"), 70), (ZeroDivisionError(), 2)])
def test_a_judge_that_goes_away_later_may_be_back_too(cause, status):
    class Run(BasePPOExp):
        def __init__(self, config):
            pass

        def run(self):
            try:
                raise EnvironmentFailure("no score") from cause
            except EnvironmentFailure as error:
                refuse_all_failed([error])

    assert exit_status(Run, {}) == status


def test_all_that_is_wrong_is_said_at_once(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("jaxrl.envs.json_request.FIRST_WAIT", 0.001)
    monkeypatch.setattr(sandbox, "require", no_sandbox)
    prompts = [
        prompt(0, "gsm8k", **RULE),
        prompt(1, "gsm8"),
        prompt(2, "text2sql", **RULE),
        prompt(3, COUNTING, broken=True),
        prompt(4, "python_code", **RULE),
        prompt(5, "reasoning_gym:chain_sun", entry="{}"),
        prompt(6, "search", **RULE),
        prompt(7, "search", **RULE),
        prompt(8, "llm_as_a_judge", **RULE),
    ]
    config = {"search": {"search_url": closed_url()}}
    with pytest.raises(ValueError) as raised:
        check_environments(prompts, config, 1)
    first, *lines = str(raised.value).splitlines()
    assert first == "environments that cannot be made:"
    expected = {
        "gsm8' of prompt 0:1": "unknown environment 'gsm8'; did you mean 'gsm8k'?",
        "text2sql' of prompt 0:2": "needs a column db_id",
        "CountingEnv' of prompt 0:3": "ConnectionError: nobody there",
        "python_code' of prompt 0:4": "SandboxError: no namespaces",
        "reasoning_gym:chain_sun' of prompt 0:5": "did you mean 'chain_sum'?",
        "search' of prompt 0:6": "RequestError: http://127.0.0.1:",
        "llm_as_a_judge' of prompt 0:8": "the variable OPENAI_API_KEY has no key",
    }
    assert len(lines) == len(expected)
    for line, (head, reason) in zip(lines, expected.items(), strict=True):
        assert head in line
        assert reason in line


def no_sandbox():
    raise sandbox.SandboxError("no namespaces")


def test_where_they_live_elsewhere_only_the_classes_are_found(monkeypatch):
    monkeypatch.setattr(CountingEnv, "made", 0)
    check_environments([prompt(0, COUNTING, broken=True)], {}, 1, make=False)
    assert CountingEnv.made == 0
    with pytest.raises(ValueError, match="unknown environment 'gsm8'"):
        check_environments([prompt(0, "gsm8")], {}, 1, make=False)


class OwnGenerator(BasePPOExp):
    def get_generator(self, engine, tokenizer):
        raise AssertionError("not reached")


def test_a_run_refuses_them_before_the_engine_is_made(tmp_path):
    class Exp(BasePPOExp):
        def get_engine(self, model, mesh):
            raise AssertionError("the engine was made")

    config = cfg.apply_overrides(
        cfg.load_config_file(QUICKSTART),
        {
            "data.train_data": ["jaxrl.envs.toys.sort_digits:prompts(size=64, seed=0)"],
            "data.val_data": ["tests.envs.test_readiness:rows()"],
            "trainer.log_path": str(tmp_path),
            "trainer.ckpt_path": str(tmp_path / "checkpoints"),
            "trainer.export_path": str(tmp_path / "exports"),
        },
    )
    with pytest.raises(ValueError, match=r"'no_such_env' of prompt 0:0 \(row 0 of .*: unknown env"):
        Exp(config).build()
    # a generator of one's own knows what its prompts mean
    OwnGenerator(config).check_environments([prompt(0, "no_such_env")])


def rows():
    yield {"prompt": "12", "env_class": "no_such_env"}


# ---- rows of files that choose code --------------------------------------------------------------


EVIL = """
from pathlib import Path

from jaxrl.envs import Env

Path(__file__).with_name("ran").touch()


class E(Env):
    def step(self, action):
        return {"observations": [], "reward": 1.0, "done": True, "metadata": {}}
"""
ROW = {"prompt": "12", "env_class": "got_from_hub.evil:E"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Return a function that writes rows beside a module, and one that says whether it ran."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "got_from_hub"
    folder.mkdir()
    (folder / "evil.py").write_text(EVIL)

    def write(rows, suffix):
        file = folder / f"train{suffix}"
        if suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), file)
        else:
            file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return f"got_from_hub/train{suffix}"

    yield write, (folder / "ran").exists
    for name in [name for name in sys.modules if name.startswith("got_from_hub")]:
        del sys.modules[name]
    envs.ENVS.pop("hub_env", None)


def run_of(tmp_path, data, **overrides):
    config = cfg.apply_overrides(
        cfg.load_config_file(QUICKSTART),
        {
            "data.train_data": [data] if isinstance(data, str) else data,
            "data.val_data": [],
            "trainer.eval_interval": -1,
            "trainer.log_path": str(tmp_path / "runs"),
            "trainer.ckpt_path": str(tmp_path / "checkpoints"),
            "trainer.export_path": str(tmp_path / "exports"),
            **overrides,
        },
    )
    run = BasePPOExp(config)
    run.tokenizer = run.get_tokenizer()
    return run


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_a_data_set_is_not_code(hub, tmp_path, capsys, suffix):
    write, ran = hub
    data = write([{"prompt": "12", "env_class": "sort_digits", **RULE}, *[ROW] * 71], suffix)
    config = run_of(tmp_path, data).config
    assert exit_status(BasePPOExp, config) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "environment.rows_may_name_code=False: prompt 0:1 (row 1 of got_from_hub/train" in said
    assert "env_class='got_from_hub.evil:E'" in said
    assert not ran()
    assert not (tmp_path / "runs").exists()


def test_who_may_name_code(hub, tmp_path):
    """The config, by the switch or the name, a script that registers it or has the rows itself."""
    write, ran = hub
    file, name = write([ROW], ".jsonl"), ROW["env_class"]
    [allowed] = run_of(tmp_path, file, **{"environment.rows_may_name_code": True}).get_prompts(
        [file]
    )
    assert allowed.env_class == name
    [named] = run_of(tmp_path, file, **{"environment.env_class": name}).get_prompts([file])
    assert named == allowed
    generator = f"{__name__}:generated()"
    run = run_of(tmp_path, generator)
    assert run.get_prompts([generator])[0].env_class == name
    run = run_of(tmp_path, [ROW])
    assert run.get_prompts(run.config.data.train_data) == [allowed]
    with pytest.raises(ValueError, match=r"rows_may_name_code=False: prompt 1:0 \(row 0 of got_fr"):
        run.get_prompts([*run.config.data.train_data, file])
    write([{**ROW, "env_class": "hub_env"}], ".jsonl")
    envs.register("hub_env", name)
    assert run.get_prompts([file])[0].env_class == "hub_env"
    assert not ran()  # until an environment is made


def generated():
    yield ROW


def test_a_switch_that_is_none(tmp_path):
    with pytest.raises(ValueError, match=r"environment\.rows_may_name_code='maybe'"):
        run_of(tmp_path, [ROW], **{"environment.rows_may_name_code": "maybe"})


@pytest.mark.parametrize(
    ("env_class", "columns", "chosen"),
    [
        ("sort_digits", {"observe": "os:system"}, {}),
        ("gsm8", {}, {}),  # there is none, which is said later
        ("pkg.module:Class", {}, "env_class"),
        ("jaxrl.envs.toys.sort_digits:SortDigitsEnv", {}, "env_class"),
        ("reasoning_gym:chain_sum", {}, {}),
        ("skyrl_gym:gsm8k", {}, {}),
        ("skyrl_gym:lcb", {}, "env_class"),
        ("gymnasium:FrozenLake-v1", {"make": '{"is_slippery": false}'}, {}),
        ("gymnasium:FrozenLake-v1", {"observe": "os:system"}, {"observe": "os:system"}),
        ("gymnasium:FrozenLake-v1", {"observe": None}, {}),
        ("gymnasium:pkg.envs:Mine-v0", {}, "env_class"),
        ("gymnasium:GymV26Environment-v0", {"make": '{"env_id": "pkg:Mine-v0"}'}, "env_class"),
        ("openenv:http://127.0.0.1:8000", {}, "env_class"),
        ("verifiers:gsm8k", {"env_args": "{}"}, "env_class"),
    ],
)
def test_what_of_a_row_chooses_code_or_a_server(env_class, columns, chosen):
    if chosen == "env_class":
        chosen = {"env_class": env_class}
    assert envs.code_of(env_class, columns, "") == chosen
    others = {column: value for column, value in chosen.items() if column != "env_class"}
    assert envs.code_of(env_class, columns, env_class) == others  # the config names it
    row = prompt(0, env_class, **columns)
    if "observe" not in chosen:  # the config's own environment
        refuse_code([row], env_class)
    if chosen:
        with pytest.raises(ConfigError, match=f"prompt 0:0 has {next(iter(chosen))}="):
            refuse_code([row], "gsm8k")


def test_the_judge_of_an_environment_of_the_config_is_not_the_rows_to_choose():
    args = '{"judge_base_url": "http://evil"}'
    with pytest.raises(ConfigError, match="has env_args='{\"judge_base_url"):
        refuse_code([prompt(0, "verifiers:gsm8k", env_args=args)], "verifiers:gsm8k")
