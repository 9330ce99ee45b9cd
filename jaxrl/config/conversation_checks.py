"""Checks of conversations: lengths, turns, a row per turn, and what these exclude."""

import importlib.util
import math
from dataclasses import asdict
from typing import Any

from jaxrl.config.environment import SkyRLGymConfig
from jaxrl.config.errors import fail
from jaxrl.config.objective_requirements import estimator_name, estimator_row
from jaxrl.config.train_config import TrainConfig
from jaxrl.functions import called_name, import_call
from jaxrl.registry import accepted_keywords
from jaxrl.registry.contracts import REWARD_KEYWORDS, check_reward_signature

_EMPTY_TURN = dict.fromkeys(REWARD_KEYWORDS) | {"action": "", "tokens": [], "reward": 0.0}


def check_conversations(config: TrainConfig) -> None:
    """Refuse conversations that cannot be held or trained on.

    Raises:
        ValueError: names the field, the value and the fix.
    """
    _check_lengths(config)
    _check_turns(config)
    _check_environments(config)
    _check_reward_terms(config)
    for group in ("sampling_params", "eval_sampling_params"):
        params = getattr(config.generator, group)
        if params is not None and "" in (params.stop or ()):
            fail(f"generator.{group}.stop", params.stop, "would end at once; remove the ''")


def _check_lengths(config: TrainConfig) -> None:
    generator, prompt_length = config.generator, config.trainer.max_prompt_length
    field, length = "generator.max_input_length", generator.max_input_length
    assert length is not None  # resolved
    if generator.max_turns == 1 and length != prompt_length:
        fix = f"with one turn it must equal trainer.max_prompt_length={prompt_length}"
        fail(field, length, f"{fix}; leave it None")
    if length < prompt_length:
        fix = f"shorter than a prompt (trainer.max_prompt_length={prompt_length})"
        fail(field, length, f"{fix}; set it to {prompt_length} or more")


def _check_turns(config: TrainConfig) -> None:
    generator = config.generator
    if generator.batched and generator.max_turns > 1:
        fix = f"with generator.max_turns={generator.max_turns}: turns depend on each other"
        fail("generator.batched", True, f"{fix}; set it to False")
    if generator.merge_stepwise_output and not generator.step_wise_trajectories:
        fix = "there is nothing to merge without generator.step_wise_trajectories; set it to False"
        fail("generator.merge_stepwise_output", True, fix)
    if generator.step_wise_trajectories:
        _check_step_wise(config)


def _check_step_wise(config: TrainConfig) -> None:
    """Refuse what a row per turn cannot have: one advantage is for all rows of a trajectory."""
    generator, algorithm = config.generator, config.trainer.algorithm
    estimator, reduction = estimator_name(algorithm), algorithm.loss_reduction
    row = estimator_row(algorithm)
    excluded: tuple[tuple[str, Any, bool, str], ...] = (
        ("generator.batched", True, generator.batched, "set it to False"),
        (
            "generator.use_conversation_multi_turn",
            False,
            not generator.use_conversation_multi_turn,
            "a turn is then no message of its own; set it to True",
        ),
        (
            "trainer.algorithm.advantage_estimator",
            estimator,
            row is not None and row.per_token,
            "it needs the rewards of a trajectory in one row; set 'grpo', 'rloo' or 'maxrl'",
        ),
        (
            "trainer.algorithm.loss_reduction",
            reduction,
            reduction == "token_mean_legacy",
            "its blocks are of whole trajectories; set 'token_mean'",
        ),
        (
            "trainer.algorithm.use_kl_in_reward",
            True,
            algorithm.use_kl_in_reward,
            "only the last turn's KL would count; set use_kl_loss",
        ),
        (
            "trainer.algorithm.advantage_batch_normalize",
            True,
            algorithm.advantage_batch_normalize,
            "not available for a row per turn; set it to False",
        ),
    )
    for field, value, holds, fix in excluded:
        if holds:
            fail(field, value, f"with generator.step_wise_trajectories=True: {fix}")


