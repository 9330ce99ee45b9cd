"""How far apart sampler and trainer are: over the whole vocabulary, by depth of context and layer.

Two kinds of lines. Those of logits run the functions that the engine's blocks consist of, in the
engine's shapes, and the trainer's forward pass, over rows of the run's prompts one after the other:
every token of a row is prefilled, the last ones of each depth are decoded as well. Those of
log-probs have a whole engine draw tokens in the ways in which a run does, and the trainer score
them. With `trainer.exact` all differences are 0; without it they are what a run has.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl import config as cfg
from jaxrl.data.microbatches import Microbatching
from jaxrl.data.packing import round_up
from jaxrl.models.adapter import AdaptedModel
from jaxrl.models.architecture import TransformerConfig, keeps_states
from jaxrl.models.lora import trained, with_trained
from jaxrl.parallel.jit_once import Bound
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.native.programs import Programs, shape_of
from jaxrl.rollout.protocol import Completion, Request, Sampling
from jaxrl.tools.doctor.examined_run import ExaminedRun
from jaxrl.tools.doctor.finding import Finding, Unavailable, failed, not_here, passed
from jaxrl.tools.doctor.hidden_states import SAMPLER, HiddenStates, original
from jaxrl.tools.doctor.sampler import batch_of, small_engine, unfiltered
from jaxrl.train import meshes
from jaxrl.training.forward_pass import ForwardPass

MOST, CPU_MOST = 16_384, 1_024  # tokens of a row
EDGES = (0, 1_024, 4_096)  # depths of long rows; others are cut into quarters
COMPARED, DECODED = 1_024, 16  # last tokens of each depth that are compared, and decoded, at most
DRAWN, BLOCK, TURNS = 16, 4, 3  # tokens of a sample, and of a block; turns of a conversation
BINS = 1 << 15  # of the upper 16 bits of a float32 above 0: a percentile to 1 %
PAIRS = ("prefill", "train"), ("decode", "train"), ("prefill", "decode"), ("score", "train")
PAIRS_OF_SAMPLES = ("engine", "score"), ("score", "train")
HEADER = "what", "depth", "tokens", "of", "max", "p99.9", "first layer"
UNSEEN = "unseen"  # the layers agree where they are looked at, by programs of their own

Text = Callable[[int, int], np.ndarray]  # of `_text`
Drawn = list[tuple[tuple[int, ...], Completion]]  # prompts and what was drawn


class Depth(NamedTuple):
    """Hold a range of positions: so many tokens stand before."""

    begin: int
    end: int

    def last(self, most: int) -> range:
        """Return its last positions, at most so many."""
        return range(max(self.begin, self.end - most), self.end)


@dataclasses.dataclass
class Line:
    """Hold the differences of one pair at one depth.

    Attributes:
        way: in which both were computed.
        kind: of conversation; "" = the line is of logits.
        counts: [BINS] of differences, by the upper bits of their float32.
        worst: the row with the largest difference.
        layer: the first one that differs there, in words.
    """

    way: tuple[str, str]
    depth: Depth
    kind: str = ""
    tokens: int = 0
    largest: float = 0.0
    worst: int = 0
    counts: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(BINS, np.int64))
    layer: str = "-"

    def add(self, a: np.ndarray, b: np.ndarray, rows: np.ndarray) -> None:
        """Count the differences of float32 arrays [n, ...] of tokens of these rows [n]."""
        with np.errstate(invalid="ignore"):
            apart = np.where(a == b, np.float32(0), np.abs(a - b))
        apart = np.where(np.isnan(apart), np.float32(np.inf), apart).reshape(len(rows), -1)
        self.counts += np.bincount(apart.view(np.uint32).ravel() >> 16, minlength=BINS)
        self.tokens += len(rows)
        by_token = apart.max(axis=1)
        if by_token.max() > self.largest:
            self.largest, self.worst = float(by_token.max()), int(rows[by_token.argmax()])

    @property
    def percentile(self) -> float:
        """Return the 99.9th percentile of the differences, rounded down to 8 bits."""
        found = np.searchsorted(self.counts.cumsum(), 0.999 * self.counts.sum())
        return float(np.array(found << 16, np.uint32).view(np.float32))

    @property
    def name(self) -> str:
        """Return what is compared."""
        pair = ", ".join(self.way)
        return f"{self.kind}: {pair}" if self.kind else pair

    def cells(self) -> tuple[Any, ...]:
        """Return the row of the table, see `HEADER`."""
        of = "log-probs" if self.kind else "logits"
        depth = f"{self.depth.begin}-{self.depth.end}"
        return self.name, depth, self.tokens, of, self.largest, self.percentile, self.layer


def exact(examined: ExaminedRun) -> Finding:
    """Measure the differences of sampler and trainer; with `trainer.exact` there must be none."""
    trainer, config, model = examined.trainer, examined.config, examined.trainer.model
    if not cfg.in_process(config) or config.generator.inference_engine.backend != "native":
        return not_here("the numbers of these servers cannot be looked at")
    if isinstance(model, AdaptedModel):
        return not_here("a flax module computes its logits in its own way")
    if keeps_states(model):
        return not_here("layers that keep a state have no exact mode; see 'sampler.first'")
    if trainer.forward_pass.microbatching.context > 1:
        return not_here("rows over several devices have no exact mode; see 'sampler.first'")
    trainer.engine.sleep()  # there is memory for one
    try:
        lines = _measured(examined, model)
    finally:
        trainer.sync_weights(int(trainer.state.step))
    table = (HEADER, *(line.cells() for line in lines))
    return dataclasses.replace(_judged(config.trainer.exact, model.vocab_size, lines), table=table)


def _judged(mode: str, ids: int, lines: Sequence[Line]) -> Finding:
    of_logits, drawn = (
        sum(line.tokens for line in lines if line.way == way)
        for way in (PAIRS[0], PAIRS_OF_SAMPLES[0])
    )
    about = (
        f"largest difference, {of_logits} tokens by all {ids} ids and {drawn} sampled ones; "
        f"trainer.exact={mode!r}"
    )
    worst = max(lines, key=lambda line: line.largest)
    if mode == "off":
        return passed(worst.largest, "", f"{about}, which promises none")
    if worst.largest == 0:
        return passed(0, 0, about)
    others = sum(line.largest > 0 for line in lines) - 1
    cause = (
        f"{worst.name}: up to {worst.largest:.2g} at depth {worst.depth.begin}-{worst.depth.end}, "
        f"first layer: {worst.layer}" + (f"; {others} more lines differ" if others else "")
    )
    fix = (
        "see that 'weights.first' passes; else report the table (--json=FILE has it), and set "
        "trainer.exact='off' until it is mended"
    )
    return failed(worst.largest, 0, about, cause=cause, fix=fix)


def _measured(examined: ExaminedRun, model: TransformerConfig) -> list[Line]:
    trainer = examined.trainer
    wanted = cfg.longest_row(examined.full_config)
    wanted = min(wanted, CPU_MOST if jax.default_backend() == "cpu" else MOST)
    shape = shape_of(jax.default_backend())
    # long enough for a prompt of several chunks, and rows of several pages
    length = round_up(max(wanted, shape.tiles * shape.tile + shape.page), shape.page)
    engine = small_engine(
        examined,
        max_num_seqs=2 * meshes(examined.config)[1].devices.size,
        max_num_batched_tokens=1,  # a chunk in each block
        steps_per_dispatch=BLOCK,
        max_model_len=length,
        enable_prefix_caching=True,
        programs=functools.partial(_tight, length),
    )
    engine.update_weights(trainer.params, 0)
    depths = _depths(length)
    decoded = [position for depth in depths for position in depth.last(DECODED)]
    states = HiddenStates(trainer.forward_pass, trainer.params, model, engine, length, decoded)
    text = functools.partial(_text, np.concatenate([p.tokens for p in trainer.prompts_of(0)]))
    rows = np.stack([text(length, number) for number in range(states.rows)])
    lines = _of_logits(states, rows, depths)
    drawn = _conversations(engine, unfiltered(examined), text, length)
    return lines + _of_samples(examined, states, drawn, rows, depths)


def _tight(length: int, *given: Any, **options: Any) -> Programs:
    """Return programs with a page too few for all slots to have one more than half a row's."""
    whole = Programs(*given, **options)
    each, row = whole.slots // whole.parts, length // whole.shape.page
    held = -(-(row + 2) // each) - 1  # pages of each slot: there are enough for one whole row
    options["pages"] = each * (held + 1) - 1
    return Programs(*given, **options)


def _depths(length: int) -> list[Depth]:
    edges = [edge for edge in EDGES if edge < length]
    if length <= EDGES[-1]:
        edges = [length * quarter // 4 for quarter in range(4)]
    return [Depth(*pair) for pair in itertools.pairwise((*edges, length))]


def _text(prompts: np.ndarray, length: int, number: int) -> np.ndarray:
    """Return tokens of the run's prompts [length], which begin elsewhere for each number."""
    return np.resize(np.roll(prompts, -number), length).astype(np.int32)


# ---------------------------------------------------------------- logits


def _of_logits(states: HiddenStates, rows: np.ndarray, depths: Sequence[Depth]) -> list[Line]:
    """Compare the logits of every token of rows [R, T], in each of `PAIRS`."""
    hidden = states.of_rows(rows)
    lines = [Line(pair, depth) for pair in PAIRS for depth in depths]
    for depth in depths:
        here = [line for line in lines if line.depth == depth]
        decoded = depth.last(DECODED)
        rest = [position for position in depth.last(COMPARED) if position not in decoded]
        for positions in (rest, decoded):
            some = [line for line in here if positions is decoded or "decode" not in line.way]
            needed = dict.fromkeys(way for line in some for way in line.way)
            for of_rows, at in _pieces(len(rows), positions, states.piece):
                logits = {way: states.logits(way, hidden[way][of_rows, at]) for way in needed}
                for line in some:
                    line.add(logits[line.way[0]], logits[line.way[1]], of_rows)
    _find_layers(states, rows, lines, hidden)
    return lines


def _pieces(
    rows: int, positions: Sequence[int], size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Return row and position of tokens, at most `size` at a time."""
    pairs = np.array([(row, at) for row in range(rows) for at in positions]).reshape(-1, 2)
    for begin in range(0, len(pairs), size):
        yield pairs[begin : begin + size, 0], pairs[begin : begin + size, 1]


def _find_layers(
    states: HiddenStates,
    rows: np.ndarray,
    lines: Sequence[Line],
    hidden: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Note of lines that differ which layer does so first, in their worst row of rows [R, T].

    Of a line of log-probs the ways that a token is decoded in and scored are looked at.

    Args:
        hidden: states that the logits of lines are made of; None = lines of log-probs.
    """
    known = functools.cache(lambda ways, row: states.of_layers(ways, rows, row))

    def of_layers(way: str, row: int) -> np.ndarray:
        return known(SAMPLER if way in SAMPLER else (way,), row)[way]

    for line in lines:
        if line.largest == 0:
            continue
        ways = ("decode", line.way[1]) if line.way[0] == "engine" else line.way
        at = list(line.depth.last(DECODED if "decode" in ways else COMPARED))
        if hidden and not (hidden[ways[0]] != hidden[ways[1]])[line.worst, at].any():
            line.layer = "the head"
            continue
        one, other = (of_layers(way, line.worst)[:, at] for way in ways)
        layers = np.flatnonzero((one != other).any(axis=(1, 2)))
        line.layer = f"layer {layers[0]}" if len(layers) else UNSEEN


# ---------------------------------------------------------------- samples


def _conversations(
    engine: NativeEngine, sampling: Sampling, text: Text, length: int
) -> dict[str, Drawn]:
    """Draw tokens in the ways in which a run does, from an engine of few pages.

    Raises:
        Unavailable: it did not reuse a prefix, or suspended no row.
    """
    sampling = dataclasses.replace(
        sampling, max_tokens=DRAWN, min_tokens=0, stop_token_ids=(), stop=()
    )
    page, numbers = engine.programs.shape.page, itertools.count()

    def draw(prompts: Sequence[np.ndarray], samples: int = 1, **options: Any) -> Drawn:
        asked = []
        for prompt in prompts:
            keys = tuple((next(numbers), 0) for _ in range(samples))
            asked.append(Request(tuple(prompt.tolist()), keys, sampling, **options))
        answers = engine.generate(asked)
        pairs = zip(asked, answers, strict=True)
        return [(request.prompt_tokens, one) for request, group in pairs for one in group]

    found = {"chunked": draw([text(length - DRAWN, 0)])}

    beginning = text(length // 2, 1)
    group = draw([beginning], samples=2)
    longer = np.concatenate([beginning, group[0][1].tokens, text(page // 2, 2)])
    before = engine.prefilled_tokens
    found["reused"] = group + draw([longer])
    if engine.prefilled_tokens - before >= len(longer) - 1:
        raise Unavailable("the engine reused nothing of a prompt that it knows")

    programs = engine.programs
    each = programs.slots // programs.parts
    held = (programs.pages + 1) // each - 1
    found["preempted"] = draw([text(held * page - 2 * BLOCK, 3 + i) for i in range(programs.slots)])
    if not engine.suspended:
        raise Unavailable(f"{programs.slots} rows had room in {programs.pages} pages of each part")

    conversation: Future[None] = Future()
    prompt, found["turns"] = text(page // 4, 0), []
    try:
        for turn in range(TURNS):
            found["turns"] += draw([prompt], conversations=(conversation,))
            said = text((length - page // 4) // TURNS - DRAWN, turn)
            prompt = np.concatenate([prompt, found["turns"][-1][1].tokens, said])
    finally:
        conversation.cancel()
    return found


def _of_samples(
    examined: ExaminedRun,
    states: HiddenStates,
    drawn: Mapping[str, Drawn],
    rows: np.ndarray,
    depths: Sequence[Depth],
) -> list[Line]:
    """Compare the log-probs of sampled tokens with the trainer's score, and that with training."""
    samples = list(itertools.chain(*drawn.values()))
    kinds = np.repeat(list(drawn), [len(some) for some in drawn.values()])
    batch = batch_of([prompt for prompt, _ in samples], [completion for _, completion in samples])
    forward_pass, params = examined.trainer.forward_pass, examined.trainer.params
    groups = forward_pass.microbatching.groups
    total = round_up(len(samples), groups)
    width = batch.tokens.shape[1]  # one, so that each program is compiled once
    cut = Microbatching(rows=groups, total=total, groups=groups, widths=(width,))
    forward = Bound(_differentiated, original(forward_pass.forward))
    train = ForwardPass(forward, forward_pass.place, cut, forward_pass.options)
    log_probs = {
        "engine": np.asarray(batch.rollout_log_probs),
        "score": forward_pass(params, batch, microbatching=cut)[0],
        "train": train(params, batch)[0],
    }
    lines = []
    for kind, pair, depth in itertools.product(drawn, PAIRS_OF_SAMPLES, depths):
        of_rows, at = np.nonzero(np.asarray(batch.loss_mask))
        # so many tokens stand before
        here = (kinds[of_rows] == kind) & (at > depth.begin) & (at <= depth.end)
        if not here.any():
            continue
        of_rows, at = of_rows[here], at[here]
        line = Line(pair, depth, kind)
        sampler, scorer = (log_probs[way][of_rows, at] for way in pair)
        line.add(sampler, scorer, of_rows)
        lines.append(line)
        worst = np.asarray(batch.tokens[line.worst][: batch.lengths[line.worst]])
        in_its_place = rows.copy()
        in_its_place[0, : len(worst)] = worst
        line.worst = 0
        _find_layers(states, in_its_place, [line])
    return lines


def _differentiated(
    forward: Callable[..., Any], params: Any, rows: Any, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """Return log-probs [B, T] and, of the same shape, the norm of their sum's gradient."""

    def scored(new: Any) -> jax.Array:
        return forward(with_trained(params, new), rows, **options)[0]

    log_probs, pull = jax.vjp(scored, trained(params))
    norm = optax.global_norm(pull(jnp.ones_like(log_probs)))  # so that it is computed
    return log_probs, jnp.full_like(log_probs, norm)
