"""Hold a run against its model: ids for all tokens, ends that it can say, positions of a row.

Each command does so before it compiles anything. JAX looks up an id beyond a table without an
error, and an end that has no logit ends no response.
"""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl.config.objective_requirements import has_critic, needs_reference
from jaxrl.config.trainer import TrainerConfig
from jaxrl.config_error import fail
from jaxrl.hub import check_folder


def check_models(trainer: TrainerConfig) -> None:
    """Refuse paths of models beside the policy's that a run reads, and that are not there.

    Those of the hub are fetched.

    Raises:
        ConfigError: names the field.
    """
    ref, critic = trainer.ref.model.path, trainer.critic.model.path
    if ref is not None and needs_reference(trainer.algorithm):
        check_folder("trainer.ref.model.path", ref)
    if critic is not None and has_critic(trainer):
        check_folder("trainer.critic.model.path", critic)


def check_ids(
    field: str,
    path: str,
    vocabulary: int,
    tokenizer: Any = None,
    ends: Mapping[int, str] | None = None,
) -> None:
    """Refuse a model that lacks ids of its tokenizer, or those that end its responses.

    Special tokens alone may be more than the model has, as those for images in the tokenizer of a
    text model: `check_tokens` refuses data that use them.

    Args:
        field: of the config, that names the model.
        path: its folder or hub id.
        vocabulary: ids that it has.
        tokenizer: of the run; None = not loaded.
        ends: end-of-sequence ids, with the file that names each.

    Raises:
        ValueError: names ids, sizes, file and fix.
    """
    ends = dict(ends or {})
    if tokenizer is not None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {token for token, about in added.items() if about.special}
        lacks = {
            token: text
            for text, token in tokenizer.get_vocab().items()
            if token >= vocabulary and token not in special
        }
        if lacks:
            first, last = min(lacks), max(lacks)
            some = f"{lacks[first]!r} is {first}, {lacks[last]!r} is {last}"
            fail(
                field,
                path,
                f"the tokenizer has ids that the model with its {vocabulary} tokens (vocab_size in "
                f"config.json) has not: {some}. Use the tokenizer of the model; resize its "
                "embeddings if tokens were added",
            )
        ends.setdefault(tokenizer.eos_token_id, "the tokenizer")
    for token, source in ends.items():
        if not 0 <= token < vocabulary:
            fail(
                field,
                path,
                f"the end of sequence that {source} names is id {token}, and the model has ids "
                f"from 0 to {vocabulary - 1} (vocab_size in config.json): no response could ever "
                "say it. Write the id of the token that ends a turn there",
            )


def check_tokens(field: str, sources: Any, rows: Iterable[Any], vocabulary: int) -> None:
    """Refuse data with a token that the model has no id for.

    Args:
        field, sources: of the config, that name the data.
        rows: tokenised, each with `tokens`.
        vocabulary: ids of the model.

    Raises:
        ValueError: names the row, the token, the model's size and the fix.
    """
    for number, row in enumerate(rows):
        largest = max(row.tokens, default=0)
        if largest >= vocabulary:
            place = getattr(row, "place", f"row {number} of those that are used, counted from 0,")
            fail(
                field,
                sources,
                f"{place} has the token {largest}, and the model has ids from 0 to "
                f"{vocabulary - 1} (vocab_size in config.json). Use the tokenizer of the model, "
                "and no special tokens of other models in texts and templates",
            )


def warn_of_stops(stop_token_ids: Iterable[int] | None, vocabulary: int) -> None:
    """Warn of stop tokens that the model has no id for.

    It is no error: others may stop a response, and the list of a run that began with them is a part
    of what it is known by.
    """
    lacks = [token for token in stop_token_ids or () if not 0 <= token < vocabulary]
    if lacks:
        warnings.warn(
            f"generator.sampling_params.stop_token_ids has {lacks}, which stop nothing: the model "
            f"has ids from 0 to {vocabulary - 1}; leave them out",
            stacklevel=3,
        )


def warn_of_positions(
    field: str, value: Any, rows: str, longest: int, positions: int | None, path: str | None
) -> None:
    """Warn of rows that are longer than their model was made for.

    It is no error: rotary positions go on behind those that config.json names, and whoever scales
    them means to go there (`trainer.rope_scaling`).

    Args:
        field, value: of the config, that make the rows so long.
        rows: what is so long, before its number of tokens.
        longest: that number.
        positions: of the model; None = nobody says.
        path: of the model.
    """
    if positions is not None and longest > positions:
        warnings.warn(
            f"{field}={value}: {rows} {longest} tokens, and {path} was made for {positions} "
            "(max_position_embeddings); lower it, or scale them (trainer.rope_scaling)",
            stacklevel=3,
        )
