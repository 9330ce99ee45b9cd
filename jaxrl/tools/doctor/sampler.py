"""The engine samples from the trainer's weights: by its log-probs, and by checksums."""

import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import config as cfg
from jaxrl.data.packing import collate
from jaxrl.models.adapter import AdaptedModel
from jaxrl.parallel.checksums import checksums
from jaxrl.parallel.offload import on_device
from jaxrl.rollout.conversations.conversation import sample_key, sampling_of
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Completion, Request, Sampling
from jaxrl.tools.doctor.bounds import EXACT, sampler_bounds
from jaxrl.tools.doctor.finding import Finding, Unavailable, failed, not_here, passed
from jaxrl.tools.doctor.subject import Subject
from jaxrl.train import meshes
from jaxrl.types import GeneratorOutput, TrainBatch

SAMPLES = 4  # of each prompt of a batch
NOISE, MOVED = 0.02, 10  # of each array's size; times the bound on the mean: log-probs have moved
UPDATES, SLOTS, CHANGE = 3, 2, 0.2  # with samples in flight; of their engine; noise of each update


class Said(NamedTuple):
    """Hold what the engine drew, and how far the trainer is from it.

    Attributes:
        difference: of the log-prob of each token.
        worst: prompt and place of the largest one, in words.
    """

    completions: list[Completion]
    batch: TrainBatch
    difference: np.ndarray
    worst: str


def first(subject: Subject) -> Finding:
    """Check the log-probs of sampled tokens after the first sync."""
    said = _first(subject)
    if isinstance(said, str):
        return not_here(said)
    return _finding(subject, said, "after a sync", _blame_numbers(subject))


def update(subject: Subject) -> Finding:
    """Check the log-probs of sampled tokens after an update and another sync."""
    before = _first(subject)
    if isinstance(before, str):
        return not_here(before)
    moved = _updated(subject)
    said = _ask(subject)  # with the same keys: other weights give other log-probs
    stale = [_content(x) for x in said.completions] == [_content(x) for x in before.completions]
    blame = _blame_numbers(subject)
    if stale:
        blame = (
            "stale weights: after the update the engine draws the same tokens with the same "
            "log-probs as before it",
            "see that every call of its update_weights takes over the parameters it is given",
        )
    about = f"after an update and a sync, which moved log-probs by {moved:.2g} on average"
    return _finding(subject, said, about, blame)


