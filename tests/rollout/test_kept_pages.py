"""A conversation keeps its pages until it is over: what a turn reuses follows from the requests."""

import asyncio
import dataclasses
import functools
import random
import threading
import time
from concurrent.futures import Future

import jax
import pytest

from jaxrl.config import GeneratorConfig, keeps_pages
from jaxrl.data.tokenizer import character_tokenizer
from jaxrl.parallel import make_mesh
from jaxrl.rollout.conversations.conversation import ConversationGenerator, sample_key
from jaxrl.rollout.generator import generate
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Request, Sampling
from tests.rollout.scripted import TalkingEnv, converse, make_prompt
from tests.rollout.test_engine import PROMPT, SMALL, between_turns, make, scores, until_idle
from tests.rollout.test_native import LLAMA, flat, random_params, reserve

TOKENIZER = character_tokenizer("0123456789abcdefghijklmno.>,")  # 28, and three special tokens
MODEL = dataclasses.replace(LLAMA, vocab_size=len(TOKENIZER))


def engine_of(slots=4, **options):
    """With one shape of blocks."""
    return make(slots, max_model_len=128, room=128, **options)


def only(pages, monkeypatch):
    """Let memory hold so many pages in engines made from now on."""
    monkeypatch.setattr("jaxrl.rollout.native.engine.pages_that_fit", lambda *_, **__: pages)


def turn(prompt, over, key=1, max_tokens=12):
    """A turn of one conversation, for `submit`."""
    sampling = Sampling(max_tokens)
    return Request(tuple(prompt), ((7, key),), sampling, conversations=(over,))


def ask(engine, *turns):
    """Completions of turns that are submitted together."""
    return flat(engine.generate(list(turns)))


def is_free(engine):
    """Whether no slot and no page is taken, once what is over has been seen."""
    table = engine.table
    table.let_go()
    free = sum(pool.available for pool in table.pools)
    return not table.kept and not table.taken.any() and free == engine.programs.pages


# ------------------------------------------------------------------ the engine


def test_a_turn_after_a_failure_reads_nothing_of_the_cache_that_was_dropped():
    engine, over = engine_of(), Future()
    (said,) = ask(engine, turn(PROMPT, over))
    until_idle(engine)
    engine._recover()
    told = [*PROMPT, *said.tokens, 5]
    (said,) = ask(engine, turn(told, over))
    assert said.log_probs == pytest.approx(scores(told, said), abs=1e-4)
    over.cancel()


def test_a_later_turn_prefills_what_is_new():
    engine, over = engine_of(), Future()
    told, prefilled = list(PROMPT), [len(PROMPT) - 1]
    for observation in ([3, 1, 4], [1, 5], list(range(1, 20))):
        before = engine.prefilled_tokens
        (said,) = ask(engine, turn(told, over))
        assert engine.prefilled_tokens - before == prefilled[-1]
        assert said.log_probs == pytest.approx(scores(told, said), abs=1e-4)
        told += [*said.tokens, *observation]
        # the token that was drawn last, and the observation; but its last token is decoded
        prefilled.append(len(observation))
    over.cancel()
    assert is_free(engine)


def test_a_conversation_that_thinks_has_no_slot_and_goes_on_with_its_pages():
    engine, (first, second) = engine_of(1), (Future(), Future())
    (said,) = ask(engine, turn(PROMPT, first))
    (other,) = ask(engine, turn(PROMPT[:9], second))  # the only slot is free meanwhile
    before = engine.prefilled_tokens
    (later,) = ask(engine, turn([*PROMPT, *said.tokens, 3], first))
    assert engine.prefilled_tokens - before == 1
    assert list(engine.table.kept) == [second, first]
    first.cancel()
    assert len(other.tokens) == len(later.tokens) == 12
    second.cancel()
    assert is_free(engine)


def test_what_a_conversation_keeps_may_be_on_the_host_meanwhile(monkeypatch):
    """Two pages in all: the row of the second conversation needs both."""
    expected = []
    for pages in (8, 2):
        only(pages, monkeypatch)
        engine, (first, second) = engine_of(2), (Future(), Future())
        told, (said,) = list(PROMPT), ask(engine, turn(PROMPT, first))
        ask(engine, turn(PROMPT[::-1], second, 2, max_tokens=60))
        on_host = [context.saved is not None for context in engine.table.kept.values()]
        assert on_host == [pages == 2, False]
        before = engine.prefilled_tokens
        (later,) = ask(engine, turn([*told, *said.tokens, 3, 4], first))
        assert engine.prefilled_tokens - before == 2
        expected.append((said, later))
        for over in (first, second):
            over.cancel()
        assert is_free(engine)
    assert expected[0] == expected[1]


def test_a_group_that_waits_shares_the_prompt_of_those_that_go_on():
    """Two slots, a group of six: 39 tokens of the prompt once, 3 of each second turn."""
    engine, overs = engine_of(2), [Future() for _ in range(6)]
    keys = tuple((7, k) for k in range(6))
    request = Request(PROMPT, keys, Sampling(12), conversations=tuple(overs))
    (futures,) = engine.submit([request])
    for future, over in zip(futures, overs, strict=True):
        said = future.result(timeout=60)
        ask(engine, turn([*PROMPT, *said.tokens, 3, 1, 4], over))
        over.cancel()
    assert engine.prefilled_tokens == 39 + 6 * 3
    assert is_free(engine)


