"""Train from Python: a model, rows and functions as objects, and what follows from them."""

import difflib
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxrl import config as cfg
from jaxrl.config.dataclass_config import flatten
from jaxrl.config.given import Rows as GivenRows
from jaxrl.config.recipe import converted, installed_recipe
from jaxrl.data.prompts import load_prompts, read_rows
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.envs import ADAPTERS, load
from jaxrl.functions import called_name, import_call
from jaxrl.hub import check_folder
from jaxrl.models.hf import max_positions
from jaxrl.records.callbacks import TrainingCallback
from jaxrl.records.resume_identity import changed_fields
from jaxrl.registry import AdvantageEstimatorRegistry, PolicyLossRegistry
from jaxrl.registry.pickling import fingerprint, source_hash
from jaxrl.train import BasePPOExp, for_scripts
from jaxrl.trainer import Trainer

Rows = Iterable[Mapping[str, Any] | str]
Function = Callable[..., Any] | str

RECIPE = "quickstart"  # of a model that nobody names
TOKENS = 16  # of its longest response
BATCH = 32  # prompts of a step
SAID = 64  # tokens, at least, that an environment may say between two turns
# What others call it, where the nearest name is something else.
_OTHER_NAMES = {"steps": "max_training_steps", "max_steps": "max_training_steps"}
_LISTS = "data.train_data", "data.val_data", "environment.reward_functions"


@for_scripts
def fit(
    model: str | None = None,
    data: Rows | str | None = None,
    reward: Function | Iterable[Function] | None = None,
    *,
    eval_data: Rows | str | None = None,
    environment: type | str | None = None,
    loss: Function | None = None,
    advantages: Function | None = None,
    config: Any = None,
    callbacks: Iterable[TrainingCallback] = (),
    **fields: Any,
) -> Trainer:
    """Train a model by reinforcement learning; return its trainer.

        trainer = jaxrl.fit(data=[{"prompt": "21", "answer": "12"}, ...], reward=backwards)
        print(trainer.answer("47"))

    Where no `config` is given, the batch fits the rows, and the run has a name of its own: the same
    call goes on from the last checkpoint of its run; with another function, other rows or other
    fields it is another run. Without any argument it is the quickstart.

    Args:
        model: a folder, or a model of the Hugging Face hub; None = the quickstart's, which has 126
            thousand random weights and knows lower case, digits and a few signs.
        data: rows, dicts with a `prompt` and whatever the reward asks for; or files.
        reward: a function of what it names of `action` (the text of a response), `extras` (the rest
            of the row) and the others of docs/environments.md; or several.
        eval_data: rows to evaluate on; None = no evaluation.
        environment: a class or a name, of rows that name no `env_class`; None = one response, which
            the reward judges.
        loss, advantages: a function or a name; None = PPO's clipped loss, GRPO's advantages.
        config: what to start from: the file of a recipe, or a config.
        callbacks: are told of the events of the run.
        **fields: of docs/configuration.md, by their last names (`seed=1`) or their whole names
            (`**{"trainer.seed": 1}`). Of a name that policy, reference and critic share it is the
            policy's.

    Raises:
        ValueError: names what is wrong, its value and the fix.
    """
    if not isinstance(model, str | None):
        raise ValueError(
            f"model is a {type(model).__name__}, and must be a folder or a name of the hub: rows "
            "are data=rows, functions reward=function"
        )
    named = model, data, reward, eval_data, environment, loss, advantages, config
    if not callbacks and not fields and all(x is None for x in named):
        config = cfg.load_config_file(installed_recipe(RECIPE))
    start = _start(config, tiny=model is None)
    given = {_key(name, start): value for name, value in fields.items()}
    parts = {
        "data.train_data": data,
        "data.val_data": eval_data,
        "environment.reward_functions": reward,
        "environment.env_class": environment,
        "trainer.algorithm.policy_loss_type": loss,
        "trainer.algorithm.advantage_estimator": advantages,
        "trainer.policy.model.path": model,
        "trainer.policy.model.random_init": None if model is None else False,
    }
    for key, value in parts.items():
        if value is not None:
            alone = isinstance(value, str) or callable(value)
            given.setdefault(key, [value] if alone and key in _LISTS else value)
    if reward is not None and environment is None and config is None:
        given.setdefault("environment.env_class", "single_turn")
    result = cfg.apply_overrides(start, given)
    if config is None:
        if data is None or not result.data.train_data:
            raise ValueError(
                f"data={data}: give rows, [{{'prompt': ...}}, ...], or files of them; "
                "jaxrl.fit() without any argument is the quickstart"
            )
        if "trainer.run_name" not in given:
            result.trainer.run_name = f"fit-{_judge(result)}{_identity(result)[:8]}"
        chosen = _chosen(result, given, tiny=model is None)
        result = cfg.apply_overrides(result, {k: v for k, v in chosen.items() if k not in given})

    class Experiment(BasePPOExp):
        def get_callbacks(self) -> list[TrainingCallback]:
            return [*super().get_callbacks(), *callbacks]

    return Experiment(result).run()


