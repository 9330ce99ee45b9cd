"""Config of the environments that score the rollouts."""

from dataclasses import dataclass, field
from typing import Any

from jaxrl.config.dataclass_config import BaseConfig


@dataclass
class Text2SQLEnvConfig(BaseConfig):
    """Hold the settings of the environment text2sql."""

    db_path: str = "/home/ray/default/sql_data"
    """Folder of the SQLite databases, laid out as SkyRL's downloads."""
    query_seconds: float = 5.0
    """Until a query of the conversation is stopped."""
    solution_seconds: float = 30.0
    """Until the query of the solution, and the right one, are stopped."""
    max_rows: int = 100000
    """Rows of a result that are read; one that has more is not compared."""


@dataclass
class GSM8kLLMJudgeEnvConfig(BaseConfig):
    """Hold the settings of the environment llm_as_a_judge: a language model gives the reward."""

    model: str = "gpt-4o-mini"
    """Name of the judge."""
    base_url: str | None = None
    """Its OpenAI-compatible endpoint up to "/v1"; None = https://api.openai.com/v1."""
    api_key_env: str = "OPENAI_API_KEY"
    """Variable of the environment that holds the key; needed where base_url is None."""
    prompt: str | None = None
    """What the judge is asked, with {question}, {ground_truth} and {response}, to end with
    "### Final Score: <number>"; None = whether a GSM8K answer is right. A row's column judge_prompt
    holds instead."""
    max_score: float = 1.0
    """Highest score, which earns the reward 1; 0 earns 0."""
    sampling_params: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    """More fields of the request; {} for judges that refuse a temperature."""
    timeout: float = 60.0
    """Seconds to wait for one answer."""
    max_attempts: int = 4
    """Requests for one score, where the judge is unreachable, overloaded, or gives none."""
    max_requests: int = 32
    """Requests at a time in a process."""


@dataclass
class SearchEnvConfig(BaseConfig):
    """Hold the settings of the environment search: questions with a retrieval tool."""

    log_requests: bool = False
    """Log every request to the retriever."""
    search_url: str = "http://127.0.0.1:8000/retrieve"
    """Address of the retriever."""
    topk: int = 3
    """Documents per query."""
    timeout: int = 30
    """Seconds to wait for the retriever, at each of 5 attempts."""
    corpus: str | None = None
    """Folder of .txt, .md and .jsonl files, or a .parquet or .jsonl file with a column contents,
    searched by BM25 in the environment's process; None = ask search_url."""


@dataclass
class SandboxConfig(BaseConfig):
    """Hold what a program of the environments python_code and lcb may use in its sandbox."""

    seconds: float = 10.0
    """Until it is killed, by the clock; lcb gives a test 6 s at most."""
    cpu_seconds: float = 10.0
    """Of all its processes together."""
    memory_mb: int = 1024
    """Address space of a process, and memory of all of them together with their files."""
    disk_mb: int = 64
    """All files together; they lie in memory and count in memory_mb."""
    files: int = 1024
    """Files and folders at a time."""
    processes: int = 32
    """Processes and threads at a time."""
    output_bytes: int = 1048576
    """Of stdout and of stderr each; more is cut and the program killed."""


@dataclass
class SkyRLGymConfig(BaseConfig):
    """Hold the settings by environment."""

    max_env_workers: int = 32
    """Environment calls at a time, in threads; 0 = inline."""
    ray_env_workers: int = 0
    """Ray actors, over all nodes, in which environments live; 0 = in threads of the trainer's
    process. `max_env_workers` is then the number of calls at a time in all of them."""
    env_timeout_seconds: float | None = 300.0
    """Seconds that one call of an environment may take; None = any."""
    text2sql: Text2SQLEnvConfig = field(default_factory=Text2SQLEnvConfig)
    """Environment text2sql."""
    llm_as_a_judge: GSM8kLLMJudgeEnvConfig = field(default_factory=GSM8kLLMJudgeEnvConfig)
    """Environment with a language model as the judge."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """The sandbox of the environments python_code and lcb."""
    search: SearchEnvConfig = field(default_factory=SearchEnvConfig)
    """Environment search."""


@dataclass
class EnvironmentConfig(BaseConfig):
    """Describe which environment scores a prompt."""

    env_class: str = "gsm8k"
    """Environment of prompts that name none: a known name or "my_pkg.my_module:MyEnv"."""
    reward_weights: dict[str, float] = field(default_factory=dict)
    """Weights of reward terms by name, e.g. {"correct": 1.0, "format": 0.1}: the reward is the
    weighted sum. A reward that an environment gives without a name is the term "environment".
    Empty = every term counts once."""
    reward_functions: list[str] = field(default_factory=list)
    """Functions that judge every turn beside the environment, "my_pkg.my_module:my_reward", or with
    arguments "my_pkg.my_module:my_reward(limit=512)"; a number, or one per token, is the term of
    the function's name. jaxrl.envs.shaping has length, format and repetition."""
    rejudge_fraction: float = 0.01
    """Share of trajectories that a fresh environment and the reward functions judge a second time,
    to find rewards that are not deterministic; 0 = none."""
    skyrl_gym: SkyRLGymConfig = field(default_factory=SkyRLGymConfig)
    """Settings by environment."""
