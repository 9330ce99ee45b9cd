"""Every implementation that can run here against its formula: value, gradient, milliseconds."""

import functools
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.models.architecture import TransformerConfig
from jaxrl.models.attention import Intervals, attention, causal_mask
from jaxrl.models.families import config_from_hf
from jaxrl.models.kernels.choice import REFERENCE, Facts, Operation, facts_of
from jaxrl.models.kernels.grouped_product import GROUPED_PRODUCT, grouped_product
from jaxrl.models.kernels.head_log_probs import HEAD_LOG_PROBS
from jaxrl.models.kernels.packed_attention import (
    PACKED_ATTENTION,
    self_attention,
    training_mask,
)
from jaxrl.models.kernels.paged_attention import (
    PAGED_ATTENTION,
    Pages,
    layout_of,
    paged_attention,
)
from jaxrl.models.kernels.tree_attention import TREE_ATTENTION, tree_attention
from jaxrl.models.transformer import init_params, unembed
from jaxrl.rollout.native.programs import shape_of
from jaxrl.tools.prove.section import Result, Row, Task
from jaxrl.tools.prove.timing import median_seconds
from jaxrl.training.forward import Head, Targets, score

# Norm of the difference / norm of what the formula gives in float32, of the same operands.
BOUNDS = {"float32": 1e-4, "bfloat16": 2e-2}
SEGMENTS, GROUPS = 3, 8  # of the packed row, of the grouped product

Arrays = tuple[jax.Array, ...]


class Comparison(NamedTuple):
    """Hold an implementation and the formula that it stands for, with operands.

    Attributes:
        differentiated: whether training takes its gradient, by all operands.
    """

    operation: str
    implementation: str
    run: Callable[..., jax.Array]
    formula: Callable[..., jax.Array]
    operands: Arrays
    differentiated: bool


def kernels(task: Task) -> Result:
    """Compare attention, grouped products and the head's log-probs with formulas."""
    dtype, rows, missing = task.machine.dtype, [], []
    for name, shape in task.work.shapes.items():
        model = config_from_hf(dict(shape))
        for found in _comparisons(task, model):
            if isinstance(found, str):
                missing.append(f"{name}: {found}")
                continue
            rows.append({"model": name} | _judged(found, BOUNDS[dtype], task.work.repeats))
    wrong = [row for row in rows if row["result"] != "pass"]
    done = [row for row in rows if "error" in row]
    worst = max((max(row["error"], row["gradient_error"] or 0.0) for row in done), default=0.0)
    reasons = [
        f"{words}: {', '.join(names)}"
        for words, names in (
            ("did not run", _names(row for row in wrong if "error" not in row)),
            (f"off by more than {BOUNDS[dtype]}", _names(row for row in wrong if "error" in row)),
        )
        if names
    ]
    figure = f"{len(done)} compared in {dtype}, off by {worst:.1e} of the value at most"
    return Result(not wrong, figure, "; ".join(reasons), rows, missing)


def _names(rows: Iterable[Row]) -> list[str]:
    return sorted({f"{row['operation']} {row['implementation']} ({row['model']})" for row in rows})