def in_flight(subject: Subject) -> Finding:
    """Check log-probs of samples in flight when weights change, and of those that begin after it.

    With the run's model in an engine of few slots and short blocks, which reuses what it can: a
    group of which most wait for slots, then turns that go on from it, two of them alike. With
    `recompute_kv_on_update` each token is of one version; without it none is of older keys and
    values than of the version that its sample began with.
    """
    trainer, config = subject.trainer, subject.run.config
    if not cfg.in_process(config) or config.generator.inference_engine.backend != "native":
        return not_here("keys and values of these servers cannot be looked at")
    if isinstance(trainer.model, AdaptedModel):
        return not_here("a flax module keeps no keys and values")
    if (tokens := config.generator.sampling_params.max_generate_length // 2) < 2:
        return not_here("responses are too short to be in flight")
    trainer.engine.sleep()  # there is memory for one
    try:
        kept, anew = (_in_flight(subject, tokens, recompute) for recompute in (False, True))
    finally:
        trainer.sync_weights(int(trainer.state.step))
    bounds, sure = sampler_bounds(config), np.concatenate([kept.sure, anew.sure])
    mean, largest = float(sure.mean()), float(sure.max())
    about = f"{len(sure)} tokens of one version over {UPDATES} updates in flight, {kept.mixed} not"
    figure, bound = f"mean {mean:.1e} max {largest:.1e}", f"{bounds.mean:g}, {bounds.max:g}"
    if mean <= bounds.mean and largest <= bounds.max and not kept.late + anew.mixed:
        return passed(figure, bound, about)
    cause = "tokens are not of the weights that they are said to be drawn from"
    if kept.late + anew.mixed:
        cause = (
            f"{kept.late} tokens of samples that began after an update are of older keys and "
            f"values; with recompute_kv_on_update {anew.mixed} are"
        )
    fix = "see that an update leaves no key or value in the cache that a later sample finds"
    return failed(figure, bound, about, cause=cause, fix=fix)


def weights(subject: Subject) -> Finding:
    """Check what the engine holds after the first sync, array by array."""
    subject.trainer.sync_weights(int(subject.trainer.state.step))
    return _checked(subject, "after a sync")


def weights_update(subject: Subject) -> Finding:
    """Check what the engine holds after an update and another sync, array by array."""
    _first(subject)
    _updated(subject)
    return _checked(subject, "after an update and a sync")


def reference(subject: Subject) -> Finding:
    """Check that an update of the policy leaves the log-probs of the reference as they are."""
    before = subject.batch.ref_log_probs
    if before is None:
        return not_here("the run has no reference")
    _first(subject)
    _updated(subject)  # no epoch ends with it: update_ref_every_epoch moves nothing yet
    after = subject.trainer.add_log_probs(subject.collated).ref_log_probs
    mask = np.asarray(subject.collated.loss_mask) > 0
    figure = float("inf") if after is None else float(np.abs(before - after)[mask].max())
    bound, about = EXACT.mean, f"log-probs of {int(mask.sum())} tokens before and after an update"
    if figure <= bound:
        return passed(figure, bound, about)
    cause = "the reference moves with the policy: its log-probs are others after an update"
    fix = "score ref_log_probs with the trainer's ref_params, never with the trained parameters"
    return failed(figure, bound, about, cause=cause, fix=fix)


# ---------------------------------------------------------------- log-probs


def _first(subject: Subject) -> Said | str:
    """Return what was drawn before the weights moved, or why the engine gives no log-probs."""
    if "sampled" not in subject.known:
        subject.trainer.sync_weights(int(subject.trainer.state.step))
        if subject.run.config.generator.sampling_params.logprobs is None:
            subject.known["sampled"] = (
                "generator.sampling_params.logprobs=None: rollouts carry none"
            )
        else:
            subject.known["sampled"] = _ask(subject)
    return subject.known["sampled"]


def _ask(subject: Subject) -> Said:
    """Draw samples without filters, which would make the sampler's distribution another one."""
    trainer, sampling = subject.trainer, _unfiltered(subject)
    prompts = trainer.prompts_of(0)
    names = trainer.config.trainer.seed, "doctor"
    keys = [tuple(sample_key(*names, p.uid, i) for i in range(SAMPLES)) for p in prompts]
    requests = [Request(p.tokens, k, sampling) for p, k in zip(prompts, keys, strict=True)]
    groups = trainer.engine.generate(requests)
    rows = [(p, c) for p, cs in zip(prompts, groups, strict=True) for c in cs]
    if not all(c.log_probs for _, c in rows):
        raise Unavailable("the engine gave no log-probs, and sampling_params.logprobs wants them")
    batch = _batch([p.tokens for p, _ in rows], [c for _, c in rows])
    scored = _scored(subject, batch)
    mask = np.asarray(batch.loss_mask) > 0
    assert batch.rollout_log_probs is not None
    difference = np.where(mask, np.abs(scored - batch.rollout_log_probs), 0.0)
    row, place = np.unravel_index(int(difference.argmax()), difference.shape)
    at = int(place) - len(rows[row][0].tokens)
    worst = f"token {at} of a sample of prompt {rows[row][0].uid}"
    return Said([c for _, c in rows], batch, difference[mask], worst)


def _unfiltered(subject: Subject) -> Sampling:
    trainer = subject.trainer
    return dataclasses.replace(
        sampling_of(trainer.config.generator.sampling_params, trainer.eos_token_ids),
        **{"top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
        keep_sampling_mask=False,
    )


def _batch(prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> TrainBatch:
    tokens = [c.tokens for c in completions]
    output = GeneratorOutput(
        prompt_token_ids=[list(p) for p in prompts],
        response_ids=tokens,
        rewards=[[0.0] * len(t) for t in tokens],
        loss_masks=[[1] * len(t) for t in tokens],
        stop_reasons=[c.stop_reason for c in completions],
        rollout_logprobs=[list(c.log_probs) for c in completions],
        policy_versions=[c.versions[0] for c in completions],
        rollout_metrics={},
        token_versions=[c.versions for c in completions],
    )
    if all(c.context_versions for c in completions):
        output["context_versions"] = [c.context_versions for c in completions]
    return collate(output, index=np.arange(len(tokens)))


def _scored(subject: Subject, batch: TrainBatch, params: Any = None) -> np.ndarray:
    """Return log-probs [B, T] of parameters, None = the trainer's.

    At most a step's rows are scored at a time.
    """
    forward_pass, found = subject.trainer.forward_pass, []
    most = forward_pass.microbatching.total
    for first_row in range(0, len(batch.index), most):
        part = jax.tree.map(lambda x, i=first_row: x[i : i + most], batch)
        found.append(forward_pass(subject.trainer.params if params is None else params, part)[0])
    return np.concatenate(found)


def _content(completion: Completion) -> tuple[list[int], list[float]]:
    return completion.tokens, completion.log_probs


def _finding(subject: Subject, said: Said, about: str, blame: tuple[str, str]) -> Finding:
    """Judge the mean and the largest difference, each by its bound."""
    bounds, difference = sampler_bounds(subject.run.config), said.difference
    mean, largest = float(difference.mean()), float(difference.max())
    figure, bound = f"mean {mean:.1e} max {largest:.1e}", f"{bounds.mean:g}, {bounds.max:g}"
    about = f"{len(difference)} tokens {about}"
    if mean <= bounds.mean and largest <= bounds.max:
        return passed(figure, bound, about)
    cause, fix = blame
    return failed(figure, bound, about, cause=f"{cause}; largest at {said.worst}", fix=fix)


def _blame_numbers(subject: Subject) -> tuple[str, str]:
    engine = subject.run.config.generator.inference_engine
    return (
        f"sampler and trainer compute different log-probs for the same tokens (engine "
        f"{engine.backend!r}, {engine.model_dtype})",
        "see that both have the same weights (check 'weights'), temperature, rotary settings and "
        "chat template, and that the engine reports log-probs after the temperature",
    )


# ---------------------------------------------------------------- an update


def _updated(subject: Subject) -> float:
    """Train a step, add noise until log-probs have clearly moved, and sync; return by how much."""
    if "moved" not in subject.known:
        trainer = subject.trainer
        subject.train()
        said = _first(subject)
        bound = sampler_bounds(subject.run.config).mean
        subject.known["moved"] = _move(subject, said, MOVED * bound)
        trainer.sync_weights(int(trainer.state.step))
    return subject.known["moved"]


def _move(subject: Subject, said: Said | str, wanted: float) -> float:
    """Add noise of growing size; returns the mean change of the log-probs of earlier samples."""
    trainer, scale = subject.trainer, NOISE
    for number in range(8):
        params = noisy(on_device(trainer.state.params), scale, number)
        trainer.state = trainer.updater.offload(trainer.state.replace(params=params))
        if isinstance(said, str):
            return float("nan")
        mask, held = np.asarray(said.batch.loss_mask) > 0, said.batch.rollout_log_probs
        moved = float(np.abs(_scored(subject, said.batch) - held)[mask].mean())
        if moved >= wanted:
            return moved
        scale *= 2
    raise Unavailable(f"noise of {scale:g} in the trained parameters moves no log-prob")


def noisy(params: Any, scale: float, seed: int) -> Any:
    """Return each array with noise of a share of its size, placed as it is."""
    places = jax.tree.map(lambda x: x.sharding, params)
    return jax.jit(functools.partial(_noisy, seed=seed), out_shardings=places)(params, scale)


def _noisy(params: Any, scale: Any, *, seed: int) -> Any:
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    # adapters begin at 0, scales of norms at 1: neither has a spread of its own
    sizes = [jnp.maximum(x.std(), 0.01) for x in leaves]
    drawn = [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, leaves, strict=True)]
    moved = [x + scale * s * d for x, s, d in zip(leaves, sizes, drawn, strict=True)]
    return jax.tree.unflatten(tree, moved)


# ---------------------------------------------------------------- updates in flight


class Swapped(NamedTuple):
    """Hold how far samples of several versions are from the trainer.

    Attributes:
        sure: difference from the trainer of each token of one version.
        mixed: tokens whose context is older than what drew them.
        late: of these, of samples that began with a younger version than their context.
    """

    sure: np.ndarray
    mixed: int
    late: int


def _in_flight(subject: Subject, tokens: int, recompute: bool) -> Swapped:
    """Change the weights of an engine under its samples, of `tokens` tokens each."""
    trainer, config = subject.trainer, subject.run.config
    field = "generator.inference_engine.engine_init_kwargs"
    settings = config.generator.inference_engine.engine_init_kwargs | {
        "max_num_seqs": SLOTS,
        "steps_per_dispatch": max(tokens // 4, 1),
        "enable_prefix_caching": True,
        "recompute_kv_on_update": recompute,
    }
    changes = {field: settings, "generator.inference_engine.num_engines": 1}
    other = subject.experiment(cfg.apply_overrides(config, changes))
    other.tokenizer = subject.run.tokenizer
    engine = other.get_engine(trainer.model, meshes(other.config)[1])
    if not isinstance(engine, NativeEngine):
        raise Unavailable(f"{type(engine).__name__} is not the engine that the config names")
    params = [trainer.params, *(noisy(trainer.params, CHANGE, i) for i in range(UPDATES))]
    engine.update_weights(params[0], 0)
    sampling = dataclasses.replace(
        _unfiltered(subject), max_tokens=tokens, min_tokens=0, stop_token_ids=(), stop=()
    )
    prompt = trainer.prompts_of(0)[0].tokens
    rows, samples = [], 3 * engine.programs.slots
    for version in range(1, len(params)):
        keys = tuple((version, number) for number in range(samples))
        under_way = _paused(engine, Request(prompt, keys, sampling))
        engine.update_weights(params[version], version)
        (begun,) = engine.submit([Request(prompt, ((0, version),), sampling)])
        engine.resume()
        rows += [(prompt, future.result()) for future in (*under_way, *begun)]
        if samples > 1:  # the first turn; the next ones go on from its first sample
            prompt, samples = (*prompt, *rows[0][1].tokens), 1
    batch = _batch([tokens for tokens, _ in rows], [c for _, c in rows])
    mask, versions, contexts = batch.loss_mask > 0, batch.token_versions, batch.context_versions
    assert versions is not None and contexts is not None  # the engine says both
    scored = np.stack([_scored(subject, batch, p) for p in params])
    own = np.take_along_axis(scored, np.maximum(versions, 0)[None], axis=0)[0]
    mixed = mask & (contexts < versions)
    sure = np.abs(own - batch.rollout_log_probs)[mask & ~mixed]
    late = mixed & (contexts < batch.policy_versions[:, None])
    return Swapped(sure, int(mixed.sum()), int(late.sum()))


def _paused(engine: NativeEngine, request: Request) -> Sequence[Any]:
    """Return futures of a request; its first sample stops the engine when it has drawn a block."""
    drawn = threading.Event()

    def stop(number: int, new: Completion) -> None:
        del new
        if number == 0 and not drawn.is_set():
            engine.pause()
            drawn.set()

    (futures,) = engine.submit([dataclasses.replace(request, on_tokens=stop)])
    while not drawn.wait(0.1):
        if futures[0].done():
            futures[0].result()  # or what it raises
            break
    return futures


# ---------------------------------------------------------------- checksums


def _checked(subject: Subject, when: str) -> Finding:
    held = _held(subject.trainer.engine, subject.trainer.params)
    if held is None:
        backend = subject.run.config.generator.inference_engine.backend
        return not_here(f"the weights of this engine ({backend}) cannot be read from here")
    wrong, count = [], 0
    for number, (found, expected) in enumerate(held):
        count += len(expected)
        differs = [name for name in expected if found.get(name) != expected[name]]
        wrong += [f"{name} of engine {number}" for name in differs]
    about = f"checksums of {count} arrays {when}"
    if not wrong:
        return passed(0, 0, about)
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return failed(
        len(wrong),
        0,
        about,
        cause=f"the engine holds other weights than the trainer's, cast: {', '.join(wrong[:3])}"
        + more,
        fix="see that its update_weights takes over every array on every call",
    )


def _held(engine: Any, params: Any) -> list[tuple[dict[str, int], dict[str, int]]] | None:
    """Return checksums of what each engine holds and of what it should; None: not to be seen."""
    pairs = []
    for part in getattr(engine, "engines", [engine]):
        programs = getattr(part, "programs", None)
        if programs is not None and hasattr(getattr(programs, "functions", None), "load"):
            pairs.append((checksums(programs.params), checksums(programs.functions.load(params))))
        elif getattr(part, "params", None) is not None:
            pairs.append((checksums(part.params), checksums(params)))
        else:
            return None
    return pairs
