"""The engine samples from the trainer's weights: by its log-probs, and by checksums.

A sampler in 8 bits is compared with the trainer's forward pass of weights that are rounded as its
own are; how far it is from the policy itself is said, and judged by nothing.
"""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import config as cfg
from jaxrl.array_ops import DTYPES
from jaxrl.data.packing import collate
from jaxrl.models.adapter import AdaptedModel
from jaxrl.parallel.checksums import checksums
from jaxrl.parallel.jit_once import jit_once
from jaxrl.parallel.offload import on_device
from jaxrl.rollout.conversations.conversation import sample_key, sampling_of
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Completion, Request, Sampling
from jaxrl.tools.doctor.eight_bits import dequantised
from jaxrl.tools.doctor.examined_run import ExaminedRun
from jaxrl.tools.doctor.finding import (
    COARSE,
    EXACT,
    Finding,
    Unavailable,
    failed,
    not_here,
    passed,
    sampler_bounds,
)
from jaxrl.train import meshes
from jaxrl.types import GeneratorOutput, TrainBatch

SAMPLES = 4  # of each prompt of a batch
NOISE, MOVED = 0.02, 10  # of each array's size; times the bound on the mean: log-probs have moved
# With samples in flight: updates, slots of their engine, noise of each update, pages of each slot
# beyond those that its rows fill: what older weights left in them is there to be found.
UPDATES, SLOTS, CHANGE, SPARE = 3, 2, 0.2, 2
NO_LOG_PROBS = "generator.sampling_params.logprobs=None: rollouts carry none"


# ---------------------------------------------------------------- log-probs


class Sampled(NamedTuple):
    """Hold what the engine sampled, and how far the trainer is from it.

    Attributes:
        scored: [B, T] log-probs by the trainer's forward pass, see `as_sampled`.
        difference: of the log-prob of each token.
        worst: prompt and place of the largest one, in words.
        from_policy: the difference from the policy itself, of a sampler in 8 bits; None of others.
    """

    completions: list[Completion]
    batch: TrainBatch
    scored: np.ndarray
    difference: np.ndarray
    worst: str
    from_policy: np.ndarray | None


def first(examined: ExaminedRun) -> Finding:
    """Check the log-probs of sampled tokens after the first sync."""
    sampled = _first_samples(examined)
    if sampled is None:
        return not_here(NO_LOG_PROBS)
    return _judged(examined, sampled, "after a sync")


def update(examined: ExaminedRun) -> Finding:
    """Check the log-probs of sampled tokens after an update and another sync."""
    before = _first_samples(examined)
    if before is None:
        return not_here(NO_LOG_PROBS)
    moved = _updated(examined)
    after = _sample(examined)  # with the same keys: other weights give other log-probs
    pairs = zip(before.completions, after.completions, strict=True)
    stale = all(a.tokens == b.tokens and a.log_probs == b.log_probs for a, b in pairs)
    about = f"after an update and a sync, which moved log-probs by {moved:.2g} on average"
    return _judged(examined, after, about, stale=stale)


def _judged(examined: ExaminedRun, sampled: Sampled, about: str, *, stale: bool = False) -> Finding:
    """Judge the mean and the largest difference, each by its bound."""
    figure, bound, within = _figures(examined, sampled.difference)
    about = f"{len(sampled.difference)} tokens {about}"
    if (apart := sampled.from_policy) is not None:
        about += (
            f"; in 8 bits they are mean {apart.mean():.1e} max {apart.max():.1e} from the policy's"
        )
    if within:
        return passed(figure, bound, about)
    if stale:
        cause = (
            "stale weights: after the update the engine draws the same tokens with the same "
            "log-probs as before it"
        )
        fix = "see that every call of its update_weights takes over the parameters it is given"
    else:
        settings = examined.config.generator.inference_engine
        cause = (
            f"sampler and trainer compute different log-probs for the same tokens (engine "
            f"{settings.backend!r}, {settings.model_dtype})"
        )
        if settings.quantization is not None:
            cause += f", the trainer with the weights in 8 bits ({settings.quantization!r})"
        fix = (
            "see that both have the same weights (check 'weights'), temperature, rotary settings "
            "and chat template, and that the engine reports log-probs after the temperature"
        )
    return failed(figure, bound, about, cause=f"{cause}; largest at {sampled.worst}", fix=fix)


