"""What a policy loss or an estimator may ask for and must return.

Losses and estimators are written by users too, so every error names the function and the part of it
that is wrong: a parameter, the returned form, a shape.
"""

import contextlib
import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp

from jaxrl.config_error import fail
from jaxrl.functions import Function, place_of
from jaxrl.types import Array, TrainBatch

Shape = tuple[int, ...]

# What a policy loss is called with: these by position, the rest by keyword if it names them.
LOSS_ARGUMENTS = ("log_probs", "old_log_probs", "advantages", "config")
BATCH_FIELDS = (
    *("loss_mask", "rollout_log_probs", "ref_log_probs"),
    *("rewards", "policy_versions", "token_versions", "context_versions", "staleness", "row_ids"),
    "demonstrated",
)
LOSS_KEYWORDS = (*BATCH_FIELDS, "group_ids", "entropy", "key", "rollout_logprobs")
# What an estimator is called with, all by keyword; the settings are hyperparameters of its config.
ESTIMATOR_DATA = (
    *("token_level_rewards", "response_mask", "index", "loss_mask", "values", "config"),
    *("valid_mask", "old_log_probs", "ref_log_probs", "reward_terms", "reward_weights"),
    *("turn_rewards", "turn_states", "trajectory", "greedy_rewards"),
)
ESTIMATOR_SETTINGS = ("grpo_norm_by_std", "gamma", "lambd")
# What is wrong with a function that keeps something between calls.
IMPURE = (
    "it is compiled once, with what it finds then. A loss or an estimator is a pure function; what "
    "is kept between steps is declared: docs/custom_algorithms.md#memory-between-steps"
)
# What a reward function is called with, after every turn, all by keyword: the text, its tokens'
# texts, whether an end-of-sequence token ended it, the number of the turn (from 1), whether it is
# the last one, the messages of the prompt, the other columns of its row, and what the environment
# gave for the turn: a number, one per token, or these by name.
REWARD_KEYWORDS = ("action", "tokens", "stopped", "turn", "done", "prompt", "extras", "reward")


# What an array of the two contracts must be: name -> "float [B, T]", as `TrainBatch` annotates it.
ARRAYS = {
    name: part.__metadata__[0]
    for name, annotation in get_type_hints(TrainBatch, include_extras=True).items()
    for part in (annotation, *get_args(annotation))  # itself, or before `| None`
    if hasattr(part, "__metadata__")
}
ARRAYS |= dict.fromkeys(("log_probs", "entropy", "token_level_rewards"), "float [B, T]")
ARRAYS |= {"group_ids": ARRAYS["index"], "reward_weights": "float [K]"}
ARRAYS |= dict.fromkeys(("turn_states", "trajectory"), ARRAYS["index"])


# What PyTorch calls otherwise: pattern of the error -> what to write.
_OF_TORCH = {
    r"(Tracer|ArrayImpl)\b.* has no attribute": (
        "what PyTorch has as a method is a function here: jnp.exp(x), jnp.maximum(x, 1), "
        "jnp.where(mask, a, b), jax.lax.stop_gradient(x)"
    ),
    r"argument '(dim|keepdim)'": "write axis= for dim=, keepdims= for keepdim=",
}


class ContractError(ValueError):
    """Say what a function of the user takes or returns that it must not."""


def asks_for(func: Callable, name: str) -> bool:
    """Return whether the signature of `func` names a parameter."""
    return name in inspect.signature(func).parameters


def check_loss_signature(label: str, func: Callable) -> None:
    """Refuse a policy loss whose parameters are not those of the contract.

    Required keyword-only parameters are left to `check_parameters`: a config may set them.

    Raises:
        ContractError: the first four parameters are others, or a further one is required that
            nobody supplies.
    """
    parameters = _parameters(func)
    names = [p.name for p in parameters if p.kind in _POSITIONAL]
    advice = f"the first four parameters must be {', '.join(LOSS_ARGUMENTS)}, in this order"
    for place, (name, expected) in enumerate(zip(names, LOSS_ARGUMENTS, strict=False), start=1):
        is_mask = name.endswith("mask")  # taken for the config it would fail where it is used
        if name != expected and (is_mask or name in (*LOSS_ARGUMENTS, *LOSS_KEYWORDS)):
            mask = "; a parameter named loss_mask gets the mask" * is_mask
            raise ContractError(f"{label}: parameter {place} is '{name}'; {advice}{mask}")
    if len(names) < len(LOSS_ARGUMENTS) and not _takes_rest(parameters):
        raise ContractError(f"{label} takes {names} by position; {advice}")
    _check_supplied(label, parameters[len(LOSS_ARGUMENTS) :], LOSS_KEYWORDS)


