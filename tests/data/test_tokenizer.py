"""Loading tokenizers, encoding prompts, and the character tokenizer of the quickstart model."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from jaxrl.data.tokenizer import (
    character_tokenizer,
    encode_prompt,
    load_tokenizer,
    unknown_text,
    unknown_token,
)
from jaxrl.models.export import save_tokenizer

TINY = Path(__file__).parents[2] / "configs" / "tiny_char_model"
TOOL = Path(__file__).parents[2] / "configs" / "tiny_tool_model"
ALPHABET = "0123456789 +=>,-*.?abcdefghijklmnopqrstuvwxyz"
TAGS = ["<calc>", "</calc>", "<result>", "</result>", "<answer>", "</answer>"]
TOOL_ALPHABET = [*"0123456789+-*()>", *TAGS, "error"]
CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}"
    "{% endif %}"
)


def save_bpe(folder, *, chat_template=CHATML, eos_token="<|im_end|>", pad_token=None):
    """A byte-level BPE tokenizer trained on one sentence, as instruction-tuned models have."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(["the sum of three and four is the number seven"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos_token, pad_token=pad_token
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(str(folder))
    return folder


# ---- load_tokenizer ------------------------------------------------------------------------------


def test_bpe_prompt_is_the_chat_template_as_plain_token_ids(tmp_path):
    tokenizer = load_tokenizer(save_bpe(tmp_path))
    tokens = encode_prompt(tokenizer, [{"role": "user", "content": "the sum of 3"}])
    assert all(type(token) is int for token in tokens)
    assert tokens[0] == tokenizer.convert_tokens_to_ids("<|im_start|>") == 0
    assert tokenizer.decode(tokens) == (
        "<|im_start|>user\nthe sum of 3<|im_end|>\n<|im_start|>assistant\n"
    )


def test_template_variables_reach_the_template(tmp_path):
    tokenizer = load_tokenizer(save_bpe(tmp_path))
    tokens = encode_prompt(tokenizer, [{"role": "user", "content": "hi"}], enable_thinking=False)
    assert tokenizer.decode(tokens).endswith("assistant\n<think></think>")


def test_generation_prompt_can_be_left_out(tmp_path):
    tokenizer = load_tokenizer(save_bpe(tmp_path))
    tokens = encode_prompt(
        tokenizer, [{"role": "user", "content": "hi"}], add_generation_prompt=False
    )
    assert tokenizer.decode(tokens) == "<|im_start|>user\nhi<|im_end|>\n"


def test_missing_pad_token_becomes_eos(tmp_path):
    tokenizer = load_tokenizer(save_bpe(tmp_path))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1


def test_existing_pad_token_stays(tmp_path):
    tokenizer = load_tokenizer(save_bpe(tmp_path, pad_token="<|im_start|>"))
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


def test_template_file_replaces_the_template(tmp_path):
    save_bpe(tmp_path)
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}!")
    tokenizer = load_tokenizer(tmp_path, template)
    assert tokenizer.decode(encode_prompt(tokenizer, [{"role": "user", "content": "hi"}])) == "hi!"


def test_missing_template_file_is_named(tmp_path):
    save_bpe(tmp_path)
    with pytest.raises(ValueError, match=r"chat template file '.*nope\.jinja' does not exist"):
        load_tokenizer(tmp_path, tmp_path / "nope.jinja")


def test_no_chat_template_names_folder_and_remedy(tmp_path):
    save_bpe(tmp_path, chat_template=None)
    with pytest.raises(ValueError, match=f"'{tmp_path}' has no chat template.*name_or_path=FILE"):
        load_tokenizer(tmp_path)


def test_no_eos_token_names_folder_and_remedy(tmp_path):
    save_bpe(tmp_path, eos_token=None)
    with pytest.raises(ValueError, match=f"'{tmp_path}' has no end-of-sequence token.*eos_token"):
        load_tokenizer(tmp_path)


def test_folder_with_config_but_without_tokenizer(tmp_path):
    # transformers would return an empty Qwen2 tokenizer here.
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ValueError, match=f"folder '{tmp_path}' holds no tokenizer: none of"):
        load_tokenizer(tmp_path)


def test_missing_folder_is_named():
    with pytest.raises(FileNotFoundError, match=r"/no/such/folder is not a folder; give a local"):
        load_tokenizer("/no/such/folder")


# ---- character_tokenizer -------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["3142", " a b  c, d + 1 = 4 >", "", "x" * 50, "  "])
def test_characters_survive_a_round_trip(text):
    tokenizer = character_tokenizer(ALPHABET)
    tokens = tokenizer(text).input_ids
    assert len(tokens) == len(text)
    assert tokenizer.decode(tokens) == text