def _figures(examined: ExaminedRun, difference: np.ndarray) -> tuple[str, str, bool]:
    """Return mean and largest difference in words, their bounds, and whether both are within."""
    mean, largest = float(difference.mean()), float(difference.max())
    bounds = sampler_bounds(examined.config)
    figure, bound = f"mean {mean:.1e} max {largest:.1e}", f"{bounds.mean:g}, {bounds.max:g}"
    return figure, bound, mean <= bounds.mean and largest <= bounds.max


def _first_samples(examined: ExaminedRun) -> Sampled | None:
    """Return what was sampled before the weights moved; None: the engine gives no log-probs."""
    if "sampled" not in examined.known:
        examined.trainer.sync_weights(int(examined.trainer.state.step))
        carried = examined.config.generator.sampling_params.logprobs is not None
        examined.known["sampled"] = _sample(examined) if carried else None
    return examined.known["sampled"]


def _sample(examined: ExaminedRun) -> Sampled:
    """Sample without filters, which would make the sampler's distribution another one."""
    trainer, sampling = examined.trainer, unfiltered(examined)
    prompts, seed = trainer.prompts_of(0), trainer.config.trainer.seed
    requests = []
    for prompt in prompts:
        keys = tuple(sample_key(seed, "doctor", prompt.uid, i) for i in range(SAMPLES))
        requests.append(Request(prompt.tokens, keys, sampling))
    groups = trainer.engine.generate(requests)
    rows = [(p, c) for p, group in zip(prompts, groups, strict=True) for c in group]
    completions = [completion for _, completion in rows]
    if not all(completion.log_probs for completion in completions):
        raise Unavailable("the engine gave no log-probs, and sampling_params.logprobs wants them")
    batch = batch_of([prompt.tokens for prompt, _ in rows], completions)
    mask = np.asarray(batch.loss_mask) > 0
    assert batch.rollout_log_probs is not None
    scored = _scored(examined, batch, as_sampled(examined, trainer.params))
    difference = np.where(mask, np.abs(scored - batch.rollout_log_probs), 0.0)
    from_policy, settings = None, examined.config.generator.inference_engine
    if settings.quantization is not None or settings.kv_cache_dtype != "auto":
        from_policy = np.abs(_scored(examined, batch) - batch.rollout_log_probs)[mask]
    row, column = np.unravel_index(int(difference.argmax()), difference.shape)
    prompt = rows[row][0]
    worst = f"token {int(column) - len(prompt.tokens)} of a sample of prompt {prompt.uid}"
    return Sampled(completions, batch, scored, difference[mask], worst, from_policy)


def unfiltered(examined: ExaminedRun) -> Sampling:
    """Return the run's sampling without filters."""
    trainer = examined.trainer
    return dataclasses.replace(
        sampling_of(trainer.config.generator.sampling_params, trainer.eos_token_ids),
        top_k=-1,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        keep_sampling_mask=False,
    )


def batch_of(prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> TrainBatch:
    """Return a batch of the completions of prompts; every sampled token is in its loss mask."""
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


def as_sampled(examined: ExaminedRun, params: Any) -> Any:
    """Return parameters as the run's sampler has them: themselves, or rounded to 8 bits."""
    settings = examined.config.generator.inference_engine
    if settings.quantization is None:
        return params
    return dequantised(params, settings.quantization, DTYPES[cfg.engine_dtype(settings)])


def _scored(examined: ExaminedRun, batch: TrainBatch, params: Any = None) -> np.ndarray:
    """Return log-probs [B, T] of parameters, None = the trainer's.

    At most a step's rows are scored at a time.
    """
    forward_pass, found = examined.trainer.forward_pass, []
    most = forward_pass.microbatching.total
    for first_row in range(0, len(batch.index), most):
        rows = jax.tree.map(lambda x, i=first_row: x[i : i + most], batch)
        found.append(forward_pass(examined.trainer.params if params is None else params, rows)[0])
    return np.concatenate(found)


# ---------------------------------------------------------------- an update


def _updated(examined: ExaminedRun) -> float:
    """Train a step, add noise until log-probs have clearly moved, and sync; return by how much."""
    if "moved" not in examined.known:
        trainer = examined.trainer
        examined.train()
        sampled = _first_samples(examined)
        # no noise moves log-probs by ten times what keys and values in fp8 do
        bound = min(sampler_bounds(examined.config).mean, COARSE.mean)
        examined.known["moved"] = _move(examined, sampled, MOVED * bound)
        trainer.sync_weights(int(trainer.state.step))
    return examined.known["moved"]


def _move(examined: ExaminedRun, sampled: Sampled | None, wanted: float) -> float:
    """Add noise of growing size; returns the mean change of the log-probs of earlier samples."""
    trainer, scale = examined.trainer, NOISE
    for number in range(8):
        params = noisy(on_device(trainer.state.params), scale, number)
        trainer.state = trainer.updater.offload(trainer.state.replace(params=params))
        if sampled is None:
            return float("nan")
        mask = np.asarray(sampled.batch.loss_mask) > 0
        change = _scored(examined, sampled.batch, as_sampled(examined, trainer.params))
        change -= sampled.scored
        moved = float(np.abs(change)[mask].mean())
        if moved >= wanted:
            return moved
        scale *= 2
    raise Unavailable(f"noise of {scale:g} in the trained parameters moves no log-prob")


def noisy(params: Any, scale: float, seed: int) -> Any:
    """Return each array with noise of a share of its size, placed as it is."""
    places = jax.tree.map(lambda x: x.sharding, params)
    return jit_once(_noisy, out_shardings=places)(params, scale, seed)


def _noisy(params: Any, scale: Any, seed: Any) -> Any:
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    # adapters begin at 0, scales of norms at 1: neither has a spread of its own
    sizes = [jnp.maximum(x.std(), 0.01) for x in leaves]
    drawn = [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, leaves, strict=True)]
    moved = [x + scale * s * d for x, s, d in zip(leaves, sizes, drawn, strict=True)]
    return jax.tree.unflatten(tree, moved)


