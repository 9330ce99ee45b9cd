"""Policy-gradient updates in torch and transformers, for `train_step.py`; jaxrl is not imported.

Rows are sorted by length and padded to the longest of their microbatch, the best that padding can
do; attention is torch's scaled-dot-product kernel.
"""

import contextlib
import json
import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.systems.worker import Clock, TrainWork, answer, wait_for_step

CLIP = 0.2


def microbatches(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Longest first; as many rows as fit, padded to the first."""
    left, parts = sorted(lengths, reverse=True), []
    while left:
        rows = max(max_tokens // left[0], 1)
        parts.append(left[:rows])
        left = left[rows:]
    return parts


class Steps:
    """The model, its optimizer, and one update on a case of the work."""

    def __init__(self, work: TrainWork) -> None:
        self.work = work
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        settings = dict(work.model)
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        ).to(self.device)
        if work.recompute:
            self.model.gradient_checkpointing_enable()
        self.model.train()
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=work.learning_rate, weight_decay=0.0)

    def run(self, case: str) -> None:
        """Clipped policy gradient over the case's trajectories, then one optimizer step."""
        lengths = self.work.lengths[case]
        generator = torch.Generator().manual_seed(0)
        for part in microbatches(lengths, self.work.max_tokens):
            shape = (len(part), part[0])
            tokens = torch.randint(3, self.work.model["vocab_size"], shape, generator=generator)
            tokens = tokens.to(self.device)
            mask = torch.arange(shape[1]) < torch.tensor(part)[:, None]
            count = sum(lengths) - len(lengths)
            if self.work.answer is not None:  # rows are equally long
                count = len(lengths) * self.work.answer
            self.backward(tokens, mask.to(self.device), count)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, tokens: torch.Tensor, mask: torch.Tensor, count: int) -> None:
        """Add the gradient of one microbatch [B, T]; `count` tokens are sampled in all."""
        kept = tokens.shape[1] if self.work.answer is None else self.work.answer + 1
        autocast = torch.autocast(self.device, torch.bfloat16)
        with autocast if self.work.bf16 else contextlib.nullcontext():
            given = {"input_ids": tokens, "attention_mask": mask, "logits_to_keep": kept}
            logits = self.model(**given, use_cache=False).logits
        tokens, mask = tokens[:, -kept:], mask[:, -kept:]
        log_probs = -torch.nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        ).view(len(tokens), -1)
        ratio = (log_probs - log_probs.detach()).exp()
        loss = -torch.minimum(ratio, ratio.clamp(1 - CLIP, 1 + CLIP))
        ((loss * mask[:, 1:]).sum() / count).backward()


def main() -> None:
    """Answer the parent, one step at a time."""
    steps = Steps(TrainWork(**json.loads(sys.argv[1])))
    clock, cuda = Clock(), steps.device == "cuda"
    answer({"device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__})
    while True:
        case = wait_for_step()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        clock.start()
        steps.run(case)
        if cuda:
            torch.cuda.synchronize()
        peak: dict[str, Any] = {"peak": torch.cuda.max_memory_allocated()} if cuda else {}
        answer(clock.total() | peak)


if __name__ == "__main__":
    main()
