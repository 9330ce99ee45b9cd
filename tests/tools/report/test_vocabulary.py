"""What each token says, of byte-level and of other vocabularies."""

from pathlib import Path

import numpy as np
import pytest

from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.tools.report.run_files import RunFiles
from jaxrl.tools.report.vocabulary import Vocabulary, byte_alphabet, tokenizer_of
from tests.tools.report.made_run import EOS, ids, save_tokenizer

TINY = Path(__file__).parents[3] / "configs" / "tiny_char_model"


def test_bytes_of_a_byte_level_vocabulary(tmp_path):
    words = Vocabulary(save_tokenizer(tmp_path).backend_tokenizer)
    assert words.numbers(np.array([*ids("a é"), EOS])).tolist() == [0, 1, 2, 3, 4]
    assert words.entries == ["a", " ", [0xC3], [0xA9], "<eos>"]  # é is C3 A9
    assert words.special == [4]
    assert words.ids == [97, 32, 0xC3, 0xA9, EOS]
    assert words.numbers(np.array([EOS, 97])).tolist() == [4, 0]  # known ones keep their numbers


def test_the_text_of_tokens(tmp_path):
    words = Vocabulary(save_tokenizer(tmp_path).backend_tokenizer)
    assert words.text(np.array([*ids("né"), 0xC3, EOS])) == "né\ufffd<eos>"  # one that is cut off


def test_the_alphabet_of_gpt_2():
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert alphabet["\u0120"] == ord(" ")  # Ġ
    assert alphabet["\u010a"] == ord("\n")  # Ċ
    assert alphabet["a"] == ord("a")


def test_characters(tmp_path):
    tokenizer = load_tokenizer(TINY)
    given = tokenizer.encode("12>", add_special_tokens=False)
    words = Vocabulary(tokenizer.backend_tokenizer)
    words.numbers(np.array([*given, tokenizer.eos_token_id]))
    assert words.entries == ["1", "2", ">", "<eos>"]
    assert words.special == [3]


def test_tokens_that_are_not_in_the_vocabulary_are_shown_by_their_ids(tmp_path):
    words = Vocabulary(save_tokenizer(tmp_path).backend_tokenizer)
    words.numbers(np.array([999]))
    assert words.entries == ["\u27e8999\u27e9"]


def test_without_a_tokenizer_all_are(tmp_path):
    words = Vocabulary(None)
    assert words.numbers(np.array([7, 3, 7])).tolist() == [0, 1, 0]
    assert words.entries == ["\u27e87\u27e9", "\u27e83\u27e9"]
    run = RunFiles(tmp_path, settings={"trainer": {"policy": {"model": {"path": str(tmp_path)}}}})
    assert tokenizer_of(run, None) is None
    assert "--tokenizer" in run.notes[0]
    with pytest.raises(ValueError, match="holds no tokenizer"):
        tokenizer_of(run, str(tmp_path))


def test_an_export_has_the_tokenizer_too(tmp_path):
    save_tokenizer(tmp_path / "global_step_4" / "policy")
    gone = {"policy": {"model": {"path": str(tmp_path)}}, "export_path": str(tmp_path)}
    run = RunFiles(tmp_path, settings={"trainer": gone})
    assert tokenizer_of(run, None).get_vocab_size() == 257
    assert not run.notes


def test_more_than_65536_tokens_take_four_bytes():
    words = Vocabulary(None)
    assert words.numbers(np.arange(2**16)).dtype == np.uint16
    assert words.numbers(np.array([2**16])).dtype == np.uint32