def reference(examined: ExaminedRun) -> Finding:
    """Check that an update of the policy leaves the log-probs of the reference as they are."""
    before = examined.batch.ref_log_probs
    if before is None:
        return not_here("the run has no reference")
    _first_samples(examined)
    _updated(examined)  # no epoch ends with it: update_ref_every_epoch moves nothing yet
    after = examined.trainer.add_log_probs(examined.collated).ref_log_probs
    mask = np.asarray(examined.collated.loss_mask) > 0
    figure = float("inf") if after is None else float(np.abs(before - after)[mask].max())
    bound, about = EXACT.mean, f"log-probs of {int(mask.sum())} tokens before and after an update"
    if figure <= bound:
        return passed(figure, bound, about)
    cause = "the reference moves with the policy: its log-probs are others after an update"
    fix = "score ref_log_probs with the trainer's ref_params, never with the trained parameters"
    return failed(figure, bound, about, cause=cause, fix=fix)


# ---------------------------------------------------------------- checksums


def weights(examined: ExaminedRun) -> Finding:
    """Check what the engine holds after the first sync, array by array."""
    examined.trainer.sync_weights(int(examined.trainer.state.step))
    return _same_weights(examined, "after a sync")


def weights_update(examined: ExaminedRun) -> Finding:
    """Check what the engine holds after an update and another sync, array by array."""
    _first_samples(examined)
    _updated(examined)
    return _same_weights(examined, "after an update and a sync")


def _same_weights(examined: ExaminedRun, when: str) -> Finding:
    pairs = _checksums(examined.trainer.engine, examined.trainer.params)
    if pairs is None:
        backend = examined.config.generator.inference_engine.backend
        return not_here(f"the weights of this engine ({backend}) cannot be read from here")
    wrong, count = [], 0
    for number, (found, expected) in enumerate(pairs):
        count += len(expected)
        different = [name for name in expected if found.get(name) != expected[name]]
        wrong += [f"{name} of engine {number}" for name in different]
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


def _checksums(engine: Any, params: Any) -> list[tuple[dict[str, int], dict[str, int]]] | None:
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


# ---------------------------------------------------------------- updates in flight


class Swapped(NamedTuple):
    """Hold how far samples of several versions are from the trainer.

    Attributes:
        difference: from the trainer, of each token whose context is of the version that drew it.
        mixed: how many tokens have an older context than what drew them.
        late: how many of these have a context older than the start of their sample.
    """

    difference: np.ndarray
    mixed: int
    late: int


