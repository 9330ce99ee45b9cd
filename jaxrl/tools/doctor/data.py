"""The run can be built; its prompts, its tokenizer and its environments are fit for the model."""

import numpy as np

from jaxrl import config as cfg
from jaxrl.data.tokenizer import encode_prompt
from jaxrl.rollout.conversations.drift import Drift, drifts
from jaxrl.tools.doctor.examined_run import ExaminedRun
from jaxrl.tools.doctor.finding import Finding, failed, not_here, passed

ANSWER = "I am an assistant."  # a message that any template takes


def build(examined: ExaminedRun) -> Finding:
    """Check that every part of the small run can be made, and has weights."""
    trainer, config = examined.trainer, examined.config
    sizes = {axis: size for axis, size in trainer.mesh.shape.items() if size > 1} or {"devices": 1}
    computes = cfg.compute_dtype(config.trainer, "policy")
    engine = cfg.engine_dtype(config.generator.inference_engine)
    about = f"trains {trainer.policy.size()} on {sizes}; trainer {computes}, engine {engine}"
    return passed(about=about)


def prompts(examined: ExaminedRun) -> Finding:
    """Check that prompts differ; that the model has their token ids was checked to build the run.

    See `config.model_limits`.
    """
    trainer, model = examined.trainer, examined.trainer.model
    chosen = trainer.train_prompts
    largest = max(max(prompt.tokens) for prompt in chosen)
    longest, most = (
        max(len(p.tokens) for p in chosen),
        examined.full_config.trainer.max_prompt_length,
    )
    about = f"{len(chosen)} prompts of at most {longest} tokens (max_prompt_length {most})"
    about = "; ".join((about, *examined.data_card.warnings))
    vocabulary = getattr(model, "vocab_size", None)
    messages = {repr(prompt.messages) for prompt in chosen}
    if len({prompt.tokens for prompt in chosen}) == 1 < len(messages):
        return failed(
            len(messages),
            1,
            f"different messages with the same tokens; {about}",
            cause="all prompts are the same tokens: the chat template does not show the messages",
            fix="print one: tokenizer.decode(prompt.tokens); give another generator.chat_template",
        )
    return passed(largest, "" if vocabulary is None else vocabulary - 1, f"largest id; {about}")


def tokenizer(examined: ExaminedRun) -> Finding:
    """Check that the model has an end-of-sequence token, which ends a turn of the template."""
    tokens, model = examined.tokenizer, examined.trainer.model
    stops = {*examined.trainer.eos_token_ids}
    stops |= {*(examined.config.generator.sampling_params.stop_token_ids or ())}
    vocabulary = getattr(model, "vocab_size", len(tokens))
    about = (
        f"{len(tokens)} tokens for {vocabulary} of the model; responses end with {sorted(stops)}"
    )
    if max(stops) >= vocabulary:
        return failed(
            max(stops),
            vocabulary - 1,
            about,
            cause=f"{max(stops)} stops nothing: the model has ids from 0 to {vocabulary - 1}",
            fix="leave it out of generator.sampling_params.stop_token_ids",
        )
    end = end_of_turn(examined)
    if end is None:
        return passed(len(tokens), vocabulary, f"{about}; the template ends no turn with a token")
    if end not in stops:
        return failed(
            end,
            str(sorted(stops)),
            about,
            cause=f"the chat template ends a turn with {tokens.decode([end])!r} (id {end}), which "
            "stops no response: the model goes on until max_generate_length",
            fix=f"add {end} to generator.sampling_params.stop_token_ids, or to eos_token_id in the "
            "model's generation_config.json",
        )
    return passed(len(tokens), vocabulary, f"{about}; the template's turns end with {end}")


