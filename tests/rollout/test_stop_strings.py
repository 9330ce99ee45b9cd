"""Text that grows is the text of all tokens; a stop string ends with what completes it."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxrl.rollout.native.stop_strings import GrowingText, StopStrings, completion_text, first_stop
from jaxrl.rollout.protocol import Completion

TEXT = "A naïve café — 東京は大きい。 🙂🙃 x.y.z\n\nEND of it, the end.\n"


def byte_level():
    """A tokenizer as Qwen's: byte-level BPE, so that characters are split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT, "the end of the END"], trainer)
    return tokenizer


def sentencepiece():
    """A tokenizer as Llama 2's: a text loses its first space, and bytes are tokens of their own."""
    words = ["▁", "▁foo", "▁bar", "foo", ".", "END", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True))
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return tokenizer


BYTES, PIECES = byte_level(), sentencepiece()


def tokens_of(rng, tokenizer):
    """Text cut at random characters, and tokens at random: bytes that are no character."""
    if tokenizer is PIECES:
        e_acute = [6 + 0xC3, 6 + 0xA9]
        parts = [[0], [1], [2], [3], [4], [5], e_acute]
        return [token for i in rng.integers(0, len(parts), 40) for token in parts[i]]
    start = rng.integers(0, len(TEXT))
    tokens = tokenizer.encode(TEXT[start : start + 30]).ids
    return tokens + rng.integers(0, 256, rng.integers(0, 12)).tolist() + tokens


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
@pytest.mark.parametrize("most", [1, 3, 32])
def test_pieces_together_are_the_text_of_all_tokens(tokenizer, most):
    rng = np.random.default_rng(most)
    for _ in range(100):
        tokens, text, at = tokens_of(rng, tokenizer), GrowingText(tokenizer.decode), 0
        given = ""
        while at < len(tokens):
            size = int(rng.integers(1, most + 1))
            given += text.add(tokens[at : at + size])
            at += size
            if tokenizer is BYTES or at >= len(tokens):  # a lone byte spoils others before it
                assert tokenizer.decode(tokens[:at]) == given + text.rest()
            assert text.rest().strip("\ufffd") == ""  # nothing whole is held back


def test_a_split_character_comes_with_its_last_token():
    text = GrowingText(BYTES.decode)
    parts = [BYTES.token_to_id(c) for c in "IĠÃ©!"]  # byte-level names: "Ġ" a space, "Ã©" an "é"
    assert [text.add([part]) for part in parts] == ["I", " ", "", "é", "!"]


def test_no_token_is_decoded_more_than_a_few_times():
    decoded = 0

    def decode(tokens):
        nonlocal decoded
        decoded += len(tokens)
        return BYTES.decode(tokens)

    search = StopStrings(["</answer>"], decode)
    tokens = BYTES.encode(TEXT * 40).ids
    for first in range(0, len(tokens), 8):
        assert search.find(tokens[first : first + 8]) is None
    # of eight tokens: behind the eight before them, 16, and by themselves, 8; where they end in the
    # middle of a character up to three times more without the last ones, 15 + 14 + 13
    assert len(tokens) == 1200
    assert decoded <= 1200 / 8 * (16 + 8 + 15 + 14 + 13)


def whole_search(tokenizer, tokens, strings, least):
    """By the text of all tokens: the first that completes a string after the first `least`."""
    for size in range(least + 1, len(tokens) + 1):
        old, text = (tokenizer.decode(tokens[:n]).rstrip("\ufffd") for n in (size - 1, size))
        begins = {s: text.find(s, max(len(old) - len(s) + 1, 0)) for s in strings}
        found = [s for s in strings if begins[s] >= 0]
        if found:
            return size, min(found, key=begins.get)
    return None