def in_flight(examined: ExaminedRun) -> Finding:
    """Check log-probs of samples in flight when weights change, and of those that begin after it.

    With the run's model in an engine of few slots and short blocks, which reuses what it can: a
    group of which most wait for slots, then turns that go on from it, two of them alike. With
    `recompute_kv_on_update` each token is of one version; without it none is of older keys and
    values than of the version that its sample began with.
    """
    trainer, config = examined.trainer, examined.config
    if not cfg.in_process(config) or config.generator.inference_engine.backend != "native":
        return not_here("keys and values of these servers cannot be looked at")
    if isinstance(trainer.model, AdaptedModel):
        return not_here("a flax module keeps no keys and values")
    if (tokens := config.generator.sampling_params.max_generate_length // 2) < 2:
        return not_here("responses are too short to be in flight")
    trainer.engine.sleep()  # there is memory for one
    try:
        reused = _swapped(examined, tokens, recompute=False)
        recomputed = _swapped(examined, tokens, recompute=True)
    finally:
        trainer.sync_weights(int(trainer.state.step))
    difference = np.concatenate([reused.difference, recomputed.difference])
    figure, bound, within = _figures(examined, difference)
    about = (
        f"{len(difference)} tokens of one version over {UPDATES} updates in flight, "
        f"{reused.mixed} not"
    )
    older = reused.late + recomputed.mixed
    if within and not older:
        return passed(figure, bound, about)
    cause = "tokens are not of the weights that they are said to be drawn from"
    if older:
        cause = (
            f"{reused.late} tokens of samples that began after an update are of older keys and "
            f"values; with recompute_kv_on_update {recomputed.mixed} are"
        )
    fix = "see that an update leaves no key or value in the cache that a later sample finds"
    return failed(figure, bound, about, cause=cause, fix=fix)


def _swapped(examined: ExaminedRun, tokens: int, *, recompute: bool) -> Swapped:
    """Change the weights of an engine under its samples, of `tokens` tokens each."""
    trainer = examined.trainer
    engine = small_engine(
        examined,
        max_num_seqs=SLOTS,
        steps_per_dispatch=max(tokens // 4, 1),
        enable_prefix_caching=True,
        recompute_kv_on_update=recompute,
    )
    versions = [trainer.params, *(noisy(trainer.params, CHANGE, i) for i in range(UPDATES))]
    engine.update_weights(versions[0], 0)
    sampling = dataclasses.replace(
        unfiltered(examined), max_tokens=tokens, min_tokens=0, stop_token_ids=(), stop=()
    )
    prompt = trainer.prompts_of(0)[0].tokens
    longest = len(prompt) + UPDATES * tokens + SPARE * engine.programs.shape.page
    engine.warm_up([Request((0,) * (longest - tokens), ((0, 0),), sampling)])
    prompts, completions = [], []
    samples = 3 * engine.programs.slots
    for version in range(1, len(versions)):
        keys = tuple((version, number) for number in range(samples))
        under_way = _paused(engine, Request(prompt, keys, sampling))
        engine.update_weights(versions[version], version)
        (begun,) = engine.submit([Request(prompt, ((0, version),), sampling)])
        engine.resume()
        completions += [future.result() for future in (*under_way, *begun)]
        prompts += [prompt] * (samples + 1)
        if samples > 1:  # the first turn; the next ones go on from its first sample
            prompt, samples = (*prompt, *completions[0].tokens), 1
    batch = batch_of(prompts, completions)
    drawn_by, contexts = batch.token_versions, batch.context_versions
    assert drawn_by is not None and contexts is not None  # the engine says both
    scored = np.stack([_scored(examined, batch, as_sampled(examined, p)) for p in versions])
    by_its_version = np.take_along_axis(scored, np.maximum(drawn_by, 0)[None], axis=0)[0]
    mask = batch.loss_mask > 0
    mixed = mask & (contexts < drawn_by)
    difference = np.abs(by_its_version - batch.rollout_log_probs)[mask & ~mixed]
    late = mixed & (contexts < batch.policy_versions[:, None])
    return Swapped(difference, int(mixed.sum()), int(late.sum()))


def small_engine(examined: ExaminedRun, **settings: Any) -> NativeEngine:
    """Return another engine of the run's model, one over all devices, with no weights yet.

    Args:
        settings: of `NativeEngine`, in place of the run's.
    """
    field = "generator.inference_engine.engine_init_kwargs"
    settings = examined.config.generator.inference_engine.engine_init_kwargs | settings
    changes = {field: settings, "generator.inference_engine.num_engines": 1}
    experiment = examined.experiment_class(cfg.apply_overrides(examined.config, changes))
    experiment.tokenizer = examined.tokenizer
    engine = experiment.get_engine(examined.trainer.model, meshes(experiment.config)[1])
    if not isinstance(engine, NativeEngine):
        raise Unavailable(f"{type(engine).__name__} is not the engine that the config names")
    return engine


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
