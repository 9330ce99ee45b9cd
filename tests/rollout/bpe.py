"""A byte-level BPE tokenizer in which most characters are several tokens."""

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "one two\n\nthree.\n\nfour",
    "größer für überall, ça va où",
    "日本語のテキスト、漢字とかな",
    "👩‍👩‍👧 and 🇩🇪 and 😀😀",
    "<eos>x<eos> y",
    " leading and trailing ",
]


@functools.cache
def bpe_tokenizer():
    """Trained on few texts, with tokens that hold a stop string and more; 290 tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator([*TEXTS, "a.\n\nb\n\n", "x.\n\n"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return tokenizer