def search_in_blocks(tokenizer, tokens, strings, least, block):
    search = StopStrings(strings, tokenizer.decode)
    search.skip(tokens[:least])
    for first in range(least, len(tokens), block):
        found = search.find(tokens[first : first + block])
        if found is not None:
            return first + found[0], found[1]
    return None


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
def test_a_string_is_found_as_in_the_whole_text(tokenizer):
    rng, hits = np.random.default_rng(0), 0
    for trial in range(200):
        tokens = tokens_of(rng, tokenizer)
        text = tokenizer.decode(tokens).replace("\ufffd", "")
        at = rng.integers(0, len(text), 2)
        strings = [text[a : a + rng.integers(1, 7)] for a in at]
        least, block = int(rng.integers(0, len(tokens))) * (trial % 2), int(rng.integers(1, 9))
        expected = whole_search(tokenizer, tokens, strings, least)
        assert search_in_blocks(tokenizer, tokens, strings, least, block) == expected
        hits += expected is not None
    assert hits > 100


@pytest.mark.parametrize(
    ("text", "strings", "found"),
    [
        ("the END of it", ["END"], "the END"),  # over several tokens
        ("大きい。", ["き"], "大き"),  # a character that is split
        ("x.y.z", ["z", "."], "x."),
        ("a\n\nb", ["\n"], "a\n"),
        ("nothing", ["END"], None),
    ],
)
def test_the_sample_ends_with_the_token_that_completes_a_string(text, strings, found):
    tokens = BYTES.encode(text).ids
    size, string = StopStrings(strings, BYTES.decode).find(tokens) or (len(tokens), None)
    assert (string is None) == (found is None)
    if found is not None:
        assert BYTES.decode(tokens[:size]).startswith(found)
        assert string not in BYTES.decode(tokens[: size - 1])


def test_of_two_strings_in_one_token_the_first_ends_it():
    pieces = {1: "a", 2: "x.y.z"}

    def decode(tokens):
        return "".join(pieces[token] for token in tokens)

    assert StopStrings(["z", "x"], decode).find([1, 2]) == (2, "x")


def test_bytes_that_never_become_a_character_do_not_pile_up():
    longest = 0

    def decode(tokens):
        nonlocal longest
        longest = max(longest, len(tokens))
        return BYTES.decode(tokens)

    text, token = GrowingText(decode), BYTES.token_to_id("ÿ")  # the byte 255
    said_so_far = "".join(text.add([token] * 8) for _ in range(100))
    assert said_so_far + text.rest() == "\ufffd" * 800
    assert longest <= 8 + 8 + 3  # two pieces, and what was open before them


WORDS = ["abc", "\n\n", "x", ".y.", "z", "z!x", "ab", "cdef", "."]


@pytest.mark.parametrize(
    ("tokens", "strings", "found", "without", "with_it"),
    [
        ([0, 1], ("\n",), "\n", "abc", "abc\n"),  # the token completes it twice
        ([2, 3], (".",), ".", "x", "x."),  # and more comes behind
        ([0, 5], ("x", "z"), "z", "abc", "abcz"),  # the first in the text, not in the list
        ([6, 7], ("cd", "bcde"), "bcde", "a", "abcde"),  # one that begins in the token before
        ([8, 2, 8], (".",), ".", ".x", ".x."),  # the first came before min_tokens
        ([4, 3], ("y", "y."), "y", "z.", "z.y"),  # two at one place: the first in the list
        ([0], ("q",), "q", "abc", "abc"),  # the engine's text had more: special tokens
    ],
)
def test_a_text_is_cut_at_the_first_string(tokens, strings, found, without, with_it):
    def decode(tokens):
        return "".join(WORDS[token] for token in tokens)

    sample = Completion(tokens, [], "stop", [], found)
    assert completion_text(decode, sample, strings) == without
    assert completion_text(decode, sample, strings, keep_stop=True) == with_it
    # what nothing but its length ended, and a stop token
    assert completion_text(decode, Completion([0, 1], [], "length", []), strings) == "abc\n\n"
    assert completion_text(decode, Completion([0, 1], [], "stop", []), strings) == "abc"


def test_where_the_first_string_is():
    assert first_stop("a.b.c", 0, (".",)) == (1, ".")
    assert first_stop("a.b.c", 2, (".",)) == (3, ".")  # "a." was known
    assert first_stop("a.b.c", 2, ("b", ".b")) == (1, ".b")  # it ends behind that
    assert first_stop("a.b.c", 0, ()) is None
