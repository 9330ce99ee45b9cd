"""Config of the environments that score the rollouts."""

import importlib.util
import math
from dataclasses import dataclass, field
from typing import Annotated, Any

from jaxrl.config import given
from jaxrl.config.constraints import (
    Constraint,
    between,
    must,
    not_negative,
    positive,
    positive_or,
    variable,
)
from jaxrl.config.dataclass_config import BaseConfig
from jaxrl.config.status import implemented, new
from jaxrl.config_error import fail
from jaxrl.functions import called_name, import_call

_NEW_OF_JUDGE = new(only_with="llm_as_a_judge")
_ADDRESS = "must begin with http:// or https://"


def _is_address(url: str | None) -> bool:
    return url is None or url.startswith(("http://", "https://"))


@Constraint
def _check_prompt(field: str, prompt: str | None) -> None:
    if prompt is None:
        return
    from jaxrl.envs.tasks.llm_as_a_judge import check_prompt  # here: as in `check_environment`

    try:
        check_prompt(prompt)
    except ValueError as error:
        fail(field, prompt[:200], str(error))


@Constraint
def _check_request(field: str, sampling_params: dict[str, Any]) -> None:
    for name in ("model", "messages", "stream", "n"):
        if name in sampling_params:
            fail(field, sampling_params, f"must not hold '{name}'; remove it")


@Constraint
def _check_weights(field: str, weights: dict[str, float]) -> None:
    for name, weight in weights.items():
        if isinstance(weight, bool) or not math.isfinite(weight):
            fail(f"{field}[{name!r}]", weight, "must be a finite number")


@dataclass
class Text2SQLEnvConfig(BaseConfig):
    """Hold the settings of the environment text2sql."""

    db_path: str = "/home/ray/default/sql_data"
    """Folder of the SQLite databases, laid out as SkyRL's downloads."""
    query_seconds: Annotated[float, positive, new(only_with="text2sql")] = 5.0
    """Until a query of the conversation is stopped."""
    solution_seconds: Annotated[float, positive, new(only_with="text2sql")] = 30.0
    """Until the query of the solution, and the right one, are stopped."""
    max_rows: Annotated[int, positive, new(only_with="text2sql")] = 100000
    """Rows of a result that are read; one that has more is not compared."""


@dataclass
class GSM8kLLMJudgeEnvConfig(BaseConfig):
    """Hold the settings of the environment llm_as_a_judge: a language model gives the reward."""

    model: str = "gpt-4o-mini"
    """Name of the judge."""
    base_url: Annotated[str | None, must(_is_address, _ADDRESS)] = None
    """Its OpenAI-compatible endpoint up to "/v1"; None = https://api.openai.com/v1."""
    api_key_env: Annotated[str, variable, _NEW_OF_JUDGE] = "OPENAI_API_KEY"
    """Variable of the environment that holds the key; needed where base_url is None."""
    prompt: Annotated[str | None, _check_prompt, _NEW_OF_JUDGE] = None
    """What the judge is asked, with {question}, {ground_truth} and {response}, to end with
    "### Final Score: <number>"; None = whether a GSM8K answer is right. A row's column judge_prompt
    holds instead."""
    max_score: Annotated[float, positive, _NEW_OF_JUDGE] = 1.0
    """Highest score, which earns the reward 1; 0 earns 0."""
    sampling_params: Annotated[dict[str, Any], _check_request, _NEW_OF_JUDGE] = field(
        default_factory=lambda: {"temperature": 0.0}
    )
    """More fields of the request; {} for judges that refuse a temperature."""
    timeout: Annotated[float, positive, _NEW_OF_JUDGE] = 60.0
    """Seconds to wait for one answer."""
    max_attempts: Annotated[int, positive, _NEW_OF_JUDGE] = 4
    """Requests for one score, where the judge is unreachable, overloaded, or gives none."""
    max_requests: Annotated[int, positive, _NEW_OF_JUDGE] = 32
    """Requests at a time in a process."""