def check_estimator_signature(label: str, func: Callable) -> None:
    """Refuse an advantage estimator with a required parameter that nobody supplies.

    Required keyword-only parameters are left to `check_parameters`: a config may set them.

    Raises:
        ContractError: names the parameter; or it has a state and does not begin with `state,
            batch`, or the other way round.
    """
    parameters = _parameters(func)
    begins = [p.name for p in parameters[:2]] == ["state", "batch"]
    if begins != hasattr(func, "initial_state"):
        raise ContractError(
            f"{label}: an estimator with memory is written `@stateful(baseline=0.0)` (its first "
            "values; jaxrl.registry.stateful) over `def my_estimator(state, batch)`; it has "
            + ("no @stateful" if begins else "other first parameters than these two")
        )
    supplied = (*ESTIMATOR_DATA, *ESTIMATOR_SETTINGS)
    _check_supplied(label, parameters[2:] if begins else parameters, supplied)


def check_reward_signature(label: str, func: Callable) -> None:
    """Refuse a reward function with a required parameter that nobody supplies.

    Raises:
        ContractError: names the parameter.
    """
    required = [p for p in _parameters(func) if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    for p in required:
        if p.name not in REWARD_KEYWORDS:
            raise ContractError(
                f"{label}: nobody supplies its parameter '{p.name}'; give it a default, or a value "
                f"in the call: '...({p.name}=...)'"
            )
    _check_supplied(label, _parameters(func), REWARD_KEYWORDS)


def check_parameters(
    label: str, func: Callable, positional: Sequence[str], keywords: Mapping[str, Any]
) -> None:
    """Refuse a function that cannot be called with what it will get.

    Raises:
        ContractError: a required parameter is not offered, or too few are taken by position.
    """
    try:
        inspect.signature(func).bind(*positional, **keywords)
    except TypeError as error:
        arguments = [*positional, *(f"{name}=" for name in keywords)]
        raise ContractError(
            f"{label}: {error}. It is called with ({', '.join(arguments)}); give other parameters "
            "a default"
        ) from error


def accepted_keywords(func: Function, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of `offered` that the signature of `func` names; all with `**kwargs`."""
    parameters = inspect.signature(func).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(offered)
    names = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    return {k: v for k, v in offered.items() if k in names}


def check_hyperparameters(
    func: Function, settings: Mapping[str, Any], field: str, supplied: Collection[str] = ()
) -> None:
    """Check a `*_kwargs` config field against the keyword-only parameters of `func`.

    A function with `**kwargs` takes any name; with `**_` it says that it ignores what it gets.

    Args:
        supplied: names that the trainer gives; a setting must not take their place.

    Raises:
        ConfigError: a name of `supplied`, or one that `func` does not take as a keyword-only
            parameter.
    """
    label, parameters = getattr(func, "__name__", repr(func)), inspect.signature(func).parameters
    kinds = [p.kind for name, p in parameters.items() if not name.startswith("_")]
    keyword_only = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    by_position = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    hyperparameters = [name for name in keyword_only if name not in supplied]
    for name, value in settings.items():
        if name in supplied:
            fail(f"{field}.{name}", value, f"the trainer supplies '{name}'; remove it")
        if name not in hyperparameters and inspect.Parameter.VAR_KEYWORD not in kinds:
            if name in by_position and name not in ESTIMATOR_SETTINGS:
                remedy = f"'{name}' of '{label}' is not keyword-only: write *, before it"
                fail(f"{field}.{name}", value, remedy)
            near = difflib.get_close_matches(name, hyperparameters, n=1)
            only = f"only {hyperparameters}" if hyperparameters else "and none at all"
            hint = f"; did you mean '{near[0]}'?" if near else ""
            remedy = f"'{label}' takes no such parameter, {only}{hint}"
            fail(f"{field}.{name}", value, remedy)


@contextlib.contextmanager
def raised_by(label: str) -> Iterator[None]:
    """Name the function whose call is in the block, where it raises, and the user's line.

    Raises:
        ContractError: the block raised; says what.
    """
    try:
        yield
    except Exception as error:
        hint = ""
        if isinstance(error, jax.errors.JAXTypeError):
            hint = (
                ". It is traced by jax.jit: no Python if, float() or numpy on the values of "
                "arrays; jnp.where and jax.numpy"
            )
        reason = str(error).partition("\n")[0]
        torch = next((fix for habit, fix in _OF_TORCH.items() if re.search(habit, reason)), "")
        hint += f": {torch}" if torch else ""
        if place := place_of(error):
            hint += f" ({place})"
        raise ContractError(f"{label} raised {type(error).__name__}: {reason}{hint}") from error


def check_arrays(label: str, arrays: Mapping[str, Any]) -> None:
    """Refuse arrays of another shape or kind than the contract says, see `ARRAYS`.

    It runs where the call is traced: a compiled one checks nothing.

    Args:
        arrays: what the function gets, by name; None is not there. Rows and tokens are those of the
            first that has them.

    Raises:
        ContractError: names the array, with what it must be and what it is.
    """
    sizes: dict[str, int] = {}
    for name, array in arrays.items():
        if array is None or name not in ARRAYS:
            continue
        dims = [letter for letter in ARRAYS[name] if letter.isupper()]
        shape, dtype = jnp.shape(array), jnp.result_type(array)
        same = all(sizes.setdefault(dim, n) == n for dim, n in zip(dims, shape, strict=False))
        integers = ARRAYS[name].startswith("float") and not jnp.issubdtype(dtype, jnp.floating)
        if len(shape) != len(dims) or not same or integers:
            known = ", ".join(f"{dim}={n}" for dim, n in sizes.items())
            raise ContractError(
                f"{label}: {name} must be {ARRAYS[name]} with {known}, got {dtype} of shape {shape}"
            )


def loss_and_metrics(label: str, result: Any, shape: Shape) -> tuple[Array, dict[str, Array]]:
    """Return what a policy loss returned, checked; a plain second number is its clip ratio.

    Args:
        shape: [B, T].

    Raises:
        ContractError: not a pair, or a part of it has another form.
    """
    loss, metrics = _pair(label, result, "(loss, metrics)", "loss, {}")
    loss = _array(label, "loss", loss, {"one number": (), "the loss of each token": shape})
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ContractError(f"{label} returned a loss of {loss.dtype}; it must be floating point")
    metrics = metrics if isinstance(metrics, Mapping) else {"clip_ratio": metrics}
    forms = {"one number": (), "one for each token": shape}
    return loss, {
        name: _array(label, f"metric {name!r}", value, forms) for name, value in metrics.items()
    }


def state_and_pair(label: str, result: Any) -> tuple[Any, Any]:
    """Return the state and the pair (advantages, returns) of an estimator with memory.

    Raises:
        ValueError: not three values.
    """
    if not isinstance(result, tuple) or len(result) != 3:
        size = f" of {len(result)}" if isinstance(result, tuple) else ""
        raise ContractError(
            f"{label} must return (state, advantages, returns), got {type(result).__name__}{size}"
            + ": is a `return` missing?" * (result is None)
        )
    return result[0], result[1:]


def advantages_and_returns(label: str, result: Any, shape: Shape) -> tuple[Array, Array]:
    """Return what an advantage estimator returned, checked.

    Args:
        shape: [B, T].

    Raises:
        ContractError: not a pair of arrays [B, T].
    """
    advantages, returns = _pair(label, result, "(advantages, returns)", "advantages, advantages")
    form = {"a number for each token": shape}
    return _array(label, "advantages", advantages, form), _array(label, "returns", returns, form)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _parameters(func: Callable) -> list[inspect.Parameter]:
    """Return the parameters of the signature; *args where Python knows none."""
    try:
        return list(inspect.signature(func).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]


def _takes_rest(parameters: Sequence[inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _check_supplied(
    label: str, parameters: Sequence[inspect.Parameter], supplied: Sequence[str]
) -> None:
    """Refuse a required parameter that nobody supplies: all are supplied by keyword."""
    for p in parameters:
        by_name = p.name in supplied and p.kind is not p.POSITIONAL_ONLY
        if p.kind in _POSITIONAL and p.default is p.empty and not by_name:
            raise ContractError(
                f"{label}: nobody supplies its parameter '{p.name}'. Supplied by keyword are "
                f"{', '.join(supplied)}; make a hyperparameter of yours keyword-only (after `*`)"
            )


def _pair(label: str, result: Any, names: str, mended: str) -> tuple[Any, Any]:
    """Return the two values of a result; `mended` is what returns them in place of an array."""
    if isinstance(result, tuple) and len(result) == 2:
        return result
    if hasattr(result, "shape"):
        raise ContractError(f"{label} must return {names}, got one array: return {mended}")
    size = f" of {len(result)}" if isinstance(result, tuple) else ""
    hint = ": is a `return` missing?" if result is None else ""
    raise ContractError(f"{label} must return {names}, got {type(result).__name__}{size}{hint}")


def _array(label: str, what: str, value: Any, forms: Mapping[str, Shape]) -> Array:
    expected = " or ".join(f"{name} {shape}" for name, shape in forms.items())
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        got = type(value).__name__
        raise ContractError(
            f"{label} returned {what} of type {got}; expected {expected}"
        ) from error
    if array.shape not in forms.values():
        raise ContractError(f"{label} returned {what} of shape {array.shape}; expected {expected}")
    return array