def _start(config: Any, tiny: bool) -> cfg.TrainConfig:
    """Return the config that the arguments change."""
    if isinstance(config, str):
        return cfg.load_config_file(config)
    if config is not None:
        return converted(config)
    if not tiny:
        return cfg.TrainConfig(data=cfg.DataConfig(val_data=[]))
    start = cfg.load_config_file(installed_recipe(RECIPE))
    start.data.val_data = []
    # the recipe's reward is per token, and so are its advantages; they outweigh a larger bonus
    algorithm = start.trainer.algorithm
    algorithm.advantage_estimator, algorithm.gamma, algorithm.entropy_loss_coef = "grpo", 1.0, 0.03
    return start


def _key(name: str, config: cfg.TrainConfig) -> str:
    """Return the dotted name of the field, or group of fields, whose last name this is."""
    if "." in name:
        return name
    leaves = [key.split(".") for key in flatten(config)]
    keys = {".".join(key[:i]): key[i - 1] for key in leaves for i in range(1, len(key) + 1)}
    found = [key for key, last in keys.items() if last == name]
    if len(found) > 1:  # of the policy, unless only others have it
        others = "trainer.ref.", "trainer.critic."
        found = [key for key in found if not key.startswith(others)] or found
    if not found:
        other = _OTHER_NAMES.get(name)
        near = [other] if other else difflib.get_close_matches(name, keys.values(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ", see docs/configuration.md"
        raise ValueError(f"jaxrl.fit has no argument {name!r}, and no field is named so{hint}")
    if len(found) > 1:
        raise ValueError(
            f"{name} is the name of {' and of '.join(found)}: write **{{'{found[0]}': ...}}"
        )
    return found[0]


def _judge(config: cfg.TrainConfig) -> str:
    """Return by what a person tells runs apart: the first reward's name, or the environment's."""
    paths = [*config.environment.reward_functions, config.environment.env_class]
    name = re.sub(r"\W+", "-", called_name(paths[0])).strip("-")
    return f"{name}-" if name else ""


def _identity(config: cfg.TrainConfig) -> str:
    """Return the SHA-256 of what must be the same for a run to go on: fields, functions, rows."""
    usual, values = (cfg.get_config_as_dict(x) for x in (cfg.TrainConfig(), config))
    name, paths = config.environment.env_class, config.environment.reward_functions
    judges = [import_call(path, "reward function") for path in paths]
    if ":" in name and name.partition(":")[0] not in ADAPTERS:
        judges.append(load(name))
    algorithm, model = config.trainer.algorithm, cfg.get_config_as_dict(config.trainer.policy.model)
    del model["lora"]["merge_exports"]  # says what is written of a run, not what the run is
    loss = PolicyLossRegistry.resolve(algorithm.policy_loss_type)
    estimator = AdvantageEstimatorRegistry.resolve(algorithm.advantage_estimator)
    # rows that were given are named by what they hold
    sources = [source for source in config.data.train_data if not isinstance(source, GivenRows)]
    parts = [
        changed_fields(usual, values),
        model,
        [_content(function) for function in (loss, estimator, *judges)],
        [fingerprint(list(read_rows(source))) for source in sources],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _content(function: Callable[..., Any]) -> str:
    """Return the SHA-256 of what a function computes; of its source if it captures a lock, say."""
    try:
        return fingerprint(function)
    except Exception:  # of whatever it captures
        return source_hash(function)


def _chosen(config: cfg.TrainConfig, given: Mapping[str, Any], tiny: bool) -> dict[str, Any]:
    """Return what the data and the model say of fields that nobody has set."""
    model, template = config.trainer.policy.model.path, config.generator.chat_template
    assert model is not None
    check_folder("trainer.policy.model.path", model)
    own = template.name_or_path if template.source == "file" else None
    prompts, _ = load_prompts(
        config.data.train_data,
        load_tokenizer(model, own),
        max_prompt_length=sys.maxsize,
        default_env_class=given.get("environment.env_class", ""),
        chat_template_kwargs=config.generator.chat_template_kwargs,
    )
    if not all(prompt.env_class for prompt in prompts):
        raise ValueError(
            "reward=None: nothing judges the responses; give a function, or environment=..., or "
            "name an env_class in every row"
        )
    batch = given.get("trainer.train_batch_size", min(BATCH, len(prompts)))
    steps = config.trainer.max_training_steps  # given, or the recipe's
    if "trainer.epochs" in given and "trainer.max_training_steps" not in given:
        steps = None
    longest = max(len(prompt.tokens) for prompt in prompts)
    response = "generator.sampling_params.max_generate_length"
    own_length = response in given or not tiny
    tokens = config.generator.sampling_params.max_generate_length if own_length else TOKENS
    chosen = {
        "trainer.train_batch_size": batch,
        "trainer.policy_mini_batch_size": batch // (1 if batch % 2 else 2),  # two updates
        "trainer.max_prompt_length": longest,
        response: tokens,
        "trainer.max_training_steps": steps,
        "trainer.epochs": math.ceil((steps or 1) / max(len(prompts) // batch, 1)),
    }
    if (turns := config.generator.max_turns) > 1:
        # the last turn's input holds the responses before it, and what was said to them
        inputs = longest + (turns - 1) * (tokens + max(tokens, SAID))
        if (positions := max_positions(model)) is not None:
            inputs = max(min(inputs, positions - tokens), longest)
        chosen["generator.max_input_length"] = inputs
    return chosen