@dataclass
class SearchEnvConfig(BaseConfig):
    """Hold the settings of the environment search: questions with a retrieval tool."""

    log_requests: bool = False
    """Log every request to the retriever."""
    search_url: Annotated[str, must(_is_address, _ADDRESS)] = "http://127.0.0.1:8000/retrieve"
    """Address of the retriever."""
    api_key_env: Annotated[str | None, variable, new(only_with="search")] = None
    """Variable of the environment that holds its bearer token; None = it wants none."""
    topk: Annotated[int, positive] = 3
    """Documents per query."""
    timeout: Annotated[int, positive] = 30
    """Seconds to wait for the retriever, at each of 5 attempts."""
    corpus: Annotated[str | None, new(only_with="search")] = None
    """Folder of .txt, .md and .jsonl files, or a .parquet or .jsonl file with a column contents,
    searched by BM25 in the environment's process; None = ask search_url."""


@dataclass
class SandboxConfig(BaseConfig):
    """Hold what a program of the environments python_code and lcb may use in its sandbox."""

    seconds: Annotated[float, positive] = 10.0
    """Until it is killed, by the clock; lcb gives a test 6 s at most."""
    cpu_seconds: Annotated[float, positive] = 10.0
    """Of all its processes together."""
    memory_mb: Annotated[int, positive] = 1024
    """Address space of a process, and memory of all of them together with their files."""
    disk_mb: Annotated[int, positive] = 64
    """All files together; they lie in memory and count in memory_mb."""
    files: Annotated[int, positive] = 1024
    """Files and folders at a time."""
    processes: Annotated[int, positive] = 32
    """Processes and threads at a time."""
    output_bytes: Annotated[int, positive] = 1048576
    """Of stdout and of stderr each; more is cut and the program killed."""


@dataclass
class SkyRLGymConfig(BaseConfig):
    """Hold the settings by environment."""

    max_env_workers: Annotated[int, not_negative] = 32
    """Calls of environments and reward functions at a time, in threads; 0 = one after the other,
    without a time limit. Built-in environments of microseconds need no thread."""
    ray_env_workers: Annotated[int, not_negative, new()] = 0
    """Ray actors, over all nodes, in which environments live; 0 = in threads of the trainer's
    process. `max_env_workers` is then the number of calls at a time in all of them."""
    env_timeout_seconds: Annotated[float | None, positive_or(None, "no limit"), new()] = 300.0
    """Seconds that one call of an environment may take; None = any."""
    text2sql: Annotated[Text2SQLEnvConfig, implemented(only_with="text2sql")] = field(
        default_factory=Text2SQLEnvConfig
    )
    """Environment text2sql."""
    llm_as_a_judge: Annotated[GSM8kLLMJudgeEnvConfig, implemented(only_with="llm_as_a_judge")] = (
        field(default_factory=GSM8kLLMJudgeEnvConfig)
    )
    """Environment with a language model as the judge."""
    sandbox: Annotated[SandboxConfig, new(only_with="python_code or lcb")] = field(
        default_factory=SandboxConfig
    )
    """The sandbox of the environments python_code and lcb."""
    search: Annotated[SearchEnvConfig, implemented(only_with="search")] = field(
        default_factory=SearchEnvConfig
    )
    """Environment search."""


@dataclass
class EnvironmentConfig(BaseConfig):
    """Describe which environment scores a prompt."""

    env_class: Annotated[str, given.function, implemented('also "my_pkg.my_module:MyEnv"')] = (
        "gsm8k"
    )
    """Environment of prompts that name none: a known name or "my_pkg.my_module:MyEnv"."""
    rows_may_name_code: Annotated[bool, new()] = False
    """Rows of files may choose code and servers: an env_class that is "my_pkg.my_module:MyEnv" or
    an address, and the columns that are as much. false = environments that are built in,
    registered, or env_class above. Rows that a script or a generator makes always may."""
    reward_weights: Annotated[dict[str, float], _check_weights, new()] = field(default_factory=dict)
    """Weights of reward terms by name, e.g. {"correct": 1.0, "format": 0.1}: the reward is the
    weighted sum. A reward that an environment gives without a name is the term "environment".
    Empty = every term counts once."""
    reward_functions: Annotated[list[str], given.functions, new()] = field(default_factory=list)
    """Functions that judge every turn beside the environment, "my_pkg.my_module:my_reward", or with
    arguments "my_pkg.my_module:my_reward(limit=512)"; a number, or one per token, is the term of
    the function's name. jaxrl.envs.shaping has length, format and repetition."""
    rejudge_fraction: Annotated[float, between("[0, 1]", "0 is none"), new()] = 0.01
    """Share of trajectories that a fresh environment and the reward functions judge a second time,
    to find rewards that are not deterministic; 0 = none."""
    skyrl_gym: SkyRLGymConfig = field(default_factory=SkyRLGymConfig)
    """Settings by environment."""


