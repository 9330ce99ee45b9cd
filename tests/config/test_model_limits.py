"""Ids, ends and positions that a model has not: said before anything is compiled."""

import shutil
import warnings
from types import SimpleNamespace

import pytest

from jaxrl.config.model_limits import check_ids, check_tokens, warn_of_positions, warn_of_stops
from jaxrl.data.tokenizer import character_tokenizer, load_tokenizer
from jaxrl.models import hf
from jaxrl.plan import main as plan
from jaxrl.rollout.server import build as serve
from jaxrl.sft import build as sft
from jaxrl.tools.evaluate import scores
from jaxrl.tools.tinker import build as tinker
from jaxrl.train import BasePPOExp
from tests.test_sft import small as supervised
from tests.test_train import QUICKSTART, ROOT, small
from tests.test_wrong_inputs import changed_json

FIELD, TINY = "trainer.policy.model.path", ROOT / "configs" / "tiny_char_model"
# a to e are 0 to 4, the end is 5, the padding 6, what is unknown 7
TOKENIZER = character_tokenizer("abcde", generation_prompt="e")


def test_ids_that_only_the_tokenizer_has_are_refused():
    with pytest.raises(ValueError) as refused:
        check_ids(FIELD, "m", 3, TOKENIZER)
    assert str(refused.value).startswith(
        f"{FIELD}='m': the tokenizer has ids that the model with its 3 tokens (vocab_size in "
        "config.json) has not: 'd' is 3, 'e' is 4. Use the tokenizer of the model"
    )
    for vocabulary in (8, 9):  # the same number, and rows that nobody knows
        check_ids(FIELD, "m", vocabulary, TOKENIZER, {5: "x"})


def test_special_tokens_may_be_more_as_long_as_nothing_uses_them():
    check_ids(FIELD, "m", 6, TOKENIZER)  # without padding and the unknown
    with pytest.raises(ValueError, match="that the tokenizer names is id 5, .* from 0 to 4 "):
        check_ids(FIELD, "m", 5, TOKENIZER)
    rows = [SimpleNamespace(tokens=(0, 5)), SimpleNamespace(tokens=(1, 7), place="prompt 0:1")]
    check_tokens("data.train_data", ["x"], rows, 8)
    with pytest.raises(ValueError, match=r"train_data=\['x'\]: prompt 0:1 has the token 7, .* 6 "):
        check_tokens("data.train_data", ["x"], rows, 7)
    with pytest.raises(ValueError, match="row 0 of those that are used, .* has the token 5"):
        check_tokens("data.train_data", ["x"], rows, 5)
    check_tokens("data.train_data", ["x"], [SimpleNamespace(tokens=())], 1)


@pytest.mark.parametrize("end", [8, 999, -1])
def test_an_end_without_an_id_is_refused_with_its_file(end):
    message = rf"the end of sequence that m/generation_config.json names is id {end}, .* 0 to 7 "
    with pytest.raises(ValueError, match=message):
        check_ids(FIELD, "m", 8, TOKENIZER, {5: "m/config.json", end: "m/generation_config.json"})
    with pytest.raises(ValueError, match=message):
        check_ids(FIELD, "m", 8, None, {end: "m/generation_config.json"})


def test_every_end_of_a_folder_with_the_file_that_names_it(tmp_path):
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    assert hf.eos_sources(tmp_path) == {45: str(tmp_path / "generation_config.json")}
    changed_json("generation_config.json", eos_token_id=[999, 44])(tmp_path)
    changed_json("config.json", eos_token_id=[44, 43])(tmp_path)
    files = {999: "generation_config.json", 44: "generation_config.json", 43: "config.json"}
    found = {end: str(tmp_path / name) for end, name in files.items()}
    assert hf.eos_sources(tmp_path) == found
    assert hf.eos_token_ids(tmp_path) == [43, 44, 999]


def told(call, *args):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call(*args)
    return [str(warning.message) for warning in said]


def test_what_is_only_odd_is_warned_of():
    (line,) = told(warn_of_stops, [3, 8, -1], 8)
    assert "stop_token_ids has [8, -1], which stop nothing: the model has ids from 0 to 7" in line
    assert told(warn_of_stops, [7], 8) == told(warn_of_stops, None, 8) == []
    (line,) = told(warn_of_positions, "a.b", 2, "a row has", 257, 256, "m")
    assert line.startswith("a.b=2: a row has 257 tokens, and m was made for 256 (max_position_emb")
    for known in (257, None):
        assert told(warn_of_positions, "a.b", 2, "a row has", 257, known, "m") == []


# ------------------------------------------------------------------ the commands


class Compiling(Exception):
    """Stands where a command would begin to compile."""


def stop(*_, **__):
    raise Compiling


@pytest.fixture(name="short")
def short_fixture(tmp_path):
    """A model folder that was made for 8 positions."""
    folder = tmp_path / "short"
    shutil.copytree(TINY, folder)
    changed_json("config.json", max_position_embeddings=8)(folder)
    return {FIELD: str(folder)}


def test_long_rows_are_warned_of_where_a_run_is_trained(tmp_path, short):
    run = BasePPOExp(small(tmp_path, **short))
    with pytest.warns(UserWarning, match="max_prompt_length=16: .* have 22 tokens, .* for 8 "):
        run.build().recorder.close()  # 16 and 6


def test_long_rows_are_warned_of_where_a_run_is_supervised(tmp_path, short):
    with pytest.warns(UserWarning, match="sft.max_length=None: the longest .* 15 tokens, .* for 8"):
        sft(supervised(tmp_path / "run", **short)).close()


@pytest.mark.parametrize("command", [serve, tinker], ids=["serve", "tinker"])
def test_long_rows_are_warned_of_where_a_model_is_served(command, tmp_path, short, monkeypatch):
    monkeypatch.setattr(command, "native_engine", stop)
    short |= {"tinker.root": str(tmp_path / "tinker"), "serve.max_model_len": 64}
    with (
        pytest.warns(UserWarning, match="serve.max_model_len=64: a row may have 64 tokens, .* 8 "),
        pytest.raises(Compiling),
    ):
        command.make_server(small(tmp_path, **short))


def test_long_rows_are_warned_of_where_a_run_is_evaluated(tmp_path, short, monkeypatch):
    monkeypatch.setattr(scores, "asked_engine", stop)
    with (
        pytest.warns(UserWarning, match="max_prompt_length=16: .* have 22 tokens, .* for 8 "),
        pytest.raises(Compiling),
    ):
        scores.evaluate_subject(small(tmp_path, **short), output=tmp_path / "evaluation")


def test_long_rows_are_warned_of_where_a_run_is_planned(short):
    with pytest.warns(UserWarning, match="max_prompt_length=16: .* have 22 tokens, .* for 8 "):
        plan([f"--config={QUICKSTART}", f"--config.{FIELD}={short[FIELD]}", "--estimate"])


def test_a_reference_needs_the_ids_too(tmp_path, monkeypatch):
    folder = tmp_path / "reference"
    shutil.copytree(TINY, folder)
    changed_json("config.json", vocab_size=40)(folder)
    run = BasePPOExp(small(tmp_path, **{"trainer.ref.model.path": str(folder)}))
    with pytest.raises(ValueError, match=r"trainer.ref.model.path=.* its 40 tokens .*'v' is 40, "):
        run.build()


def test_the_tokenizer_of_the_recipes_is_the_models():
    for folder in sorted((ROOT / "configs").glob("tiny_*")):
        model, ends = hf.load_config(folder), hf.eos_sources(folder)
        check_ids(FIELD, str(folder), model.vocab_size, load_tokenizer(folder), ends)
