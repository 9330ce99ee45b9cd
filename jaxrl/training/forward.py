"""Model -> what the losses need: log-probs, entropy, values, aligned to the predicted token.

The vocabulary head is the widest matrix of the model, and its logits the largest array of a step.
So it runs on the tokens that the loss asks for and on no others, some of them at a time, and the
backward pass computes the logits again instead of keeping them: [B, T, V] never exists. On
accelerators the vocabulary is cut as well (`models/kernels/head_log_probs.py`); what that cannot do
is done by `score_columns`, all of the vocabulary for a few columns.

Of weights in parts (FSDP), each device gathers the matrix and scores its own tokens, or tokens go
round: each device keeps its share of the ids, and scores them for the tokens of all that share the
matrix. The second where it sends less, as it does for a wide vocabulary (`shared_axes`).
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl.array_ops import (
    FILTERED,
    Array,
    BoolBT,
    FloatBT,
    IntBT,
    entropy,
    event_log_probs,
    keep_only,
    log_softmax,
    token_log_probs,
    top_ids,
)
from jaxrl.losses.distillation import generalized_jsd
from jaxrl.models.adapter import AdaptedModel
from jaxrl.models.exact import Tiles
from jaxrl.models.exact_head import exact_scores, head_weights
from jaxrl.models.experts import Load, Routing, load_of, router_terms
from jaxrl.models.kernels import head_log_probs
from jaxrl.models.kernels.choice import REFERENCE
from jaxrl.models.linear import merge
from jaxrl.models.lora import with_dropout
from jaxrl.models.transformer import (
    Params,
    TransformerConfig,
    forward,
    head_axes,
    logical_axes,
    normalise,
    routed_forward,
    unembed,
)
from jaxrl.parallel.rules import Placement, gather_parameter, spread_tokens
from jaxrl.types import ModelRows

# Per chunk of the head on one device; at least one column. Short responses want short chunks, but
# the gradient of the head is read and written for each: more tokens where products are fast. The
# logits are the largest temporary of a step, hence the last bound.
CHUNK_TOKENS, CPU_CHUNK_TOKENS, CHUNK_LOGITS = 1024, 256, 2**26


def log_probs_and_entropy(
    config: TransformerConfig | AdaptedModel,
    params: Params,
    rows: ModelRows,
    *,
    temperature: float,
    dtype: jnp.dtype,
    remat: str = "none",
    kernel: str = REFERENCE,
    experts_kernel: str = REFERENCE,
    rule_kernel: str = REFERENCE,
    exchange: str = "auto",
    context: str = "auto",
    tree_kernel: str = REFERENCE,
    head_kernel: str = REFERENCE,
    with_entropy: bool = True,
    teacher_beta: float | None = None,
    top_k: int = 0,
    of_ids: bool = False,
    states: bool = False,
    teacher: TransformerConfig | None = None,
    routers: tuple[str, ...] = (),
    loads: bool = False,
    placement: Placement | None = None,
    tiles: Tiles | None = None,
) -> Any:
    """Return the wanted tokens' log-probs given those before, and the entropy they were drawn from.

    Args:
        rows: [R, L], one or several trajectories in each.
        temperature: divides the logits, as the sampler's does.
        dtype: compute dtype of the model.
        remat: what layers keep for the backward pass, see `models/remat.py`.
        kernel: of the attention, see `models/kernels/packed_attention.py`.
        experts_kernel: of the products with experts, see `GROUPED_PRODUCT`.
        rule_kernel: of linear attention, see `DELTA_RULE`.
        exchange: how tokens travel to experts on other devices, see `exchange_of`.
        context: how rows that are spread over devices attend, see `context_attention`.
        tree_kernel: of the attention in rows of trees, see `TREE_ATTENTION`.
        head_kernel: of the vocabulary head, see `HEAD_LOG_PROBS`.
        with_entropy: False returns zeros for it; it costs a pass over the vocabulary.
        teacher_beta: of the divergence from the teacher of the rows, which is returned as well.
        top_k: return the likeliest ids, and the log-probs of them and of all others, as a teacher.
        of_ids: return the log-probs of the rows' `teacher_ids` as well.
        states: return the states that the head reads, as a teacher of whole distributions.
        teacher: whose states the rows have, and head; None = the rows have its likeliest ids.
        routers: which of `RouterTerms` to return as well, the mean of all layers with experts.
        loads: return, beside all that, the `Load` of each layer with experts [Lx, ...].
        placement: of the parameters and rows; None = one device, or, of CPUs, as the partitioner
            decides.
        tiles: of the exact mode, in which the log-probs are the sampler's, see `models/exact.py`;
            packed rows are unpacked first.

    Returns:
        log_probs [B, T], entropy [B, T], float32: `log_probs[b, t] = log p(tokens[b, t] |
        tokens[b, :t])` where it is wanted, else 0. One trajectory in each row b, whatever the rows
        of the model held; T = L where `rows.source` is None. Then, if asked for: the divergence
        [B, T]; ids [B, T, K] and log-probs [B, T, K + 1]; those of given ids [B, T, K]; states [B,
        T, D]; those of `routers` [B, T]. With `loads` a pair of these, a tuple, and them.
    """
    rows = _spread(rows if tiles is None else _unpacked(rows), placement)
    params = with_dropout(params, rows.keys)
    given = params, rows.tokens, rows.positions, rows.segment_ids
    settings: dict[str, Any] = {"dtype": dtype, "remat": remat, "kernel": kernel}
    settings |= {"experts_kernel": experts_kernel, "rule_kernel": rule_kernel}
    settings |= {"exchange": exchange, "context": context, "placement": placement, "tiles": tiles}
    settings |= {"ends": rows.ends, "tree_kernel": tree_kernel}
    terms: tuple[FloatBT, ...] = ()
    found_loads = None
    if routers or loads or rows.routes is not None:
        assert isinstance(config, TransformerConfig)
        experts = config.experts
        assert experts is not None
        replay = None if rows.routes is None else jnp.moveaxis(rows.routes, 2, 0)

        def observe(routing: Routing) -> tuple[tuple[Array, ...], Load]:
            ids = rows.segment_ids
            if rows.ends is not None:  # a token counts in every trajectory that has it
                *routed, ids = by_token(rows, *routing, ids)
                routing = Routing(*routed)
            found = router_terms(experts, routing, ids)
            load = load_of(experts, jax.lax.stop_gradient(routing), ids > 0)
            return tuple(getattr(found, name) for name in routers), load

        settings |= {"replay": replay, "observe": observe}
        hidden, seen = routed_forward(config, *given, **settings)
        observed, found_loads = seen
        terms = tuple(x.mean(axis=0) for x in observed)
        terms = terms if rows.ends is not None else by_token(rows, *terms)
    else:
        hidden = forward(config, *given, **settings)
    with jax.named_scope("log_probs"):
        if tiles is not None:
            assert isinstance(config, TransformerConfig)
            weights = head_weights(config, params, placement, dtype)
            given = hidden, temperature, rows.targets, rows.kept, rows.wanted
            where = {"dtype": dtype, "placement": placement}
            scores = by_target(rows, *exact_scores(config, tiles, weights, *given, **where))
            outputs = *scores, *terms
            return (outputs, found_loads) if loads else outputs
        head = Head(config, temperature, dtype, with_entropy, kernel=head_kernel)
        head = dataclasses.replace(head, top_k=top_k)
        head, said = _with_teacher(head, rows, teacher_beta, teacher, of_ids=of_ids)
        targets, wanted = Targets(rows.targets, rows.kept, said), rows.wanted
        if rows.parents is not None:
            hidden = jnp.take_along_axis(hidden, rows.parents[..., None], axis=1)
        elif (
            placement is None or placement.size(placement.rules.seq) == 1
        ):  # the last has no target
            hidden, targets, wanted = jax.tree.map(lambda x: x[:, :-1], (hidden, targets, wanted))
        known = rows.teacher_head if head.teacher else None
        scores = score(head, params, hidden, targets, wanted, placement, known)
        scores += (_where(wanted, hidden),) if states else ()
        outputs = *by_target(rows, *scores), *terms
        return (outputs, found_loads) if loads else outputs


def _with_teacher(
    head: "Head",
    rows: ModelRows,
    beta: float | None,
    teacher: TransformerConfig | None,
    *,
    of_ids: bool,
) -> tuple["Head", tuple[Any, ...] | None]:
    """Return the head as it is to score, and what a teacher said of the rows' targets."""
    if of_ids:
        return dataclasses.replace(head, of_ids=True), (rows.teacher_ids,)
    if beta is None:
        return head, None
    if teacher is None:
        said = rows.teacher_ids, rows.teacher_log_probs
        return dataclasses.replace(head, teacher_beta=beta), said
    theirs = Head(teacher, head.temperature, head.dtype, with_entropy=False)
    return dataclasses.replace(head, teacher_beta=beta, teacher=theirs), (rows.teacher_states,)