def check_environment(environment: EnvironmentConfig) -> None:
    """Refuse an environment that is not there or cannot be called, and rewards that are not.

    Raises:
        ValueError: names the field, the value and the fix.
    """
    from jaxrl.envs import ENVS, load  # here: a config is made without environments

    gym, group = environment.skyrl_gym, "environment.skyrl_gym"
    if ":" not in (name := environment.env_class) and name not in ENVS:
        try:  # rows may name their own; one that nobody has is a slip of the pen
            load(name)
        except ValueError as error:
            fail("environment.env_class", name, str(error))
    if gym.ray_env_workers and not gym.max_env_workers:
        fix = f"with {group}.ray_env_workers={gym.ray_env_workers}: no call could be made"
        fail(f"{group}.max_env_workers", gym.max_env_workers, f"{fix}; set it to 1 or more")
    if gym.ray_env_workers and importlib.util.find_spec("ray") is None:
        fix = "needs Ray: pip install 'jaxrl[ray]', or set it to 0"
        fail(f"{group}.ray_env_workers", gym.ray_env_workers, fix)
    _check_time_for_servers(environment.env_class, gym)
    _check_reward_functions(environment)


def _check_time_for_servers(env_class: str, gym: SkyRLGymConfig) -> None:
    """Refuse a server whose attempts may outlast the time limit of a call.

    The limit ends a conversation; a server that fails is told apart before it.
    """
    from jaxrl.envs.json_request import longest_seconds
    from jaxrl.envs.retrieval.retriever import ATTEMPTS

    if env_class == "search" and gym.search.corpus is None:
        timeout, attempts = gym.search.timeout, ATTEMPTS
    elif env_class == "llm_as_a_judge":
        timeout, attempts = gym.llm_as_a_judge.timeout, gym.llm_as_a_judge.max_attempts
    else:
        return
    limit, longest = gym.env_timeout_seconds, longest_seconds(timeout, attempts)
    if limit is not None and longest > limit:
        fix = (
            f"{attempts} attempts and the waits between them take up to {longest:g} s, more than "
            f"environment.skyrl_gym.env_timeout_seconds={limit:g}; lower it, or raise the limit"
        )
        fail(f"environment.skyrl_gym.{env_class}.timeout", timeout, fix)


def _check_reward_functions(environment: EnvironmentConfig) -> None:
    """Check that functions exist, take what they will get, and have names of their own."""
    field, names = "environment.reward_functions", set()
    if environment.env_class == "single_turn" and not environment.reward_functions:
        fail("environment.env_class", "single_turn", f"has no reward of its own; set {field}")
    for path in environment.reward_functions:
        try:
            _check_reward_function(path)
        except (ValueError, TypeError) as error:  # TypeError: of cosine_length(max_length='a')
            fail(field, path, str(error))
        name = called_name(path)
        if name in names:
            fix = (
                f"two functions are named '{name}', and so would their terms be; write a function "
                f"of your own and another name that calls {path.partition('(')[0]} for one of them"
            )
            fail(field, environment.reward_functions, fix)
        names.add(name)


def _check_reward_function(path: str) -> None:
    from jaxrl.registry.contracts import (  # here: as in `check_environment`
        REWARD_KEYWORDS,
        accepted_keywords,
        check_reward_signature,
    )

    label = f"reward function '{path}'"
    func = import_call(path, "reward function")
    for name, value in getattr(func, "keywords", {}).items():
        if name in REWARD_KEYWORDS:  # a turn's own would take its place without a word
            raise ValueError(f"{label}: {name}={value!r} is supplied by every turn; leave it out")
    check_reward_signature(label, func)
    if path.startswith("jaxrl.envs.shaping:"):  # pure: an empty turn shows bad parameters
        empty_turn = dict.fromkeys(REWARD_KEYWORDS) | {"action": "", "tokens": [], "reward": 0.0}
        func(**accepted_keywords(func, empty_turn))