def _check_environments(config: TrainConfig) -> None:
    from jaxrl.envs import ENVS, load  # here: a config is made without environments

    gym, group = config.environment.skyrl_gym, "environment.skyrl_gym"
    if ":" not in (name := config.environment.env_class) and name not in ENVS:
        try:  # rows may name their own; one that nobody has is a slip of the pen
            load(name)
        except ValueError as error:
            fail("environment.env_class", name, str(error))
    workers, seconds = gym.max_env_workers, gym.env_timeout_seconds
    if workers < 0:
        fail(f"{group}.max_env_workers", workers, "must be 0 (inline) or more")
    if gym.ray_env_workers < 0:
        fail(f"{group}.ray_env_workers", gym.ray_env_workers, "must be 0 (threads) or more")
    if gym.ray_env_workers and not workers:
        fix = f"with {group}.ray_env_workers={gym.ray_env_workers}: no call could be made"
        fail(f"{group}.max_env_workers", workers, f"{fix}; set it to 1 or more")
    if gym.ray_env_workers and importlib.util.find_spec("ray") is None:
        fix = "needs Ray: pip install 'jaxrl[ray]', or set it to 0"
        fail(f"{group}.ray_env_workers", gym.ray_env_workers, fix)
    if seconds is not None and seconds <= 0:
        fail(f"{group}.env_timeout_seconds", seconds, "must be > 0, or None (no limit)")
    _check_servers(gym, group)
    _check_time_for_servers(config.environment.env_class, gym, group)
    sql = gym.text2sql
    positive = {f"sandbox.{name}": value for name, value in asdict(gym.sandbox).items()} | {
        "text2sql.query_seconds": sql.query_seconds,
        "text2sql.solution_seconds": sql.solution_seconds,
        "text2sql.max_rows": sql.max_rows,
        "search.topk": gym.search.topk,
        "search.timeout": gym.search.timeout,
        **{
            f"llm_as_a_judge.{name}": getattr(gym.llm_as_a_judge, name)
            for name in ("max_score", "timeout", "max_attempts", "max_requests")
        },
    }
    for name, value in positive.items():
        if isinstance(value, bool) or not value > 0:
            fail(f"{group}.{name}", value, "must be > 0")


def _check_servers(gym: SkyRLGymConfig, group: str) -> None:
    """Check the addresses of servers, and what the judge is asked."""
    from jaxrl.envs.tasks.llm_as_a_judge import check_prompt

    judge = gym.llm_as_a_judge
    addresses = {
        "search.search_url": gym.search.search_url,
        "llm_as_a_judge.base_url": judge.base_url,
    }
    for name, url in addresses.items():
        if url is not None and not url.startswith(("http://", "https://")):
            fail(f"{group}.{name}", url, "must begin with http:// or https://")
    if judge.prompt is not None:
        try:
            check_prompt(judge.prompt)
        except ValueError as error:
            fail(f"{group}.llm_as_a_judge.prompt", judge.prompt[:200], str(error))
    for name in ("model", "messages", "stream", "n"):
        if name in judge.sampling_params:
            field = f"{group}.llm_as_a_judge.sampling_params"
            fail(field, judge.sampling_params, f"must not hold '{name}'; remove it")


def _check_time_for_servers(env_class: str, gym: SkyRLGymConfig, group: str) -> None:
    """Refuse a server whose attempts may outlast the time limit of a call.

    The limit ends a conversation; a server that fails is told apart before it.
    """
    from jaxrl.envs.json_request import longest_seconds
    from jaxrl.envs.retrieval.retriever import ATTEMPTS

    judge, limit = gym.llm_as_a_judge, gym.env_timeout_seconds
    asked = {
        "search": (gym.search.timeout, ATTEMPTS) if gym.search.corpus is None else None,
        "llm_as_a_judge": (judge.timeout, judge.max_attempts),
    }.get(env_class)
    if asked is None or limit is None or (longest := longest_seconds(*asked)) <= limit:
        return
    timeout, attempts = asked
    fix = (
        f"{attempts} attempts and the waits between them take up to {longest:g} s, more than "
        f"{group}.env_timeout_seconds={limit:g}; lower it, or raise the limit"
    )
    fail(f"{group}.{env_class}.timeout", timeout, fix)


def _check_reward_terms(config: TrainConfig) -> None:
    """Check that weights are numbers, and functions exist and take what they will get."""
    environment, names = config.environment, set()
    if not 0 <= environment.rejudge_fraction <= 1:
        fail("environment.rejudge_fraction", environment.rejudge_fraction, "must be in [0, 1]")
    for name, weight in environment.reward_weights.items():
        if isinstance(weight, bool) or not math.isfinite(weight):
            fail(f"environment.reward_weights[{name!r}]", weight, "must be a finite number")
    field = "environment.reward_functions"
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
    label = f"reward function '{path}'"
    func = import_call(path, "reward function")
    for name, value in getattr(func, "keywords", {}).items():
        if name in REWARD_KEYWORDS:  # a turn's own would take its place without a word
            raise ValueError(f"{label}: {name}={value!r} is supplied by every turn; leave it out")
    check_reward_signature(label, func)
    if path.startswith("jaxrl.envs.shaping:"):  # pure: an empty turn shows bad parameters
        func(**accepted_keywords(func, _EMPTY_TURN))