def _comparisons(task: Task, model: TransformerConfig) -> Iterator[Comparison | str]:
    """Yield what is compared for a model, or in words what an implementation misses."""
    work, dtype = task.work, jnp.dtype(task.machine.dtype)
    facts = facts_of(jax.devices()[0], dtype, model)
    yield from _packed(model, work.row_lengths[0], facts)
    yield from _trees(model, work.row_lengths[0], facts)
    yield from _paged(model, work.slots[0], work.prompt + work.new_tokens, facts)
    yield from _grouped(model, work.row_lengths[0], facts)
    yield from _head(model, work.row_lengths[0] // 4, facts)  # the formula has all logits


def _can(operation: Operation, facts: Facts) -> Iterator[tuple[str, Facts] | str]:
    """Yield the implementations of a platform: on packed rows, else on rows of one trajectory."""
    for name in operation.order.get(facts.platform, (REFERENCE,)):
        for given in (facts, facts._replace(packed=False)):
            if not operation.implementations[name].missing(given):
                yield name, given
                break
        else:
            missing = operation.implementations[name].missing(facts)
            yield f"{operation.name} {name}: needs {' and '.join(missing)}"


def _packed(model: TransformerConfig, length: int, facts: Facts) -> Iterator[Comparison | str]:
    q_shape = (1, length, model.num_heads, model.head_dim)
    kv_shape = (1, model.num_kv_heads, length, model.head_dim)
    operands = _draw([q_shape, kv_shape, kv_shape], facts.dtype)
    for found in _can(PACKED_ATTENTION, facts):
        if isinstance(found, str):
            yield found
            continue
        name, given = found
        number = SEGMENTS if given.packed else 1
        ids = 1 + jnp.arange(length)[None] * number // length

        def run(q: Any, k: Any, v: Any, name: str = name, ids: Any = ids) -> jax.Array:
            return self_attention(model, q, k, v, training_mask(ids, name), kernel=name)

        def formula(q: Any, k: Any, v: Any, ids: Any = ids) -> jax.Array:
            return attention(model, q, k, v, causal_mask(ids))

        words = f"{name}, {number} segment{'s' if number > 1 else ''}"
        yield Comparison(PACKED_ATTENTION.name, words, run, formula, operands, True)


def _trees(model: TransformerConfig, length: int, facts: Facts) -> Iterator[Comparison | str]:
    """Compare a prompt of a quarter of the row, `GROUPS` answers that share it, and padding."""
    q_shape = (1, length, model.num_heads, model.head_dim)
    kv_shape = (1, model.num_kv_heads, length, model.head_dim)
    operands = _draw([q_shape, kv_shape, kv_shape], facts.dtype)
    place, prompt = jnp.arange(length), length // 4
    answer = length // 2 // GROUPS
    used = prompt + GROUPS * answer
    mine = (place - prompt) // answer  # the answer that a token is of
    ends = jnp.where(place < prompt, used, prompt + (mine + 1) * answer)
    ends = jnp.where(place < used, ends, place + 1)[None]
    depth = jnp.where(place < prompt, place, prompt + (place - prompt) % answer)[None]
    mask = (place[:, None] >= place) & (place[:, None] < ends[:, None])
    for found in _can(TREE_ATTENTION, facts):
        if isinstance(found, str):
            yield found
            continue

        def run(q: Any, k: Any, v: Any, name: str = found[0]) -> jax.Array:
            return tree_attention(model, q, k, v, Intervals(ends, depth, False), kernel=name)

        def formula(q: Any, k: Any, v: Any) -> jax.Array:
            return attention(model, q, k, v, mask)

        words = f"{found[0]}, {GROUPS} answers"
        yield Comparison(TREE_ATTENTION.name, words, run, formula, operands, True)


def _paged(
    model: TransformerConfig, slots: int, positions: int, facts: Facts
) -> Iterator[Comparison | str]:
    """Compare attention to pages of rows that decode, and of tiles of prompts."""
    shape = shape_of(facts.platform)
    for found in _can(PAGED_ATTENTION, facts):
        if isinstance(found, str):
            yield found
            continue
        name, given = found
        yield _to_pages(model, name, slots, 1, positions, given)
        yield _to_pages(model, name, shape.tiles, shape.tile, positions, given)


def _to_pages(
    model: TransformerConfig, name: str, rows: int, queries: int, positions: int, facts: Facts
) -> Comparison:
    """Return attention from `queries` neighbours of each row to its pages, which lie at random.

    Args:
        positions: of the longest row, rounded up to whole pages.
    """
    heads, width, size = model.num_kv_heads, model.head_dim, shape_of(facts.platform).page
    columns = -(-max(positions, queries) // size)
    number = rows * columns
    token = (number * size, heads, width)
    q, k, v = _draw([(rows, queries, model.num_heads, width), token, token], facts.dtype)
    empty = Pages.empty(model, number, size, facts.dtype, layout=layout_of(facts.platform))
    pages = empty.write(*jnp.divmod(jnp.arange(number * size), size), k, v)
    table = jax.random.permutation(jax.random.key(3), number).reshape(rows, columns)
    first = jnp.arange(rows) * (columns * size - queries) // max(rows - 1, 1)
    at = first[:, None, None] + jnp.arange(queries)[:, None]
    mask = jnp.arange(columns * size) <= at  # [R, Q, S]

    def run(q: Any, *arrays: Any) -> jax.Array:
        return paged_attention(model, q, pages.replace(arrays=arrays), table, first, kernel=name)

    def formula(q: Any, *arrays: Any) -> jax.Array:
        keys, values = pages.replace(arrays=arrays).read(table)
        k, v = keys[:, :heads, :width].swapaxes(2, 3), values[:, :heads, :, :width]
        return attention(model, q, k, v, mask)

    words = f"{name}, {'decoding' if queries == 1 else 'prefill'}"
    return Comparison(PAGED_ATTENTION.name, words, run, formula, (q, *pages.arrays), False)


def _grouped(model: TransformerConfig, tokens: int, facts: Facts) -> Iterator[Comparison | str]:
    """Rows times the matrix of their group; one group has no row, and the last rows no group."""
    share = (tokens - 1) // GROUPS
    sizes = jnp.array([0, 2 * share, *[share] * (GROUPS - 2)])
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(tokens), side="right")
    width = model.hidden_size
    operands = _draw([(tokens, width), (GROUPS, width, width)], facts.dtype)

    def formula(x: Any, w: Any) -> jax.Array:
        of_each = [jnp.where((group == i)[:, None], x, 0) @ w[i] for i in range(GROUPS)]
        return functools.reduce(jnp.add, of_each)

    for found in _can(GROUPED_PRODUCT, facts):
        if isinstance(found, str):
            yield found
            continue

        def run(x: Any, w: Any, name: str = found[0]) -> jax.Array:
            return grouped_product(x, w, sizes, kernel=name)

        yield Comparison(GROUPED_PRODUCT.name, found[0], run, formula, operands, True)


def _head(model: TransformerConfig, tokens: int, facts: Facts) -> Iterator[Comparison | str]:
    """Log-probs of targets, from the hidden states of a row."""
    params = init_params(model, 0)
    weights = {name: x for name, x in params.items() if name in ("embed", "unembed", "final_norm")}
    (hidden,) = _draw([(1, tokens, model.hidden_size)], facts.dtype)
    targets = jax.random.randint(jax.random.key(1), (1, tokens), 0, model.vocab_size)
    wanted, names = jnp.ones((1, tokens), bool), list(weights)

    def formula(hidden: jax.Array, *matrices: jax.Array) -> jax.Array:
        given = dict(zip(names, matrices, strict=True))
        all_log_probs = jax.nn.log_softmax(unembed(model, given, hidden))
        entropies = -jnp.sum(jnp.exp(all_log_probs) * all_log_probs, axis=-1)
        chosen = jnp.take_along_axis(all_log_probs, targets[..., None], axis=-1)[..., 0]
        return jnp.stack([chosen, entropies])

    operands = (hidden, *weights.values())
    for found in _can(HEAD_LOG_PROBS, facts):
        if isinstance(found, str):
            yield found
            continue
        head = Head(model, 1.0, facts.dtype, True, kernel=found[0])

        def run(hidden: jax.Array, *matrices: jax.Array, head: Head = head) -> jax.Array:
            given = dict(zip(names, matrices, strict=True))
            return jnp.stack(score(head, given, hidden, Targets(targets, None), wanted, None))

        yield Comparison(HEAD_LOG_PROBS.name, found[0], run, formula, operands, True)


def _draw(shapes: list[tuple[int, ...]], dtype: jnp.dtype) -> Arrays:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return tuple(
        jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)
    )