def state_values(
    config: TransformerConfig,
    params: Params,
    rows: ModelRows,
    *,
    dtype: jnp.dtype,
    remat: str = "none",
    kernel: str = REFERENCE,
    experts_kernel: str = REFERENCE,
    rule_kernel: str = REFERENCE,
    exchange: str = "auto",
    context: str = "auto",
    tree_kernel: str = REFERENCE,
    placement: Placement | None = None,
) -> tuple[FloatBT, ...]:
    """Return a critic's value of the state before each token, see `log_probs_and_entropy`.

    Returns:
        values [B, T] float32, alone in a tuple: `values[b, t]` is that of tokens[b, :t]; 0 for the
        first token and for padding.
    """
    rows = _spread(rows, placement)
    params = with_dropout(params, rows.keys)
    hidden = forward(
        config,
        params,
        rows.tokens,
        rows.positions,
        rows.segment_ids,
        dtype=dtype,
        remat=remat,
        kernel=kernel,
        experts_kernel=experts_kernel,
        rule_kernel=rule_kernel,
        exchange=exchange,
        context=context,
        placement=placement,
        ends=rows.ends,
        tree_kernel=tree_kernel,
    )
    with jax.named_scope("values"):
        normed = normalise(hidden, params["final_norm"], config).astype(jnp.float32)
        axes = logical_axes(config)["value_head"]
        head = gather_parameter(params["value_head"], axes, placement, jnp.float32)
        after = jnp.sum(normed * head[:, 0], axis=-1)  # a matrix product would round on TPUs
        (before,) = by_target(rows.replace(asked=None), after)
        (known,) = by_token(rows, (rows.positions > 0) & (rows.segment_ids > 0))
        return (jnp.where(known, before, 0.0),)