def test_whatever_ends_a_turn_its_pages_go_with_the_conversation():
    engine, over = engine_of(2), Future()
    between_turns(engine, 1, engine.abort)
    (aborted,) = ask(engine, turn(PROMPT, over, max_tokens=40))
    assert aborted.stop_reason == "abort"
    (future,) = engine.submit([turn(PROMPT, over, max_tokens=40)])[0]
    future.cancel()
    until_idle(engine)
    decode, engine.programs.decode = engine.programs.decode, None
    with pytest.raises(TypeError):
        ask(engine, turn(PROMPT, over))
    engine.programs.decode = decode
    (said,) = ask(engine, turn(PROMPT, over))  # the cache is a new one
    assert said.log_probs == pytest.approx(scores(PROMPT, said), abs=1e-4)
    assert list(engine.table.kept) == [over]
    engine.sleep()  # nothing is in flight
    engine.update_weights(random_params(LLAMA, 1), 2)
    told, before = [*PROMPT, *said.tokens, 3], engine.prefilled_tokens
    (said,) = ask(engine, turn(told, over))
    assert engine.prefilled_tokens - before == len(told) - 1
    assert said.log_probs == pytest.approx(scores(told, said, seed=1), abs=1e-4)
    over.cancel()
    assert is_free(engine)


def test_new_weights_compute_what_is_kept_anew_only_if_told():
    for recompute in (True, False):
        engine, over = engine_of(recompute_kv_on_update=recompute), Future()
        (said,) = ask(engine, turn(PROMPT, over))
        engine.update_weights(random_params(LLAMA, 1), 2)
        told, before = [*PROMPT, *said.tokens, 3], engine.prefilled_tokens
        (later,) = ask(engine, turn(told, over))
        assert engine.prefilled_tokens - before == (len(told) - 1 if recompute else 1)
        # the oldest of the keys that it kept
        assert (later.versions, later.context_versions) == ([2] * 12, [1 + recompute] * 12)
        (new,) = ask(engine, turn(told, Future(), 2))  # shares none of them
        assert new.context_versions == [2] * 12


# ------------------------------------------------------------------ conversations


class SlowEnv(TalkingEnv):
    """Takes its time, which nobody knows."""

    clock = random.Random(0)
    longest = 0.0

    def step(self, action):
        time.sleep(self.clock.random() * self.longest)
        if self.extras.get("fault") == "hangs" and self.turns == 1:
            RELEASE.wait()
        if self.extras.get("fault") == "raises" and self.turns == 1:
            raise RuntimeError("no more")
        return super().step(action)


RELEASE = threading.Event()
TEXT = "0123456789abcdefghijklmno" * 8


def prompts(groups=3, samples=4, **extras):
    """Groups whose environments say something short and something long."""
    env_class = f"{__name__}:SlowEnv"
    says = [[TEXT[: 1 + 2 * g], TEXT[: 20 * g + 3], "ab", None] for g in range(groups)]
    made = [
        make_prompt(TOKENIZER, TEXT[: 30 * g + 5], f"0:{g}", env_class, says=says[g], **extras)
        for g in range(groups)
    ]
    return [prompt for prompt in made for _ in range(samples)]


ROOMY = 12  # slots, whose pages are enough for all that conversations keep


def talking_engine(slots=5, **options):
    mesh = make_mesh(devices=jax.devices()[:1])
    options = {"max_model_len": 256, "shrink": False, **options}
    engine = NativeEngine(MODEL, mesh, max_num_seqs=slots, steps_per_dispatch=4, **options)
    engine.update_weights(random_params(MODEL), 1)
    reserve(engine, 256)
    return engine


def talk(engine, asked, monkeypatch, *, seed=0, longest=0.0, **settings):
    monkeypatch.setattr(SlowEnv, "clock", random.Random(seed))
    monkeypatch.setattr(SlowEnv, "longest", longest)
    settings = {"max_env_workers": 6, **settings}
    return converse(None, asked, TOKENIZER, engine=engine, **settings)


def without_time(output):
    metrics = {k: v for k, v in output["rollout_metrics"].items() if "timing" not in k}
    return {**output, "rollout_metrics": metrics}


