"""Texts as the `openai` client gets them, of tokens that are parts of characters, and longer."""

import openai
import pytest

from tests.rollout.bpe import TEXTS, bpe_tokenizer
from tests.rollout.server.scripted import TypingEngine, serving

TOKENIZER = bpe_tokenizer()
TEXT = "".join(text for text in TEXTS if "<eos>" not in text)
TOKENS = TOKENIZER(TEXT, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def client():
    engine = TypingEngine(TOKENS, decode=TOKENIZER.decode)
    with (
        serving(engine, TOKENIZER) as server,
        openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        yield client


def texts(client, **options):
    """Of the answer in one piece, and of the stream."""
    settings = {"model": "org/policy", "prompt": "one", "max_tokens": len(TOKENS), **options}
    whole = client.completions.create(**settings).choices[0]
    pieces = list(client.completions.create(stream=True, **settings))
    assert len(pieces) > 2
    last = pieces[-1].choices[0]
    assert (last.finish_reason, last.stop_reason) == (whole.finish_reason, whole.stop_reason)
    return whole.text, "".join(piece.choices[0].text for piece in pieces)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, TEXT),
        (["\n"], "one two"),  # one token, "\n\n", completes it twice
        (["four", "\n\nt"], "one two"),
        (["r", "three.\n"], "one two\n\nth"),  # the first in the text, not in the list
        (["ü"], TEXT[: TEXT.index("ü")]),
        (["ext", "語"], TEXT[: TEXT.index("語")]),  # three tokens
        (["👧 and 🇩"], TEXT[: TEXT.index("👧")]),
    ],
)
def test_no_text_has_a_stop_string(client, stop, expected):
    assert texts(client, stop=stop) == (expected, expected)


def test_a_stop_string_within_the_first_tokens_is_text(client):
    least = len(TOKENIZER("one two\n\nthr", add_special_tokens=False)["input_ids"])
    cut = TEXT.index("\n\nfour")
    assert texts(client, stop=["\n"], extra_body={"min_tokens": least}) == (TEXT[:cut],) * 2


def test_the_bytes_of_tokens_are_those_of_the_text(client):
    messages = [{"role": "user", "content": "one"}]
    answer = client.chat.completions.create(
        model="org/policy", messages=messages, logprobs=True, max_tokens=len(TOKENS)
    )
    entries = answer.choices[0].logprobs.content
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == TEXT
    assert len(entries) == len(TOKENS)
    assert "\ufffd" in {entry.token for entry in entries}  # there are parts of characters
