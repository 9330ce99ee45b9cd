"""The engine tells which experts computed the keys and values that each sample was drawn from."""

import functools
import threading
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.transformer import init_params, routed_forward
from jaxrl.parallel import make_mesh
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.protocol import Request, Sampling
from tests.rollout.test_experts import MODEL, PARAMS, REQUESTS
from tests.rollout.test_native import LLAMA, reserve

WIDTH = 96  # of the rows that the trainer's forward sees


def engine(mesh=None, params=PARAMS, rows=8, room=WIDTH, **options):
    """An engine with room for rows as long as those of other tests: the same program serves all."""
    mesh = make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
    options = {"shrink": False, "keep_routes": True, "steps_per_dispatch": 5, **options}
    made = NativeEngine(MODEL, mesh, max_num_seqs=rows, **options)
    made.update_weights(params, 0)
    if room:
        reserve(made, room)
    return made


@jax.jit
def choices_of(params, row):
    positions = jnp.arange(WIDTH)[None]
    settings = {
        "dtype": jnp.float32,
        "remat": "none",
        "kernel": "xla",
        "experts_kernel": "xla",
        "context": "gather",
    }
    settings |= {"context": "gather", "placement": None, "observe": lambda routing: routing.ids[0]}
    return routed_forward(MODEL, params, row, positions, jnp.ones_like(row), **settings)[1]


def trainers_choice(tokens, params=PARAMS):
    """[n, Lx, k] of a forward over the whole row."""
    row = np.zeros((1, WIDTH), np.int32)
    row[0, : len(tokens)] = tokens
    return np.swapaxes(choices_of(params, row), 0, 1)[: len(tokens)]


def assert_routes(prompt, sample, params=PARAMS, known=None):
    """The routes are those of the trainer, of all tokens but the last, or of the first `known`."""
    tokens = [*prompt, *sample.tokens]
    assert sample.routes.dtype == np.uint8
    assert len(sample.routes) == (len(tokens) - 1 if known is None else known)
    expected = trainers_choice(tokens, params)[: len(sample.routes)]
    np.testing.assert_array_equal(np.sort(sample.routes), np.sort(expected))


def samples_of(made, requests):
    prompts = [request.prompt_tokens for request in requests for _ in request.keys]
    return zip(prompts, [x for group in made.generate(requests) for x in group], strict=True)


@functools.cache
def on_one_device():
    return list(samples_of(engine(), REQUESTS))