def _spread(rows: ModelRows, placement: Placement | None) -> ModelRows:
    """Return rows of which each device has its tokens; what is of trajectories is as losses are."""
    apart = {name: getattr(rows, name) for name in ("source", "asked", "teacher_head")}
    return spread_tokens(rows.replace(**dict.fromkeys(apart)), placement).replace(**apart)


def _unpacked(rows: ModelRows) -> ModelRows:
    """Return rows [B, T] of one trajectory each."""
    if rows.source is None:
        return rows
    whole = rows.replace(source=None)
    return jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[2:]).at[rows.source].get(mode="fill", fill_value=0), whole
    )


def by_token(rows: ModelRows, *values: Array) -> tuple[Array, ...]:
    """Move what is known of tokens [R, L, ...] to [B, T, ...], 0 where there is none.

    But in trees each place is read at most once, so the backward pass adds nothing up.
    """
    if rows.source is None:
        return values
    return tuple(_read(rows, x, rows.source) for x in values)


def by_target(rows: ModelRows, *scores: Array) -> tuple[Array, ...]:
    """Move scores of targets, [R, L] or shorter by the last one, to [B, T], 0 for first tokens.

    A token's score lies where the token before it is, but in trees.
    """
    length = rows.tokens.shape[1]
    if rows.asked is not None:
        return tuple(_where(rows.asked, x) for x in by_token(rows, *scores))
    if rows.source is None:
        return tuple(_padded(x[:, : length - 1], 1, 0) for x in scores)
    whole = tuple(_padded(x, 0, length - x.shape[1]) for x in scores)
    return tuple(_read(rows, x, _before(rows)) for x in whole)


def _before(rows: ModelRows) -> Array:
    """Return where in the rows the token before each one stands, [B, T]."""
    assert rows.source is not None
    size, nowhere = rows.source.shape[0], rows.tokens.size + rows.source.size
    first = nowhere + jnp.arange(size, dtype=rows.source.dtype)[:, None]
    return jnp.concatenate([first, rows.source[:, :-1]], axis=1)


def _read(rows: ModelRows, x: Array, places: Array) -> Array:
    whole, once = x.reshape(-1, *x.shape[2:]), rows.ends is None
    return whole.at[places].get(mode="fill", fill_value=0, unique_indices=once)


