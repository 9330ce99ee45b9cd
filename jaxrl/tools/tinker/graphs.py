"""Losses that clients send as data: graphs of torch.fx, of operations that stand here.

Nothing of them is run but what the table has, as JAX: (log_probs, inputs) -> loss, metrics of one
datum. The gradient is torch's also where a function has a corner.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field

from jaxrl.array_ops import absolute, clamp
from jaxrl.rollout.server.errors import refuse
from jaxrl.tools.tinker.bodies import Body, Id, Number

MOST_NODES, MOST_INPUTS, MOST_ELEMENTS, DEEPEST = 1000, 16, 2**24, 8
METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
Named = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]


class Input(Body):
    """Hold the name of what a loss reads, and how many dims it has."""

    name: Named
    rank: Annotated[int, Field(ge=0, le=1)]


class Node(Body):
    """Hold one node, in the order in which they are computed."""

    op: Literal["placeholder", "call_function", "call_method", "output"]
    name: Named
    target: Annotated[str, Field(max_length=128)]
    args: Annotated[list[Any], Field(max_length=64)] = []
    kwargs: Annotated[dict[str, Any], Field(max_length=16)] = {}


class Graph(Body):
    """Hold all nodes."""

    format: Literal[1] = 1
    nodes: Annotated[list[Node], Field(min_length=2, max_length=MOST_NODES)]


class CreateLoss(Body):
    """Hold the body of /create_custom_loss."""

    session_id: Id
    custom_loss_seq_id: Number
    name: Annotated[str, Field(max_length=128)]
    inputs: Annotated[list[Input], Field(min_length=1, max_length=MOST_INPUTS)]
    graph: Graph


# ---------------------------------------------------------------- the operations


def _float(x: Any) -> Any:
    """Return a number as a float: whole numbers of any size would be computed with for ever."""
    return float(x) if isinstance(x, int) and not isinstance(x, bool) else x


def _arithmetic(run: Callable[..., Any]) -> Callable[..., Any]:
    def of(x: Any, y: Any, **more: Any) -> Any:
        scale = more.pop("alpha", 1)  # of torch.add and torch.sub
        return run(_float(x), _float(y) if scale == 1 else _float(y) * _float(scale), **more)

    return of


def _along(run: Callable[..., Any]) -> Callable[..., Any]:
    def of(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
        del dtype
        return run(jnp.asarray(x, jnp.float32), axis=_axes(dim), keepdims=keepdim)

    return of


def _axes(dim: Any) -> Any:
    return tuple(dim) if isinstance(dim, list) else dim


def _deviation(x: Any, dim: Any = None, correction: int = 1, unbiased: bool = True) -> Any:
    return jnp.std(x, axis=_axes(dim), ddof=correction if unbiased else 0)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:  # noqa: A002 - torch's names
    low = -jnp.inf if min is None else _float(min)
    return clamp(jnp.asarray(x), low, jnp.inf if max is None else _float(max))


def _softmax(run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dim=-1, dtype=None: run(x, axis=dim)


def _joined(run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensors, dim=0: run(tensors, axis=dim)


def _same(x: Any, *of: Any, **more: Any) -> Any:
    """Return x: what is asked of devices, dtypes and layouts changes no number here."""
    del of, more
    return x


_ARITHMETIC = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": jnp.divide,
    "truediv": jnp.divide,
    "true_divide": jnp.divide,
    "pow": jnp.power,
    "minimum": jnp.minimum,
    "maximum": jnp.maximum,
    **{
        name: getattr(jnp, long)
        for name, long in (
            ("lt", "less"),
            ("le", "less_equal"),
            ("gt", "greater"),
            ("ge", "greater_equal"),
            ("eq", "equal"),
            ("ne", "not_equal"),
        )
    },
}
_OF_TENSORS: dict[str, Callable[..., Any]] = {  # functions of torch, and methods of tensors
    **{name: _arithmetic(run) for name, run in _ARITHMETIC.items()},
    **{
        name: getattr(jnp, name)
        for name in (
            *("exp", "log", "log1p", "expm1", "sqrt", "square", "sign", "sin", "cos", "tanh"),
            *("floor", "ceil", "round", "isfinite", "isnan", "isinf", "reciprocal"),
        )
    },
    **{name: _along(getattr(jnp, name)) for name in ("sum", "mean", "prod")},
    "abs": absolute,
    "amax": _along(jnp.max),
    "amin": _along(jnp.min),
    "max": jnp.max,
    "min": jnp.min,
    "std": _deviation,
    "logsumexp": lambda x, dim, keepdim=False: jax.nn.logsumexp(x, _axes(dim), keepdims=keepdim),
    "cumsum": lambda x, dim, dtype=None: jnp.cumsum(x, axis=dim),
    "flip": lambda x, dims: jnp.flip(x, _axes(dims)),
    "softmax": _softmax(jax.nn.softmax),
    "log_softmax": _softmax(jax.nn.log_softmax),
    "neg": jnp.negative,
    "rsqrt": jax.lax.rsqrt,
    "sigmoid": jax.nn.sigmoid,
    "relu": jax.nn.relu,
    "erf": jax.lax.erf,
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "logical_not": jnp.logical_not,
    "clamp": _clamp,
    "clip": _clamp,
    "where": jnp.where,
    "nan_to_num": lambda x, nan=0.0: jnp.nan_to_num(x, nan=nan),
    "zeros_like": jnp.zeros_like,
    "ones_like": jnp.ones_like,
    "full_like": jnp.full_like,
    "dot": jnp.dot,
}
_METHODS: dict[str, Callable[..., Any]] = {
    **_OF_TENSORS,
    "detach": jax.lax.stop_gradient,
    "float": lambda x: jnp.asarray(x, jnp.float32),
    "bool": lambda x: jnp.asarray(x, bool),
    "masked_fill": lambda x, mask, value: jnp.where(mask, value, x),
    "unsqueeze": jnp.expand_dims,
    "squeeze": jnp.squeeze,
    "size": lambda x, dim=None: x.shape if dim is None else x.shape[dim],
    "numel": lambda x: x.size,
    "dim": lambda x: x.ndim,
    **dict.fromkeys(("to", "clone", "contiguous", "double", "type_as"), _same),
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"torch.{name}": run for name, run in _OF_TENSORS.items()},
    "torch.detach": jax.lax.stop_gradient,
    "torch.stack": _joined(jnp.stack),
    "torch.cat": _joined(jnp.concatenate),
    **{
        f"{room}.{name}": run
        for room in ("torch.nn.functional", "torch._C._nn")
        for name, run in (
            ("relu", jax.nn.relu),
            ("softplus", jax.nn.softplus),
            ("logsigmoid", jax.nn.log_sigmoid),
            ("log_sigmoid", jax.nn.log_sigmoid),
            ("softmax", _softmax(jax.nn.softmax)),
            ("log_softmax", _softmax(jax.nn.log_softmax)),
        )
    },
    **{f"operator.{name}": _arithmetic(run) for name, run in _ARITHMETIC.items()},
    "operator.neg": lambda x: -_float(x),
    "operator.pos": _same,
    "operator.abs": absolute,
    "operator.and_": jnp.logical_and,
    "operator.or_": jnp.logical_or,
    "operator.invert": jnp.logical_not,
    "operator.getitem": lambda x, index: x[index],
}


# ---------------------------------------------------------------- graphs

Loss = Callable[..., tuple[Any, dict[str, Any]]]


def slopes_of(
    loss: Loss, log_probs: Sequence[np.ndarray], given: Sequence[Sequence[np.ndarray]]
) -> tuple[list[np.ndarray], dict[str, float]]:
    """Return the gradient of a loss, summed over data, by their log-probs; and its metrics.

    Args:
        log_probs: [T] of each datum.
        given: its other inputs.

    Raises:
        ValueError: the loss is not a number, or its operations do not fit its inputs.
    """

    def of_datum(x: Any, *more: Any) -> tuple[Any, dict[str, Any]]:
        total, metrics = loss(x, *more)
        if np.ndim(total):
            raise ValueError(f"the loss has shape {np.shape(total)}; it must be one number")
        return jnp.asarray(total, jnp.float32), metrics

    run, slopes = jax.jit(jax.value_and_grad(of_datum, has_aux=True)), []
    sums: dict[str, float] = {"loss:sum": 0.0}
    for x, more in zip(log_probs, given, strict=True):
        try:
            (total, metrics), slope = jax.device_get(run(x, *more))
        except (TypeError, IndexError, KeyError) as error:
            raise ValueError(f"the loss cannot be computed: {error}") from error
        slopes.append(slope)
        for name, value in {"loss:sum": total, **metrics}.items():
            if np.ndim(value):
                raise ValueError(f"metric {name!r} must be one number")
            sums[name] = sums.get(name, 0.0) + float(value)
    means = {name: x / len(log_probs) for name, x in sums.items() if name.endswith(":mean")}
    return slopes, sums | means


def loss_of(body: CreateLoss) -> Loss:
    """Return a loss as a function of its inputs: of log-probs [T] first, then of the others.

    Raises:
        ApiError: 400, names the node, and what is not allowed there.
    """
    _check(body)
    names = [one.name for one in body.inputs]

    def loss(*given: Any) -> tuple[Any, dict[str, Any]]:
        known = dict(zip(names, given, strict=True))
        values: dict[str, Any] = {}
        for node in body.graph.nodes:
            if node.op == "placeholder":
                values[node.name] = known[node.target]
                continue
            args = [_decoded(x, values) for x in node.args]
            if node.op == "output":
                total, metrics = args[0]
                return total, metrics
            kwargs = {name: _decoded(x, values) for name, x in node.kwargs.items()}
            table = _FUNCTIONS if node.op == "call_function" else _METHODS
            found = table[node.target](*args, **kwargs)
            if np.size(found) > MOST_ELEMENTS:
                raise ValueError(f"{node.name}: has {np.size(found)} elements; too many")
            values[node.name] = found
        raise AssertionError("a graph ends with its output")

    return loss


def _check(body: CreateLoss) -> None:
    names = [one.name for one in body.inputs]
    if names[0] != "logprobs" or body.inputs[0].rank != 1:
        refuse("inputs[0]", names[0], "must be logprobs, of rank 1")
    if len(set(names)) < len(names):
        refuse("inputs", names, "must have different names")
    known: set[str] = set()
    for number, node in enumerate(body.graph.nodes):
        at = f"graph.nodes[{number}] ({node.name})"
        if node.name in known:
            refuse(at, node.name, "is the name of an earlier node")
        allowed = {
            "placeholder": names,
            "call_function": _FUNCTIONS,
            "call_method": _METHODS,
            "output": ("output",),
        }[node.op]
        if node.target not in allowed:
            refuse(at, node.target, f"is no {node.op} that this server knows")
        for x in (*node.args, *node.kwargs.values()):
            _check_value(at, x, known, 0)
        known.add(node.name)
    last = len(body.graph.nodes) - 1
    if [n for n, node in enumerate(body.graph.nodes) if node.op == "output"] != [last]:
        refuse("graph.nodes", "output", "must be the last node, and the only one")
    _check_output(body.graph.nodes[last])


def _check_output(node: Node) -> None:
    told = node.args[0] if node.args else None
    pair = told.get("tuple") if isinstance(told, dict) else told
    if not isinstance(pair, list) or len(pair) != 2 or not _is_ref(pair[0]):
        refuse("graph.nodes[-1]", told, "must be (loss, metrics)")
    metrics = pair[1].get("dict") if isinstance(pair[1], dict) else None
    if not isinstance(metrics, dict):
        refuse("graph.nodes[-1]", pair[1], "metrics must be a dict")
    for name, value in metrics.items():
        if not METRIC.fullmatch(name) or not _is_ref(value):
            refuse("metrics", name, "must be named custom/NAME:sum or custom/NAME:mean, of nodes")


def _is_ref(x: Any) -> bool:
    return isinstance(x, dict) and list(x) == ["ref"]


def _check_value(at: str, x: Any, known: set[str], depth: int) -> None:
    if depth > DEEPEST:
        refuse(at, "an argument", f"is nested more than {DEEPEST} deep")
    if x is None or isinstance(x, bool | int | float | str):
        return
    parts: Sequence[Any] = x if isinstance(x, list) else ()
    if isinstance(x, dict) and len(x) == 1:
        ((kind, value),) = x.items()
        if kind == "ref":
            if not isinstance(value, str) or value not in known:
                refuse(at, value, "is no earlier node")
            return
        if kind in ("tuple", "slice") and isinstance(value, list):
            parts = value
        elif kind == "dict" and isinstance(value, dict):
            parts = list(value.values())
        elif kind in ("float", "dtype", "device", "layout", "memory_format", "ellipsis"):
            return
        else:
            refuse(at, kind, "is no form of an argument")
    elif not isinstance(x, list):
        refuse(at, x, "is no form of an argument")
    if len(parts) > 64:
        refuse(at, len(parts), "elements are too many")
    for part in parts:
        _check_value(at, part, known, depth + 1)


def _decoded(x: Any, values: Mapping[str, Any]) -> Any:
    """Return an argument, with the values of the nodes that it names."""
    if isinstance(x, list):
        return [_decoded(part, values) for part in x]
    if not isinstance(x, dict):
        return x
    ((kind, value),) = x.items()
    forms: dict[str, Callable[[], Any]] = {
        "ref": lambda: values[value],
        "tuple": lambda: tuple(_decoded(part, values) for part in value),
        "dict": lambda: {name: _decoded(part, values) for name, part in value.items()},
        "slice": lambda: slice(*(_decoded(part, values) for part in value)),
        "float": lambda: float(value),
        "ellipsis": lambda: ...,
    }
    return forms[kind]() if kind in forms else None  # of devices, dtypes and layouts
