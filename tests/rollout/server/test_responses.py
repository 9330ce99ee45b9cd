"""Answers of samples, whole and streamed."""

import asyncio
import random
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from jaxrl.rollout.native.slots import Sample
from jaxrl.rollout.protocol import Completion, Request, Sampling
from jaxrl.rollout.server.responses import TextStream, certain, text_for_client
from jaxrl.rollout.server.runs import RunningRequest
from tests.rollout.bpe import TEXTS, bpe_tokenizer

TOKENIZER = bpe_tokenizer()


def streamed(ask, completion, seed):
    draw, text, stream, start = random.Random(seed), "", TextStream(TOKENIZER, ask), 0
    while start + 9 < len(completion.tokens):  # the last piece is in `completion` alone
        size = draw.randint(1, 9)
        text += stream.add(completion.tokens[start : start + size])
        start += size
    return text + stream.finish(completion)


@pytest.mark.parametrize(
    ("stops", "cut"),
    [((), None), (("\n",), 7), (("\n\nt", "two\n"), 4), (("ber", "für"), 28), (("語",), 51)],
)
def test_whole_and_streamed_texts_end_before_the_first_stop_string(stops, cut):
    text = "".join(TEXTS)
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    sampling = Sampling(len(tokens), stop=stops)
    ask = SimpleNamespace(skip_special_tokens=False, sampling=sampling, keep_stop=False)
    sample = Sample(Request((1,), ((0, 0),), sampling), 0, (0, 0), len(tokens))
    sample.take(tokens, [0.0] * len(tokens), 0, TOKENIZER.decode)
    whole = text_for_client(ask, TOKENIZER, sample.outcome)
    assert whole == text[:cut]
    for seed in range(10):
        assert streamed(ask, sample.outcome, seed) == whole
    ask.keep_stop = True
    kept = text_for_client(ask, TOKENIZER, sample.outcome)
    assert kept == whole + next((s for s in stops if text[cut:].startswith(s)), "")
    assert {streamed(ask, sample.outcome, seed) for seed in range(10)} == {kept}


def test_what_may_be_a_stop_string_is_held_back():
    assert certain("a b ST", ("STOP",)) == 4
    assert certain("a b ST", ("T", "ST!", "q")) == 4
    assert certain("a b ST", ()) == 6


def test_a_stream_costs_the_same_for_every_token():
    decoded = []

    class Counting:
        def decode(self, tokens, **options):
            decoded.append(len(tokens))
            return TOKENIZER.decode(tokens, **options)

    sampling = Sampling(8000, stop=("no such thing",))
    ask = SimpleNamespace(skip_special_tokens=True, sampling=sampling, keep_stop=False)
    stream, tokens = TextStream(Counting(), ask), TOKENIZER("".join(TEXTS))["input_ids"]
    pieces = [tokens[i : i + 8] for i in range(0, len(tokens), 8)] * 40
    text = "".join(stream.add(piece) for piece in pieces)
    assert text.startswith("one two\n\nthree.\n\nfourgrößer")
    assert max(decoded) <= 8 + 8 + 3  # two pieces, and what was open before them


def test_a_run_keeps_its_tokens_and_copies_none_of_them():
    async def parts():
        ask = SimpleNamespace(samples=1, keys=(((0, 0),),), prompts=((1,),), sampling=Sampling(8))
        run, future = RunningRequest(ask), Future()
        known = run._so_far[0]
        run._take(0, Completion([1, 2], [-1.0] * 2, "", [3] * 2))
        run._take(0, Completion([4], [-2.0], "", [3]))
        assert run._so_far[0] is known
        run._aborted = future.cancel()
        run._finish(0, future)
        run._take(0, Completion([9], [-9.0], "", [3]))  # was on its way
        return [part async for part in run.parts()]

    first, second, last = asyncio.run(parts())
    assert (first.new.tokens, second.new.tokens, last.new.tokens) == ([1, 2], [4], [])
    assert last.whole == Completion([1, 2, 4], [-1.0, -1.0, -2.0], "abort", [3] * 3)


def test_a_tokenizer_is_used_by_several_threads():
    """What `Service` relies on: one encodes while others decode."""
    text = "".join(TEXTS) * 20
    tokens = TOKENIZER(text)["input_ids"]
    messages = [{"role": "user", "content": text}]

    def use(thread):
        for _ in range(20):
            if thread == 0:
                assert TOKENIZER(text)["input_ids"] == tokens
                assert TOKENIZER.apply_chat_template(messages, return_dict=False) == tokens
            else:
                assert TOKENIZER.decode(tokens) == text

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(use, range(3)))