def test_token_is_the_place_in_the_alphabet_then_specials():
    tokenizer = character_tokenizer("ba>")
    assert tokenizer("ab>z<eos>").input_ids == [1, 0, 2, 5, 3]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (3, 4, 5)
    assert len(tokenizer) == 6


def test_eos_is_left_out_only_when_asked():
    tokenizer = character_tokenizer(ALPHABET)
    assert tokenizer.decode([1, 2, 45]) == "12<eos>"
    assert tokenizer.decode([1, 2, 45], skip_special_tokens=True) == "12"
    assert [tokenizer.decode([token]) for token in (1, 10, 45)] == ["1", " ", "<eos>"]


def test_finished_conversation_starts_with_its_prompt():
    tokenizer = character_tokenizer(ALPHABET, generation_prompt="=>")
    prompt = [{"role": "user", "content": "31"}]
    answered = [*prompt, {"role": "assistant", "content": "13"}]
    tokens = encode_prompt(tokenizer, prompt)
    # "3", "1", "=", ">", then "1", "3" and the end.
    assert tokens == [3, 1, 12, 13]
    finished = encode_prompt(tokenizer, answered, add_generation_prompt=False)
    assert finished == [3, 1, 12, 13, 1, 3, 45]


@pytest.mark.parametrize("alphabet", ["", "abca"])
def test_alphabet_names_each_character_once(alphabet):
    with pytest.raises(ValueError, match=f"each character once and not be empty: '{alphabet}'"):
        character_tokenizer(alphabet)


def test_generation_prompt_must_be_in_the_alphabet():
    with pytest.raises(ValueError, match="generation_prompt '>' has characters"):
        character_tokenizer("abc")


def test_words_of_the_alphabet_are_one_token():
    tokenizer = character_tokenizer(["<", "a", ">", "<a>", "a."])
    #      a  <  <a>  a.  a  >  unknown
    assert tokenizer.encode("a<<a>a.a>b") == [1, 0, 3, 4, 1, 2, tokenizer.unk_token_id]
    assert tokenizer.decode([3, 4, 0, 1]) == "<a>a.<a"


# ---- configs/tiny_char_model, configs/tiny_tool_model --------------------------------------------
# Made by save_tokenizer(character_tokenizer(ALPHABET), TINY); config.json is written by hand.


@pytest.mark.parametrize(("folder", "alphabet"), [(TINY, ALPHABET), (TOOL, TOOL_ALPHABET)])
def test_tiny_folder_is_what_character_tokenizer_makes(tmp_path, folder, alphabet):
    tokenizer = character_tokenizer(alphabet)
    save_tokenizer(tokenizer, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((folder / name).read_text()) == json.loads((tmp_path / name).read_text())
    config = AutoConfig.from_pretrained(str(folder))
    assert config.vocab_size == len(tokenizer) == len(alphabet) + 3
    assert config.eos_token_id == tokenizer.eos_token_id
    assert config.pad_token_id == tokenizer.pad_token_id


def test_tiny_folder_loads_as_a_hugging_face_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(str(TINY))
    loaded = load_tokenizer(TINY)
    messages = [{"role": "user", "content": "3142"}]
    assert encode_prompt(loaded, messages) == [3, 1, 4, 2, 13]
    assert encode_prompt(tokenizer, messages) == [3, 1, 4, 2, 13]
    assert tokenizer.decode([1, 2, 3, 4, 45]) == "1234<eos>"


def test_tiny_config_fits_the_tokenizer():
    config = AutoConfig.from_pretrained(str(TINY))
    tokenizer = load_tokenizer(TINY)
    assert config.model_type == "qwen3"
    assert config.vocab_size == len(tokenizer) == 48
    assert config.eos_token_id == tokenizer.eos_token_id == 45
    assert config.pad_token_id == tokenizer.pad_token_id == 46
    assert config.rope_parameters["rope_theta"] == 10000.0
    # embedding 48 * 64; per layer: q and o 64 * 64 each, k and v 64 * 32 each, three 64 * 256 in
    # the MLP, two norms of 64, two head norms of 16; the final norm 64:
    # 3072 + 2 * (8192 + 4096 + 49152 + 128 + 32) + 64 = 126336
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_config(config).num_parameters() == 126336


def test_a_token_of_its_own_stands_for_unknown_text():
    tokenizer = character_tokenizer("12>")
    assert tokenizer("1x", add_special_tokens=False)["input_ids"][1] == unknown_token(tokenizer)
    assert unknown_text(tokenizer, "1x2é>") == ["x", "é"]
    tokenizer.unk_token = tokenizer.eos_token  # as of GPT-2: it knows every byte
    assert unknown_token(tokenizer) is None
