"""What is kept of the answers of finished steps, and what a prompt is told of it."""

import numpy as np
import pytest

from jaxrl.config import TrainConfig, validate
from jaxrl.rollout.conversations.history import AnswerHistory
from jaxrl.types import Earlier, Prompt

PROMPTS = [Prompt(uid, [], (1, 2, 3, 4, 5), "sort_digits") for uid in ("0:1", "0:2")]


def rows(*answers, rate=2.0):
    return {
        "prompt_token_ids": [[1, 2, 3, 4, 5]] * len(answers),
        "response_ids": list(answers),
        "rollout_metrics": {"generate/tokens_per_decode_step": rate},
    }


def earlier(history, step=1):
    return [prompt.earlier for prompt in history.told(PROMPTS, step)]


def test_the_answers_of_the_last_batch_take_the_place_of_earlier_ones():
    history = AnswerHistory(tokens=12)
    assert earlier(history) == [Earlier(), Earlier()]
    history.add(rows([7], [7, 8], [9]), ["0:1", "0:1", "0:2"])
    # four tokens of the prompt, the answer, -1; of 0:1 12 of 6 + 7 tokens
    assert earlier(history) == [
        Earlier(2, (2, 3, 4, 5, 7, -1, 2, 3, 4, 5, 7, 8)),
        Earlier(1, (2, 3, 4, 5, 9, -1)),
    ]
    history.add(rows([6, 6, 6]), ["0:1#2"])  # the prompt came twice into a batch
    assert earlier(history)[0] == Earlier(3, (2, 3, 4, 5, 6, 6, 6, -1))
    again = AnswerHistory(tokens=12)
    again.from_bytes(history.to_bytes())
    assert earlier(again) == earlier(history)
    assert again.rate == history.rate == 2.0


def test_an_empty_history_is_kept_too():
    again = AnswerHistory(tokens=4)
    again.from_bytes(AnswerHistory(tokens=4).to_bytes())
    assert earlier(again) == [Earlier(), Earlier()]
    assert again.rate == np.inf


def test_what_did_not_pay_is_not_guessed_but_in_every_tenth_step():
    history = AnswerHistory(least=1.5)
    assert earlier(history)[0].guesses  # not tried yet
    history.add(rows([7], rate=1.2), ["0:1"])
    guesses = [earlier(history, step)[0].guesses for step in range(2, 22)]
    assert [step for step, on in enumerate(guesses, 2) if on] == [10, 20]
    quiet = rows([7])
    quiet["rollout_metrics"] = {}  # nothing was guessed: what is known stays
    history.add(quiet, ["0:1"])
    assert not earlier(history)[0].guesses
    history.add(rows([7], rate=1.5), ["0:1"])
    assert earlier(history)[0].guesses


ENGINE = "generator.inference_engine"
ASYNC = {"trainer.fully_async.enabled": True}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({f"{ENGINE}.speculative_history": 9}, r"history=9: is of use only with speculative_tok"),
        ({f"{ENGINE}.speculative_least": 1.5}, r"least=1.5: is of use only with speculative_tok"),
        (
            {f"{ENGINE}.speculative_history": 9, f"{ENGINE}.speculative_tokens": 3, **ASYNC},
            r"speculative_history=9: what is known of earlier answers follows from finished",
        ),
        (
            {
                f"{ENGINE}.speculative_least": 1.5,
                f"{ENGINE}.speculative_tokens": 3,
                "generator.sampling_params.stop": ["</a>"],
            },
            r"speculative_least=1.5: cannot be judged with generator.sampling_params.stop",
        ),
        ({"generator.longest_first": True, **ASYNC}, r"longest_first=True: what is known"),
    ],
)
def test_what_nobody_would_use_is_refused(settings, message):
    sizes = {"trainer.policy_mini_batch_size": 64, "trainer.train_batch_size": 64}
    with pytest.raises(ValueError, match=message):
        validate(TrainConfig.from_cli_overrides({**sizes, **settings}))
