"""Supervised fine-tuning over Tinker's API: a model that sorts three digits imitates sorting two.

    python examples/tinker/sft.py           # a server as in rl.py

Two steps are on their way at a time, so that the server need not wait for the client. The loss of a
token falls from 4.1 to 0.003 in 40 steps, and all answers to new digits are right; 40 s on two busy
cores.
"""

import argparse
import random
import warnings

import numpy as np
import tinker
from tinker import types

warnings.filterwarnings("ignore", category=FutureWarning, module="tinker")


def datum(prompt: list[int], answer: list[int]) -> types.Datum:
    """Make one sequence of a call, of which the answer is imitated."""
    tokens = [*prompt, *answer]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def main() -> None:
    """Train, print the loss per token, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="sorts", help="of what is saved")
    options = parser.parse_args()

    service, draw = tinker.ServiceClient(), random.Random(options.seed)
    base = tinker.RestClient().get_server_capabilities().result().supported_models[0].model_name
    model = service.create_lora_training_client(base, rank=22, seed=options.seed).result()
    tokenizer = model.get_tokenizer()

    def example() -> types.Datum:
        digits = "".join(draw.choices("0123456789", k=2))
        prompt, answer = (
            tokenizer.encode(text, add_special_tokens=False)
            for text in (f"{digits}>", "".join(sorted(digits)))
        )
        return datum(prompt, [*answer, tokenizer.eos_token_id])

    pending = []
    for step in range(1, options.steps + 1):
        data = [example() for _ in range(options.batch)]
        tokens = sum(sum(d.loss_fn_inputs["weights"].data) for d in data)
        loss = model.forward_backward(data, "cross_entropy")
        update = model.optim_step(types.AdamParams(learning_rate=options.lr, grad_clip_norm=1.0))
        pending.append((step, tokens, loss, update))
        if len(pending) == 2 or step == options.steps:
            for number, count, forward, updated in pending:
                updated.result()
                value = forward.result().metrics["loss:sum"] / count
                print(f"step {number}: loss {value:.3f}", flush=True)
            pending = []
    sampler = model.save_weights_for_sampler(options.name).result().path
    print(f"saved {sampler}")

    client = service.create_sampling_client(model_path=sampler).result()
    greedy, right = types.SamplingParams(max_tokens=4, temperature=0.0), []
    for _ in range(50):
        digits = "".join(draw.choices("0123456789", k=2))
        prompt = tokenizer.encode(f"{digits}>", add_special_tokens=False)
        found = client.sample(
            prompt=types.ModelInput.from_ints(prompt), num_samples=1, sampling_params=greedy
        ).result()
        text = tokenizer.decode(found.sequences[0].tokens, skip_special_tokens=True)
        right.append(text == "".join(sorted(digits)))
    print(f"right: {np.mean(right):.2f}")
    service.close("success").result()


if __name__ == "__main__":
    main()