SPREAD = {"data": 2, "expert": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("ahead", "sizes"),
    [
        (False, {}),
        (True, SPREAD),
        # each is in what is above
        pytest.param(False, SPREAD, marks=pytest.mark.slow),
        *(pytest.param(a, {"data": 2}, marks=pytest.mark.slow) for a in (False, True)),
        pytest.param(True, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_routes_and_tokens_are_those_of_the_trainer_and_of_one_device(ahead, sizes):
    mesh = make_mesh(devices=jax.devices()[: int(np.prod([1, *sizes.values()]))], **sizes)
    made = engine(mesh, ahead=ahead)
    # a second time prompts are found in the cache, and half of the rows wait for a slot
    for requests in (REQUESTS, [*REQUESTS, *reversed(REQUESTS)]):
        found = list(samples_of(made, requests))
        for prompt, sample in found:
            assert_routes(prompt, sample)
        for (_, sample), (_, alone) in zip(found, on_one_device(), strict=False):
            assert sample.tokens == alone.tokens
            np.testing.assert_allclose(sample.log_probs, alone.log_probs, atol=2e-5)
    assert not made._ended


def test_without_experts_there_are_none():
    with pytest.raises(ValueError, match="keep_routes=True: the model has no experts"):
        NativeEngine(LLAMA, make_mesh(devices=jax.devices()[:1]), keep_routes=True)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_sample_that_made_room_has_its_routes(ahead):
    requests = [
        Request(tuple(range(1, 30)), tuple((i, j) for j in range(4)), Sampling(60))
        for i in range(2)
    ]
    made = engine(ahead=ahead, room=0)
    made.programs._most_pages = 7  # of 64 positions: not two for each of eight
    for prompt, sample in samples_of(made, requests):
        assert_routes(prompt, sample)
    assert made.suspended


@pytest.mark.parametrize("shares", [False, True])
def test_a_conversation_goes_on_with_the_routes_it_has(shares):
    made, over = engine(enable_prefix_caching=shares), Future()
    first = Request(tuple(range(1, 20)), ((1, 2),), Sampling(20), conversations=(over,))
    ((said,),) = made.generate([first])
    assert_routes(first.prompt_tokens, said)
    so_far = (*first.prompt_tokens, *said.tokens, 5, 6, 7)
    computed = made.prefilled_tokens
    ((then,),) = made.generate([Request(so_far, ((1, 3),), Sampling(20), conversations=(over,))])
    assert made.prefilled_tokens - computed < 8  # the last token that was drawn, and what was said
    assert_routes(so_far, then)
    np.testing.assert_array_equal(then.routes[: len(said.routes)], said.routes)
    over.cancel()


@pytest.mark.parametrize("ahead", [False, True])
def test_what_a_stop_string_cuts_off_has_no_routes(ahead):
    request = Request(tuple(range(1, 9)), ((3, 4),), Sampling(24))
    ((whole,),) = engine().generate([request])
    text = "".join(chr(64 + token) for token in whole.tokens)
    stop = text[9:11]
    made = engine(
        ahead=ahead,
        decode_text=lambda tokens: "".join(chr(64 + token) for token in tokens),
    )
    stops = Request(request.prompt_tokens, ((3, 4),), Sampling(24, stop=(stop,)))
    ((cut,),) = made.generate([stops])
    end = text.index(stop) + 2
    assert cut.tokens == whole.tokens[:end]
    assert_routes(request.prompt_tokens, cut, known=min(8 + end, len(cut.routes)))
    assert len(cut.routes) >= 8 + end - 1


@pytest.mark.parametrize("recompute", [False, True])
def test_routes_under_new_weights_in_flight(recompute):
    """Those that the sample was drawn from: what is kept stays, what is computed anew is new."""
    other = init_params(MODEL, 1)
    drawn = threading.Event()
    made = engine(recompute_kv_on_update=recompute)
    request = Request(
        tuple(range(1, 12)), ((5, 6),), Sampling(40), on_tokens=lambda *_: drawn.set()
    )
    ((future,),) = made.submit([request])
    assert drawn.wait(60)
    made.update_weights(other, 1)
    sample = future.result()
    old = sample.versions.count(0)
    assert 0 < old < 40
    if recompute:
        assert_routes(request.prompt_tokens, sample, other)
    else:
        same = 11 + old - 1  # computed by the weights before
        tokens = [*request.prompt_tokens, *sample.tokens]
        expected = np.sort(trainers_choice(tokens))[:same]
        np.testing.assert_array_equal(np.sort(sample.routes)[:same], expected)
        # of the first layer with experts the next ones follow from old keys, but their number
        assert len(sample.routes) == len(tokens) - 1


def test_samples_that_end_without_the_engine_have_no_routes():
    drawn = threading.Event()
    made = engine(ahead=True)
    more = Request((1, 2, 3), ((1, 1), (1, 2)), Sampling(40), on_tokens=lambda *_: drawn.set())
    ((aborted, cancelled),) = made.submit([more])
    assert drawn.wait(60)
    cancelled.cancel()
    made.abort()
    ended = aborted.result()  # it may have come to its end before
    assert (ended.routes is None) == (ended.stop_reason == "abort")
    for prompt, sample in samples_of(made, REQUESTS):
        assert_routes(prompt, sample)


@pytest.mark.parametrize("ahead", [False, True])
def test_an_error_before_routes_are_asked_for_reaches_all_samples(monkeypatch, ahead):
    """Those of the same block too, whose end is known already."""

    def asked(**options):
        return [Request((1 + i, 2), ((i, i),), Sampling(5, **options)) for i in range(6)]

    unlucky = engine().generate(asked())[3][0].tokens[-1]

    def text(tokens):
        if unlucky in tokens:
            raise RuntimeError("no text")
        return "".join(chr(64 + token) for token in tokens)

    made, requests = engine(ahead=ahead, decode_text=text), asked(stop=("!",))
    futures = [future for group in made.submit(requests) for future in group]
    found = [future.exception(60) for future in futures]
    assert any(found)
    monkeypatch.setattr(made.programs, "read_routes", lambda rows: 1 / 0)
    for (future,) in made.submit([Request((1, 2), ((i, i),), Sampling(3)) for i in range(3)]):
        with pytest.raises(ZeroDivisionError):
            future.result(60)
    monkeypatch.undo()
    for prompt, sample in samples_of(made, REQUESTS):
        assert_routes(prompt, sample)


def test_an_error_reaches_samples_that_wait_for_their_routes(monkeypatch):
    made = engine(ahead=True)
    short, long = Sampling(3), Sampling(8)  # one block, and two
    read = made.programs.read_routes

    def fails(rows):
        read(rows)
        return lambda: (_ for _ in ()).throw(RuntimeError("no memory"))

    monkeypatch.setattr(made.programs, "read_routes", fails)
    requests = [Request((1, 2), ((i, i),), s) for i, s in enumerate((short, long))]
    for (future,) in made.submit(requests):
        with pytest.raises(RuntimeError, match="no memory"):
            future.result(60)
    monkeypatch.undo()
    for prompt, sample in samples_of(made, REQUESTS):
        assert_routes(prompt, sample)