def end_of_turn(examined: ExaminedRun) -> int | None:
    """Return the special token that the template puts after what the assistant said, or None."""
    tokens = examined.tokenizer
    variables = examined.config.generator.chat_template_kwargs | {"add_generation_prompt": False}
    conversation = [
        {"role": "user", "content": "I am a user."},
        {"role": "assistant", "content": ANSWER},
    ]
    encoded = encode_prompt(tokens, conversation, **variables)
    text = tokens.decode(encoded)
    if ANSWER not in text:  # letters that the tokenizer does not know
        special = [token for token in encoded if token in tokens.all_special_ids]
        return special[-1] if special and special[-1] == encoded[-1] else None
    after = text.rpartition(ANSWER)[2]
    following = tokens.encode(after, add_special_tokens=False)
    return next((token for token in following if token in tokens.all_special_ids), None)


def turns(examined: ExaminedRun) -> Finding:
    """Compare conversations turn by turn with what the template writes of them as a whole.

    Nothing is wrong where they differ: the run trains the tokens that were sampled. But what is
    trained on the whole text, as by `jaxrl.sft`, is trained on others.
    """
    generator = examined.config.generator
    stops = {*examined.trainer.eos_token_ids, *(generator.sampling_params.stop_token_ids or ())}
    found = drifts(examined.tokenizer, generator.chat_template_kwargs, stops)
    drifted = {name: drift for name, drift in found.items() if isinstance(drift, Drift)}
    refused = [name for name, drift in found.items() if isinstance(drift, Exception)]
    said = [f"{name}: {drift}" for name, drift in drifted.items()]
    said += [f"the template takes none of: {', '.join(refused)}"] if refused else []
    if len(refused) == len(found):
        return not_here("the template takes no conversation of several turns")
    about = f"{len(found) - len(refused)} conversations turn by turn and as a whole"
    return passed(len(drifted), "", "; ".join((f"that differ, of {about}", *said)))


def environment(examined: ExaminedRun) -> Finding:
    """Run one batch of conversations through engine and environments, to their ends."""
    output, _ = examined.rollouts
    reasons = output["stop_reasons"]
    wrong = [i for i, reason in enumerate(reasons) if reason == "env_error"]
    rewards = [float(np.sum(reward)) for reward in output["rewards"]]
    trained = sum(map(sum, output["loss_masks"]))
    names = sorted({prompt.env_class for prompt in examined.trainer.prompts_of(0)})
    about = (
        f"{', '.join(names)}: {len(reasons)} trajectories, {trained} trained tokens, rewards "
        f"{min(rewards):.3g} to {max(rewards):.3g}"
    )
    if not wrong and trained:
        return passed(0, 0, about)
    if not trained and not wrong:
        cause = "no token is trained: every loss_mask of the generator is 0"
        fix = "give loss_masks 1 to what the policy sampled"
        return failed(0, 1, about, cause=cause, fix=fix)
    cause = f"the environment failed in {len(wrong)} of {len(reasons)} trajectories"
    fix = "the warnings above have its exceptions; step it by hand with envs.make(...).step(text)"
    return failed(len(wrong), 0, about, cause=cause, fix=fix)


def batch(examined: ExaminedRun) -> Finding:
    """Make a training batch of the rollouts; check that all that the update will read is finite."""
    made, trainer = examined.batch, examined.trainer
    mask = np.asarray(made.loss_mask) > 0
    scored = trainer.forward_pass(trainer.params, made)[0][mask]
    names = ("old_log_probs", "ref_log_probs", "values", "advantages", "returns")
    columns = {"log-probs": scored}
    for name in names:
        if (column := getattr(made, name)) is not None:
            columns[name] = np.asarray(column)[mask]
    wrong = {name: int((~np.isfinite(x)).sum()) for name, x in columns.items()}
    about = f"{', '.join(columns)} of {int(mask.sum())} tokens; mean log-prob {scored.mean():.3g}"
    if not any(wrong.values()):
        return passed(0, 0, about)
    name = max(wrong, key=lambda name: wrong[name])
    cause = f"{wrong[name]} {name} are not finite"
    fix = "look for NaN in the model's weights; for advantages, for a division by 0"
    return failed(sum(wrong.values()), 0, about, cause=cause, fix=fix)