@pytest.mark.some(2)
@pytest.mark.parametrize("pages", [None, 5], ids=["room", "tight"])
@pytest.mark.parametrize("step_wise", [False, True])
def test_delays_of_environments_change_no_bit(monkeypatch, step_wise, pages):
    """Five pages of 64 hold one of the longest rows: others make room for it, and come back."""
    if pages:
        only(pages, monkeypatch)
    engine, saved = talking_engine(5 if pages else ROOMY), []
    save = engine.table._save
    engine.table._save = lambda *given: saved.append(given) or save(*given)
    expected = None
    for seed, longest in ((0, 0.0), (1, 0.02), (2, 0.1)):
        engine.update_weights(random_params(MODEL), 1)  # pages of before are not found
        before = engine.prefilled_tokens
        given = {"seed": seed, "longest": longest, "step_wise_trajectories": step_wise}
        output = without_time(talk(engine, prompts(), monkeypatch, **given))
        assert is_free(engine)
        if step_wise:
            assert len(output["is_last_step"]) == 12 * 4
        elif not pages:
            # the prompt of each group but its last token, and what the environments said
            given = sum(mask.count(0) for mask in output["loss_masks"])
            told = sum(len(prompt) - 1 for prompt in output["prompt_token_ids"][::4])
            assert engine.prefilled_tokens - before == told + given
        expected = expected or output
        assert output == expected
        assert bool(saved) or not pages
        if seed == 0:  # from here on it has another past, and other slots
            engine.generate([Request(PROMPT, ((1, 2),), Sampling(60))])


def test_rows_that_make_room_go_on_with_the_same_bits(monkeypatch):
    """Four rows of up to 190 tokens, three pages each, where there are five pages."""
    asked = [Request(PROMPT[n:], ((5, n),), Sampling(150)) for n in range(4)]
    only(5, monkeypatch)
    engine = talking_engine()
    alone = [ask(engine, one)[0] for one in asked]
    assert not engine.suspended
    assert ask(engine, *asked) == alone
    assert engine.suspended
    assert is_free(engine)


def test_a_bit_depends_on_no_neighbour_however_long(monkeypatch):
    """Alone, a block could see a quarter of the positions."""
    asked = prompts(1, 1)
    alone = talk(talking_engine(ROOMY), asked, monkeypatch)
    engine = talking_engine(ROOMY)
    long = engine.submit([Request((1,) * 100, ((5, k),), Sampling(150)) for k in range(3)])
    beside = talk(engine, asked, monkeypatch)
    for future in flat(long):
        future.cancel()
    assert beside["rollout_logprobs"] == alone["rollout_logprobs"]
    assert beside["response_ids"] == alone["response_ids"]


def test_failures_of_environments_free_slots_and_pages(monkeypatch):
    engine = talking_engine(2)
    asked = [*prompts(1, 2, fault="hangs"), *prompts(1, 2, fault="raises"), *prompts(2, 2)]
    try:
        output = talk(engine, asked, monkeypatch, env_timeout_seconds=0.2)
    finally:
        RELEASE.set()
    assert output["stop_reasons"][:4] == ["env_error"] * 4
    assert "env_error" not in output["stop_reasons"][4:]
    assert is_free(engine)


def test_a_batch_that_is_ended_frees_its_pages(monkeypatch):
    engine = talking_engine(2)
    monkeypatch.setattr(SlowEnv, "longest", 0.05)
    sampling, asked = Sampling(8, stop_token_ids=(TOKENIZER.eos_token_id,)), prompts()
    keys = [sample_key("test", i) for i in range(len(asked))]
    generator = ConversationGenerator(engine, TOKENIZER, GeneratorConfig(max_turns=5))

    async def for_a_while():
        work = generate(generator, {"prompts": asked, "keys": keys, "sampling": sampling})
        task = asyncio.ensure_future(work)
        while not engine.table.kept:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(for_a_while())
    until_idle(engine)
    engine._check_idle()  # nothing waits
    assert is_free(engine)


def test_an_error_of_the_engine_frees_pages(monkeypatch):
    engine = talking_engine(2)
    decode, blocks = engine.programs.decode, [0]

    @functools.wraps(decode)
    def failing(*args):
        blocks[0] += 1
        if blocks[0] == 4:
            raise MemoryError("no room")
        return decode(*args)

    monkeypatch.setattr(engine.programs, "decode", failing)
    with pytest.raises(MemoryError, match="no room"):
        talk(engine, prompts(), monkeypatch)
    until_idle(engine)
    assert is_free(engine)


def test_nothing_is_kept_for_a_single_turn():
    assert not keeps_pages(GeneratorConfig())
    assert keeps_pages(GeneratorConfig(max_turns=2))


# ------------------------------------------------------------------ many


@pytest.mark.slow
def test_2_000_requests_lose_and_repeat_nothing_where_rows_make_room(monkeypatch):
    """Sixteen rows of up to 5 pages where there are 20; one request of ten is greedy and alike."""
    monkeypatch.setattr("jaxrl.rollout.native.programs.SHAPES", SMALL)
    rng = random.Random(0)
    asked = [
        Request(
            PROMPT[rng.randrange(8) * 5 :],
            ((n, 1),) * (1 if n % 10 else 2),
            Sampling(rng.randrange(1, 40), temperature=float(n % 10 > 0)),
        )
        for n in range(2_000)
    ]
    engines = []
    for pages in (16 * 6, 20):
        only(pages, monkeypatch)
        engine = make(16, max_model_len=80)
        engine.warm_up(asked)
        engines.append(engine)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    roomy, tight = (engine.generate(asked) for engine in engines)
    assert not compiled
    assert tight == roomy
    assert [len(group) for group in tight] == [len(request.keys) for request in asked]
    assert engines[0].suspended == 0 < engines[1].suspended
    assert all(is_free(engine) for engine in engines)