class Targets(NamedTuple):
    """Hold what is scored, by the place that predicts it."""

    tokens: IntBT
    kept: Array | None  # [B, T, k] ids that the token was drawn from, then -1; None = all
    # of a teacher ids [B, T, K] and log-probs [B, T, K + 1], or states [B, T, D]; None = not asked
    teacher: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Head:
    """Describe the vocabulary head: which model, how its logits are scored, where its weights lie.

    Attributes:
        teacher_beta: see `generalized_jsd`; None = no divergence is asked for.
        teacher: head that makes logits of a teacher's states; None = of the likeliest ids it tells.
        top_k: likeliest ids that are asked for, with their log-probs; 0 = none.
        of_ids: the log-probs of ids that come with the targets are asked for.
        specs: how each weight is sharded; empty on one device.
        batch: mesh axes of tokens: over them weights are stored in parts, and whole when used.
        vocab: mesh axis over which the vocabulary is split, in storage and in use.
        shared: batch axes over which the vocabulary is split in use alone, and tokens go round.
        kernel: of `HEAD_LOG_PROBS`; "xla" is `score_columns`.
        chunk_tokens: scored together by `score_columns`, if their logits are not too many.
    """

    config: TransformerConfig | AdaptedModel
    temperature: float
    dtype: Any
    with_entropy: bool
    specs: tuple[tuple[str, PartitionSpec], ...] = ()
    batch: tuple[str, ...] = ()
    vocab: Any = None
    shared: tuple[str, ...] = ()
    kernel: str = REFERENCE
    chunk_tokens: int = CHUNK_TOKENS
    teacher_beta: float | None = None
    teacher: "Head | None" = None
    top_k: int = 0
    of_ids: bool = False

    @property
    def model(self) -> TransformerConfig:
        """Return the model; only its own head is scored by kernels."""
        assert isinstance(self.config, TransformerConfig)
        return self.config

    @property
    def matrix(self) -> str:
        """Return the name of the matrix."""
        return "embed" if self.model.tie_embeddings else "unembed"

    @property
    def vocab_dim(self) -> int:
        """Return which dim of the matrix is the vocabulary."""
        return head_axes(self.model)[self.matrix].index("vocab")

    @property
    def ids(self) -> tuple[str, ...]:
        """Return the mesh axes over which the vocabulary is split in use, the major one first."""
        vocab = (self.vocab,) if isinstance(self.vocab, str) else self.vocab or ()
        return (*vocab, *self.shared)

    def gather(self, weights: Params) -> Params:
        """Gather the weights over the batch axes: whole, or all of a device's ids."""

        def whole(name: str, w: Array) -> Array:
            for dim, axes in self._stored(name):
                if self.shared and name == self.matrix:
                    w = jax.lax.all_to_all(w, axes, self.vocab_dim, dim, tiled=True)
                else:
                    w = jax.lax.all_gather(w, axes, axis=dim, tiled=True)
            return w

        return {name: whole(name, w) for name, w in weights.items()}

    def scatter(self, gradients: Params) -> Params:
        """Turn gradients of the gathered weights into this device's part of their sum.

        The parts are put one behind the other first: a reduce-scatter over a minor dim becomes an
        all-reduce on TPUs, which sends twice as much.
        """

        def part(name: str, g: Array) -> Array:
            for dim, axes in self._stored(name):
                if self.shared and name == self.matrix:  # it has all tokens' gradient already
                    g = jax.lax.all_to_all(g, axes, dim, self.vocab_dim, tiled=True)
                    continue
                parts = jax.lax.axis_size(axes)
                split = g.reshape(*g.shape[:dim], parts, -1, *g.shape[dim + 1 :])
                g = jax.lax.psum_scatter(jnp.moveaxis(split, dim, 0), axes)
            return g

        return {name: part(name, g) for name, g in gradients.items()}

    def _stored(self, name: str) -> list[tuple[int, tuple[str, ...]]]:
        """Return the dims of a weight that are split over batch axes, and these axes."""
        spec = dict(self.specs).get(name, ())
        named = [(axes,) if isinstance(axes, str) else axes or () for axes in spec]
        return [(dim, axes) for dim, axes in enumerate(named) if set(axes) & set(self.batch)]

    def cast(self, weights: Params) -> Params:
        """Cast matrices to the compute dtype; the scale of the norm stays float32."""
        return {n: w if n == "final_norm" else w.astype(self.dtype) for n, w in weights.items()}

    def __call__(
        self, weights: Params, hidden: Array, targets: Targets, known: Params | None = None
    ) -> tuple[Array, ...]:
        """Return log-probs and entropy [B, C] for hidden [B, C, D] and targets [B, C], and more.

        What is asked for beside them is of all ids, whatever the targets were drawn from.

        Args:
            known: weights of the teacher's head, if there is one.
        """
        logits = every = self.logits(weights, hidden)
        if targets.kept is not None:
            logits = keep_only(logits, targets.kept, self.vocab)
        log_probs = token_log_probs(logits, targets.tokens, self.vocab)
        found = log_probs, entropy(logits, self.vocab) if self.with_entropy else 0 * log_probs
        if self.teacher_beta is not None:
            assert targets.teacher is not None
            found += (self.divergence(every, self.teacher_beta, targets.teacher, known),)
        if self.top_k:
            ids = top_ids(every, self.top_k, self.vocab)
            found += ids, event_log_probs(every, ids, self.vocab)
        if self.of_ids:
            assert targets.teacher is not None
            found += (event_log_probs(every, targets.teacher[0], self.vocab)[..., :-1],)
        return found

    def logits(self, weights: Params, hidden: Array) -> Array:
        """Return logits of this device's ids, divided by the temperature."""
        first = self.first(weights[self.matrix]) if self.ids else 0
        return unembed(self.config, weights, hidden, first) / self.temperature

    def first(self, matrix: Array) -> Array | int:
        """Return the first id of this device's part of the matrix."""
        return jax.lax.axis_index(self.ids) * matrix.shape[self.vocab_dim] if self.ids else 0

    def known(self, matrix: Array) -> Array | None:
        """Return how many ids of the matrix are no padding, the first ones; None = all."""
        known = self.model.known_ids
        return None if known is None else jnp.asarray(known - self.first(matrix))

    def divergence(
        self, logits: Array, beta: float, said: tuple[Any, ...], known: Params | None
    ) -> Array:
        """Return how far logits [B, C, V] are from what a teacher said, [B, C]."""
        if self.teacher is None:
            ids, log_probs = said
            return generalized_jsd(event_log_probs(logits, ids, self.vocab), log_probs, beta)
        assert known is not None
        theirs = self.teacher.logits(known, *said)
        theirs = theirs[..., : logits.shape[-1]]  # what a larger vocabulary has beyond is padding
        lacks = logits.shape[-1] - theirs.shape[-1]
        theirs = jnp.pad(theirs, ((0, 0), (0, 0), (0, lacks)), constant_values=FILTERED)
        student, teacher = (log_softmax(x, self.vocab) for x in (logits, theirs))
        found = generalized_jsd(student, teacher, beta)
        return found if self.vocab is None else jax.lax.psum(found, self.vocab)