def _judged(pair: Comparison, bound: float, repeats: int) -> Row:
    """Return the row of a comparison; what raises fails alone."""
    row: Row = {"operation": pair.operation, "implementation": pair.implementation}
    try:
        return row | _compared(pair, bound, repeats)
    except Exception as error:  # of a compiler or a kernel, whatever it is
        traceback.print_exc()
        said = f"{type(error).__name__}: {error}".split("\n")[0]
        return row | {"result": "FAIL", "note": said}


def _compared(pair: Comparison, bound: float, repeats: int) -> Row:
    """Run an implementation and its formula, this in float32 with exact products."""

    def exact(*operands: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return pair.formula(*(x.astype(jnp.float32) for x in operands))

    ours, plain, operands = jax.jit(pair.run), jax.jit(pair.formula), pair.operands
    values = ours(*operands), jax.jit(exact)(*operands)
    errors = [_relative(*values)]
    if pair.differentiated:
        operands = (jax.random.normal(jax.random.key(2), values[1].shape), *operands)
        ours, plain, known = (_gradient(f) for f in (pair.run, pair.formula, exact))
        gradients = zip(ours(*operands), known(*operands), strict=True)
        errors.append(max(_relative(a, b) for a, b in gradients))
    return {
        "result": "pass" if all(x <= bound for x in errors) else "FAIL",  # NaN fails
        "error": errors[0],
        "gradient_error": errors[1] if pair.differentiated else None,
        "ms": 1e3 * median_seconds(ours, repeats, *operands),
        "formula_ms": 1e3 * median_seconds(plain, repeats, *operands),
    }


def _gradient(func: Callable[..., jax.Array]) -> Callable[..., Arrays]:
    """Return the gradient by all operands; the slope is an argument: a constant would be folded."""

    def loss(slope: jax.Array, *operands: jax.Array) -> jax.Array:
        return jnp.sum(func(*operands).astype(jnp.float32) * slope)

    def gradients(slope: jax.Array, *operands: jax.Array) -> Arrays:
        return jax.grad(loss, tuple(range(1, 1 + len(operands))))(slope, *operands)

    return jax.jit(gradients)


def _relative(value: jax.Array, known: jax.Array) -> float:
    """Return |value - known| / |known| in float32."""
    value, known = value.astype(jnp.float32), known.astype(jnp.float32)
    return float(jnp.linalg.norm((value - known).ravel()) / jnp.linalg.norm(known.ravel()))
