"""Memory between steps: declared with its first values, or hidden and refused.

An estimator, a callback and a trainer declare what they keep as `initial_state`, numbers and arrays
by name. All of it is `TrainState.algorithm_state`, so it is saved, resumed and replayed. What a
function keeps elsewhere, in a global list for instance, is lost: the function is compiled with what
was there when it was traced.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.functions import Function
from jaxrl.registry.contracts import IMPURE, ContractError
from jaxrl.registry.pickling import captured, fingerprint, is_jitted
from jaxrl.types import Array, FloatBT, IntB, MaskBT

ESTIMATOR = "advantage_estimator"  # name of what the estimator keeps


class EstimatorBatch(NamedTuple):
    """Hold what an estimator with memory is called with; see `jaxrl.advantages`.

    `values`, `old_log_probs`, `ref_log_probs` and the rewards by name are None where the step has
    none.
    """

    token_level_rewards: FloatBT
    response_mask: MaskBT
    index: IntB
    loss_mask: MaskBT
    valid_mask: Array | None
    values: FloatBT | None
    old_log_probs: FloatBT | None
    ref_log_probs: FloatBT | None
    config: Any
    gamma: float
    lambd: float
    grpo_norm_by_std: bool
    reward_terms: Array | None = None
    reward_weights: Array | None = None


def stateful(*misplaced: Any, **initial_state: Any) -> Callable[[Function], Function]:
    """Give the decorated advantage estimator a memory that begins with these values.

    `@stateful(baseline=0.0)` makes `(state, batch) -> (state, advantages, returns)` of it: `state`
    is a dict with these names, `batch` an `EstimatorBatch`.

    Raises:
        ContractError: no values, or one that is neither number nor array.
    """
    if misplaced or not initial_state:
        raise ContractError("@stateful needs the first values by name: @stateful(baseline=0.0)")
    as_arrays("@stateful", initial_state)

    def decorate(func: Function) -> Function:
        func.initial_state = initial_state  # type: ignore[attr-defined]
        return func

    return decorate


def initial_state_of(owner: Any) -> Mapping[str, Any]:
    """Return what an estimator, a callback or a trainer declares; {} where it keeps nothing."""
    return getattr(owner, "initial_state", {})


def first_algorithm_state(estimator: Function, owners: Sequence[Any]) -> dict[str, Any] | None:
    """Return `TrainState.algorithm_state` before the first step; None: nobody keeps anything.

    Args:
        owners: trainer and callbacks.

    Raises:
        ContractError: two declare one name, or a value is neither number nor array.
    """
    found: dict[str, Any] = {}
    if declared := initial_state_of(estimator):
        found[ESTIMATOR] = as_arrays("@stateful", declared)
    for owner in owners:
        label = f"{type(owner).__name__}.initial_state"
        for name, value in as_arrays(label, initial_state_of(owner)).items():
            if not isinstance(value, np.ndarray):
                raise ContractError(f"{label}['{name}'] must be a number or an array")
            if name in found:
                raise ContractError(
                    f"{label}['{name}']: another part of the run keeps that; rename"
                )
            found[name] = value
    return found or None


def as_arrays(label: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as numpy arrays of the dtypes that devices give them.

    Raises:
        ContractError: one is neither number nor array.
    """

    def as_array(path: Any, value: Any) -> np.ndarray:
        array = np.asarray(value)
        # files of a step hold what numpy itself has: not bfloat16, kind "V"
        if not jnp.issubdtype(array.dtype, jnp.number) or array.dtype.kind == "V":
            name = jax.tree_util.keystr(path)
            raise ContractError(
                f"{label}{name} is {value!r}; it must be a number or an array of them, "
                "of numpy's own types"
            )
        return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))

    def is_leaf(value: Any) -> bool:
        return not isinstance(value, dict)

    return jax.tree_util.tree_map_with_path(as_array, dict(values), is_leaf=is_leaf)


def described(state: Any) -> dict[str, str]:
    """Return shape and dtype of each array of a state, by its path: {"lr_scale": "float32[]"}."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): (
            f"{jnp.result_type(x)}[{','.join(map(str, jnp.shape(x)))}]"
        )
        for path, x in leaves
    }


def same_form(label: str, old: Any, new: Any) -> Any:
    """Return a new state as arrays, if it has the names, shapes and dtypes of the old one.

    Raises:
        ContractError: it has not.
    """
    if described(new) != described(old):
        raise ContractError(
            f"{label} gave the state {described(new)}; it began as {described(old)}: keep names, "
            "shapes and dtypes"
        )
    return jax.tree.map(jnp.asarray, new)


def renewed(state: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state on the host with other values of some entries, in their own dtypes.

    Raises:
        ContractError: nobody declares the entry, or its value is of another shape or kind.
    """
    found = dict(state)
    for name, value in entries.items():
        if name not in state:
            raise ContractError(
                f"remember({name}=...): nobody declares '{name}', only {sorted(state)}; put it "
                "with its first value into initial_state of the trainer or callback"
            )
        if isinstance(state[name], Mapping):  # of an estimator, checked by `same_form`
            found[name] = value
            continue
        array, form = np.asarray(value), np.asarray(state[name])
        if array.shape != form.shape or not np.can_cast(array.dtype, form.dtype, "same_kind"):
            raise ContractError(
                f"remember({name}={value!r}) is {array.dtype} of shape {array.shape}; it was "
                f"declared as {form.dtype} of shape {form.shape}"
            )
        found[name] = array.astype(form.dtype)
    return found


def check_pure(label: str, func: Function, call: Callable[..., Any], *arguments: Any) -> None:
    """Refuse a function that keeps something outside of its arguments, by tracing it twice.

    Args:
        func: of the user.
        call: calls it.
        arguments: of `call`; shapes and dtypes are enough.

    Raises:
        ContractError: it has changed what it captures, or another program comes of it; see `call`.
    """
    programs, contents = [], []
    for _ in range(2):  # what the first trace fills in, a cache for instance, is no memory
        # a new function each time: jax keeps the programs of those that it knows
        programs.append(str(jax.make_jaxpr(functools.partial(call))(*arguments)))
        contents.append({name: _content(value) for name, value in captured(func).items()})
    before, after = contents
    changed = [n for n in after if after[n] != before.get(n) or after[n] == _TRACED]
    if _TRACED in after.values() or (changed and programs[0] != programs[1]):
        raise ContractError(f"{label} changes '{changed[0]}' when it is called: {IMPURE}")
    if programs[0] != programs[1]:  # where only a count of traces changed, they are the same
        raise ContractError(
            f"{label} does something else each time it is called with the same: {IMPURE}"
        )


_TRACED = "an array of a trace that has ended"


def _content(value: Any) -> str:
    try:
        return fingerprint(value)
    except jax.errors.JAXTypeError:
        return _TRACED
    except Exception:  # of a lock for instance: it cannot be compared
        return ""


def unjitted(func: Function) -> Function:
    """Return the function that `jax.jit` wraps: traced again, it runs again."""
    return vars(func)["__wrapped__"] if is_jitted(func) else func