def score(
    head: Head,
    params: Params,
    hidden: Array,
    targets: Targets,
    wanted: BoolBT,
    placement: Placement | None,
    known: Params | None = None,
) -> tuple[Array, ...]:
    """Score the wanted tokens, each device its own rows by its own slice of the vocabulary.

    The weights are gathered once in each direction and their gradient is scattered once, in their
    own dtype; beside them the devices exchange only sums over the vocabulary, and the tokens where
    `shared_axes` says so.

    Args:
        known: weights of the teacher's head, if there is one; they have no gradient.
    """
    axes = head_axes(head.config)
    # merged: an adapter of the head would be applied to every chunk anew
    weights = merge({name: params[name] for name in axes})
    device = jax.devices()[0] if placement is None else placement.mesh.devices.flat[0]
    chunk_tokens = CPU_CHUNK_TOKENS if device.platform == "cpu" else CHUNK_TOKENS
    head = dataclasses.replace(head, chunk_tokens=chunk_tokens)
    # kernels know the target and the sum over all ids; and not the head of another library
    distributions = head.teacher_beta is not None or head.top_k or targets.kept is not None
    distributions = distributions or head.of_ids
    by_columns = head.kernel == REFERENCE or distributions or not axes
    run: Any = score_columns if by_columns else score_tokens
    of_teacher = () if known is None else (known,)
    if placement is None:
        return run(head, weights, hidden, targets, wanted, *of_teacher)
    rows = placement.tokens
    placed, specs = _placed(head, weights, placement)
    more: tuple[Any, ...] = ()
    if head.teacher is not None and known is not None:
        teacher, of_known = _placed(head.teacher, known, placement)
        placed, more = dataclasses.replace(placed, teacher=teacher), (of_known,)
    if not by_columns:
        tokens = wanted.size // placement.size(placement.token_axes)
        shared = shared_axes(head.model, placement, head.kernel, head.dtype, tokens)
        placed = dataclasses.replace(placed, shared=shared)
    return jax.shard_map(
        functools.partial(run, placed),
        mesh=placement.mesh,
        in_specs=(specs, rows, rows, rows, *more),
        out_specs=rows,
        check_vma=False,
    )(weights, hidden, targets, wanted, *of_teacher)


def _placed(head: Head, weights: Params, placement: Placement) -> tuple[Head, Params]:
    """Return a head that knows where its weights lie, and their specs."""
    axes = head_axes(head.config)
    specs = {name: placement.spec(w.shape, axes[name]) for name, w in weights.items()}
    where = {"specs": tuple(specs.items()), "batch": placement.token_axes}
    return dataclasses.replace(head, **where, vocab=_vocab_axis(axes, specs)), specs


def shared_axes(
    model: TransformerConfig, placement: Placement, kernel: str, dtype: Any, tokens: int
) -> tuple[str, ...]:
    """Return the batch axes whose devices share the vocabulary; () = each gathers the matrix.

    Of F devices, V ids and D numbers of c bytes, each sends (F - 1) / F times: to gather the matrix
    and scatter its float32 gradient V D (c + 4) bytes; to turn both from columns to ids a share of
    1 / F of that, and for each of all N tokens its state, once in each direction, the float32
    gradient of it, the target twice, four slopes, and four sums there and back.

    Args:
        kernel: of `HEAD_LOG_PROBS`, but "xla".
        tokens: of the rows of one device; all may be wanted.
    """
    name = "embed" if model.tie_embeddings else "unembed"
    axes = head_axes(model)[name]
    sizes = {"vocab": model.vocab_size, "embed": model.hidden_size}
    spec = dict(zip(axes, placement.spec([sizes[x] for x in axes], axes), strict=True))
    shared = (spec["embed"],) if isinstance(spec["embed"], str) else spec["embed"] or ()
    parts, ids = placement.size(shared), model.vocab_size // placement.size(spec["vocab"])
    block = head_log_probs.block_tokens(kernel, parts * tokens, model.hidden_size)
    divisible = ids % parts == 0 and block % parts == 0
    if not (shared and set(shared) <= set(placement.token_axes) and divisible):
        return ()
    width, c = model.hidden_size, jnp.dtype(dtype).itemsize
    turned = ids // parts * width * (c + 4)
    visits = parts * tokens * (width * (2 * c + 4) + 2 * 4 + 4 * 4 + 2 * 4 * 4)
    return shared if turned + visits < ids * width * (c + 4) else ()


