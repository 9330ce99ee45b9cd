"""What prompts were answered in their last epoch: which to begin first, and what to guess from.

Changes of nothing but speed come of it. But what a step computes beside what decides its last bits,
so all of it follows from finished steps, and is in the checkpoint.
"""

import dataclasses
import io
import json
from collections.abc import Sequence

import numpy as np

from jaxrl.data.columns import trajectory_numbers
from jaxrl.rollout.native.decode import LONGEST_MATCH
from jaxrl.types import Earlier, GeneratorOutput, Prompt

RATE = "generate/tokens_per_decode_step"
TRY_AGAIN = 10  # steps after which guesses that did not pay are tried again


class AnswerHistory:
    """Keep of each prompt how long its answers were, and the answers as far as they are asked for.

    Args:
        tokens: most that are kept of a prompt.
        least: tokens of a decode step from which on guesses pay.
    """

    def __init__(self, tokens: int = 0, least: float = 0.0) -> None:
        self.tokens, self.least = tokens, least
        self.longest: dict[str, int] = {}  # answer of each prompt, in tokens
        self.answers: dict[str, list[int]] = {}  # -1 between two
        self.rate = np.inf  # tokens of a decode step, when last something was guessed

    def add(self, output: GeneratorOutput, uids: Sequence[str]) -> None:
        """Take the answers of a finished batch in place of those that its prompts had before.

        Args:
            uids: of the prompts, one for each trajectory; "a#2" is "a", see `distinct_uids`.
        """
        self.rate = output["rollout_metrics"].get(RATE, self.rate)
        answers = output["response_ids"]
        of_row = trajectory_numbers(output.get("is_last_step", [True] * len(answers)))
        taken = set[str]()
        for row, (number, answer) in enumerate(zip(of_row.tolist(), answers, strict=True)):
            uid = uids[int(number)].partition("#")[0]
            if uid not in taken:
                taken.add(uid)
                self.longest[uid], self.answers[uid] = 0, []
            self.longest[uid] = max(self.longest[uid], len(answer))
            kept = self.answers[uid]
            if len(kept) < self.tokens:  # with what stands before it: where an answer begins
                text = [*output["prompt_token_ids"][row][-LONGEST_MATCH:], *answer, -1]
                self.answers[uid] = (kept + text)[: self.tokens]

    def told(self, prompts: Sequence[Prompt], step: int) -> list[Prompt]:
        """Return prompts with what is known of them."""
        guesses = self.rate >= self.least or step % TRY_AGAIN == 0

        def known(uid: str) -> Earlier:
            answers = tuple(self.answers.get(uid, ()))
            return Earlier(self.longest.get(uid, 0), answers, guesses)

        return [
            dataclasses.replace(prompt, earlier=known(prompt.uid.partition("#")[0]))
            for prompt in prompts
        ]

    def to_bytes(self) -> np.ndarray:
        """Return all of it as bytes [N] uint8: an npz archive in which nothing is pickled."""
        file, uids = io.BytesIO(), list(self.longest)
        answers = [np.array(self.answers[uid], np.int32) for uid in uids]
        np.savez_compressed(
            file,
            uids=np.frombuffer(json.dumps(uids).encode(), np.uint8),
            longest=np.array([self.longest[uid] for uid in uids], np.int32),
            lengths=np.array([len(answer) for answer in answers], np.int32),
            answers=np.concatenate([np.zeros(0, np.int32), *answers]),
            rate=np.float64(self.rate),
        )
        return np.frombuffer(file.getvalue(), np.uint8)

    def from_bytes(self, data: np.ndarray) -> None:
        """Take what `to_bytes` returned."""
        with np.load(io.BytesIO(data.tobytes()), allow_pickle=False) as file:
            uids = json.loads(file["uids"].tobytes())
            self.longest = dict(zip(uids, file["longest"].tolist(), strict=True))
            ends = np.cumsum(file["lengths"]).tolist()
            tokens, begins = file["answers"].tolist(), [0, *ends]
            self.answers = {
                uid: tokens[begin:end] for uid, begin, end in zip(uids, begins, ends, strict=False)
            }
            self.rate = float(file["rate"])