def _vocab_axis(axes: Params, specs: dict[str, PartitionSpec]) -> Any:
    """Return the mesh axis of the vocabulary dim of the head's matrix, if it is split."""
    name = "unembed" if "unembed" in axes else "embed"
    return specs[name][axes[name].index("vocab")] if name in axes else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def score_columns(
    head: Head,
    weights: Params,
    hidden: Array,
    targets: Targets,
    wanted: BoolBT,
    known: Params | None = None,
) -> tuple[Array, ...]:
    """Return `head(weights, hidden, targets)` at the wanted tokens, 0 elsewhere.

    The wanted tokens of each row are moved to its front, and a loop runs over chunks of columns for
    as long as a row has one left: work follows the longest response of the microbatch, though
    the shapes are fixed. Rows stay where they are, so a sharded batch stays sharded.

    Args:
        weights: of the head, as stored.
        hidden: [B, T, D]; targets: of [B, T] tokens; wanted: [B, T] bool.
        known: weights of the teacher's head, as stored; they have no gradient.
    """
    return _score_columns(head, weights, hidden, targets, wanted, known)[0]


def _score_columns(
    head: Head, weights: Params, hidden: Array, targets: Targets, wanted: Array, known: Any
) -> tuple[tuple[Array, ...], tuple]:
    whole, whole_known = head.gather(head.cast(weights)), _of_teacher(head, known)
    length = wanted.shape[1]
    order = jnp.argsort(~wanted, axis=1, stable=True)  # wanted first
    width = _columns(head, wanted.shape, whole)
    pad = -length % width
    front = jax.tree.map(lambda x: _take(x, order, pad), (hidden, targets))
    chunks = -(-wanted.sum(1).max() // width)

    def of_chunk(i: Array) -> tuple[Array, ...]:
        hidden, targets = jax.tree.map(lambda x: _chunk(x, i, width), front)
        return head(whole, hidden, targets, whole_known)

    def body(i: Array, out: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(_write(x, y, i, width) for x, y in zip(out, of_chunk(i), strict=True))

    shape, one = front[1].tokens.shape, jax.eval_shape(of_chunk, jnp.int32(0))
    zeros = tuple(jnp.zeros((*shape, *x.shape[2:]), x.dtype) for x in one)
    scores = jax.lax.fori_loop(0, chunks, body, zeros)
    back = jnp.argsort(order, axis=1)
    scores = tuple(_where(wanted, _take(x, back)) for x in scores)
    return scores, (weights, front, order, back, wanted, known, chunks)


def _score_columns_backward(head: Head, residuals: tuple, cotangents: tuple) -> tuple:
    weights, front, order, back, wanted, known, chunks = residuals
    whole, whole_known = head.gather(head.cast(weights)), _of_teacher(head, known)
    hidden, targets = front
    width = _columns(head, wanted.shape, whole)
    pad = targets.tokens.shape[1] - wanted.shape[1]
    cotangents = tuple(_take(_where(wanted, g), order, pad) for g in cotangents)

    def body(i: Array, grads: tuple[Params, Array]) -> tuple[Params, Array]:
        targets_i = jax.tree.map(lambda x: _chunk(x, i, width), targets)
        of_chunk = functools.partial(head, targets=targets_i, known=whole_known)
        pull_back = jax.vjp(of_chunk, whole, _chunk(hidden, i, width))[1]
        for_head, for_hidden = pull_back(tuple(_chunk(g, i, width) for g in cotangents))
        return (
            jax.tree.map(lambda total, g: total + g, grads[0], for_head),
            _write(grads[1], for_hidden, i, width),
        )

    no_gradient = {name: jnp.zeros(w.shape, weights[name].dtype) for name, w in whole.items()}
    zeros = (no_gradient, jnp.zeros_like(hidden))
    for_head, for_hidden = jax.lax.fori_loop(0, chunks, body, zeros)
    return head.scatter(for_head), _take(for_hidden, back), None, None, None  # of nothing else


def _of_teacher(head: Head, known: Params | None) -> Params | None:
    """Return the weights of the teacher's head as its logits need them."""
    if head.teacher is None or known is None:
        return None
    return head.teacher.gather(head.teacher.cast(known))


score_columns.defvjp(_score_columns, _score_columns_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def score_tokens(
    head: Head, weights: Params, hidden: Array, targets: Targets, wanted: BoolBT
) -> tuple[FloatBT, FloatBT]:
    """Do as `score_columns` does, by a kernel that goes through the vocabulary in tiles.

    The wanted tokens of all rows are moved to the front, and a loop runs over blocks of them for as
    long as there are any: work follows their number, though the shapes are fixed. Devices that
    share the vocabulary score each block together, an equal part of it from each.
    """
    return _score_tokens(head, weights, hidden, targets, wanted)[0]


def _score_tokens(
    head: Head, weights: Params, hidden: Array, targets: Targets, wanted: Array
) -> tuple[tuple[Array, Array], tuple]:
    whole = head.gather(head.cast(weights))
    matrix, scoring, vocab_dim = whole[head.matrix], _scoring(head), head.vocab_dim
    front = _Front.of(head, wanted)
    states = normalise(front.take(hidden), whole["final_norm"], head.model)
    tokens = front.take(targets.tokens)

    def body(i: Array, sums: head_log_probs.Sums) -> head_log_probs.Sums:
        local = _local(head, front.block(tokens, i), matrix)
        given = front.block(states, i), matrix, local, front.left(i)
        found = head_log_probs.sums(head.kernel, *given, scoring, vocab_dim, head.known(matrix))
        return jax.tree.map(lambda x, y: front.write(x, y, i), sums, found)

    zeros = head_log_probs.Sums(*[jnp.zeros(front.parts * len(tokens), jnp.float32)] * 4)
    sums = jax.lax.fori_loop(0, front.blocks, body, zeros).over(head.ids)
    sums = jax.tree.map(front.own, sums)
    log_probs, entropies = sums.log_probs(), sums.entropy()
    scores = front.put_back(log_probs), front.put_back(entropies)
    if not head.with_entropy:
        scores = scores[0], jnp.zeros_like(scores[0])
    return scores, (weights, hidden, targets, wanted, sums.log_total(), entropies)


def _score_tokens_backward(head: Head, residuals: tuple, cotangents: tuple) -> tuple:
    weights, hidden, targets, wanted, log_total, entropies = residuals
    whole = head.gather(head.cast(weights))
    matrix, scoring, vocab_dim = whole[head.matrix], _scoring(head), head.vocab_dim
    front = _Front.of(head, wanted)
    states, pull_norm = jax.vjp(
        lambda x, scale: normalise(x, scale, head.model), front.take(hidden), whole["final_norm"]
    )
    tokens = front.take(targets.tokens)
    if head.vocab is not None:
        cotangents = jax.lax.psum(cotangents, head.vocab)  # each device was given its share
    known = (jnp.where(front.used, x, 0) for x in (log_total, entropies))
    slopes = head_log_probs.Slopes(*known, *(front.take(g) for g in cotangents))

    def body(i: Array, totals: tuple[Array, Array]) -> tuple[Array, Array]:
        for_states, for_matrix = totals
        y, ids, part = jax.tree.map(lambda x: front.block(x, i), (states, tokens, slopes))
        given = y, matrix, _local(head, ids, matrix), front.left(i), part, for_matrix
        found, for_matrix = head_log_probs.gradients(
            head.kernel, *given, scoring, vocab_dim, head.known(matrix)
        )
        return front.write(for_states, front.total(found).astype(states.dtype), i), for_matrix

    zeros = jnp.zeros_like(states), jnp.zeros(matrix.shape, jnp.float32)
    for_states, for_matrix = jax.lax.fori_loop(0, front.blocks, body, zeros)
    for_front, for_scale = pull_norm(for_states)
    for_head = {"final_norm": for_scale, head.matrix: for_matrix}
    for_head = {name: g.astype(weights[name].dtype) for name, g in for_head.items()}
    none = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), (targets, wanted))
    return head.scatter(for_head), front.put_back(for_front), *none


score_tokens.defvjp(_score_tokens, _score_tokens_backward)


def _scoring(head: Head) -> head_log_probs.Scoring:
    # (cap tanh(l / (d cap))) / t of logits l that the model divides by d
    divisor, cap = head.model.logits_scaling, head.model.final_softcap
    return head_log_probs.Scoring(
        head.temperature * divisor, None if cap is None else cap * divisor
    )


def _local(head: Head, tokens: Array, matrix: Array) -> Array:
    """Return the tokens numbered by the ids of this device's matrix, -1 where they are others'."""
    size, first = matrix.shape[head.vocab_dim], head.first(matrix)
    return jnp.where((tokens >= first) & (tokens < first + size), tokens - first, -1)


class _Front(NamedTuple):
    """Move the wanted tokens of [B, T] to the front of one row [N], of whole parts of blocks.

    Attributes:
        wanted: [B, T] bool; number: [] of them.
        order: [N] the token at each place, anyone's behind the wanted ones.
        blocks: [] that have a wanted token, of any device if some are `shared`.
        size: tokens of a block, of which this device has one of `parts`.
        shared: mesh axes of the devices that have the others.
    """

    wanted: Array
    number: Array
    order: Array
    blocks: Array
    size: int
    parts: int
    shared: tuple[str, ...]

    @classmethod
    def of(cls, head: Head, wanted: Array) -> "_Front":
        parts = jax.lax.axis_size(head.shared) if head.shared else 1
        tokens, number = parts * wanted.size, wanted.sum()
        size = head_log_probs.block_tokens(head.kernel, tokens, head.model.hidden_size)
        each = size // parts
        blocks = -(-number // each)
        if head.shared:
            blocks = jax.lax.pmax(blocks, head.batch)  # they wait for each other in each
        order = jnp.argsort(~wanted.reshape(-1), stable=True)
        order = jnp.pad(order, (0, -wanted.size % each))
        return cls(wanted, number, order, blocks, size, parts, head.shared)

    @property
    def used(self) -> Array:
        """Return which places hold a wanted token, [N] bool."""
        return jnp.arange(len(self.order)) < self.number

    def left(self, i: Array) -> Array:
        """Return how many tokens of block i may be wanted; the first ones."""
        if self.shared:  # a part's wanted ones lie in front of it, not of the block
            return jnp.int32(self.size)
        return jnp.minimum(self.number - i * self.size, self.size)

    def take(self, x: Array) -> Array:
        """Return x [B, T, ...] as [N, ...], 0 behind the wanted tokens."""
        taken = jnp.asarray(x).reshape(-1, *x.shape[2:])[self.order]
        return jnp.where(self.used.reshape(-1, *(1,) * (x.ndim - 2)), taken, 0)

    def put_back(self, x: Array) -> Array:
        """Return x [N, ...] as [B, T, ...], 0 where a token is not wanted."""
        place = jnp.cumsum(self.wanted.reshape(-1)) - 1
        wanted = self.wanted.reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.where(wanted, x[place], 0).reshape(*self.wanted.shape, *x.shape[1:])

    def block(self, x: Array, i: Array) -> Array:
        """Return block i of x [N, ...], with the parts of all devices that share it."""
        each = self.size // self.parts
        part = jax.lax.dynamic_slice_in_dim(x, i * each, each)
        return jax.lax.all_gather(part, self.shared, tiled=True) if self.shared else part

    def total(self, block: Array) -> Array:
        """Return this device's part of the sum of a block over those that share it."""
        return jax.lax.psum_scatter(block, self.shared, tiled=True) if self.shared else block

    def own(self, x: Array) -> Array:
        """Return this device's [N] of x [parts x N], the blocks one behind the other."""
        if not self.shared:
            return x
        parts = x.reshape(-1, self.parts, self.size // self.parts)
        return parts[:, jax.lax.axis_index(self.shared)].reshape(-1)

    def write(self, x: Array, new: Array, i: Array) -> Array:
        """Return x with other numbers of block i, of this device or of all."""
        return jax.lax.dynamic_update_slice_in_dim(x, new, i * len(new), axis=0)


def _columns(head: Head, shape: tuple[int, ...], weights: Params) -> int:
    axes = head_axes(head.config)
    sizes = (dict(zip(axes[name], w.shape, strict=True)) for name, w in weights.items())
    vocabulary = max((size.get("vocab", 1) for size in sizes), default=1)
    return chunk_columns(head.chunk_tokens, vocabulary, *shape)


def chunk_columns(chunk_tokens: int, vocabulary: int, rows: int, length: int) -> int:
    """Return how many columns the head scores together, for rows [rows, length] on one device."""
    width = max(min(chunk_tokens, CHUNK_LOGITS // vocabulary) // rows, 1)
    return min(width - width % 8 or width, length)  # TPUs lay columns out by eights


def _take(x: Array, order: Array, pad: int = 0) -> Array:
    """Return x [B, T, ...] with each row's columns in `order` [B, T], then `pad` columns of 0."""
    index = order.reshape(*order.shape, *(1,) * (x.ndim - 2))
    taken = jnp.take_along_axis(x, index, axis=1)
    return _padded(taken, 0, pad)


def _padded(x: Array, before: int, after: int) -> Array:
    """Return x [B, T, ...] with so many columns of 0 around it."""
    return jnp.pad(x, ((0, 0), (before, after), *((0, 0),) * (x.ndim - 2)))


def _where(wanted: BoolBT, x: Array) -> Array:
    """Return x [B, T, ...] where it is wanted, else 0."""
    wanted = wanted.reshape(*wanted.shape, *(1,) * (x.ndim - 2))
    return jnp.where(wanted, x, jnp.zeros((), x.dtype))


def _chunk(x: Array, i: Array, width: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, i * width, width, axis=1)


def _write(x: Array, part: Array, i: Array, width: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, i * width, axis=1)
