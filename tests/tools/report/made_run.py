"""Run folders for tests of the report: a byte-level tokenizer, and what a run writes."""

import json

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl.data.recorded import to_arrays
from jaxrl.records.ledger import rollouts_path, write_rollouts
from jaxrl.tools.report.vocabulary import byte_alphabet

HOSTILE = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'> &amp; "
TEXT = HOSTILE + "na\u00efve \u65e5\u672c \U0001f389 \u202ebackwards\u202c\nline\ttab\x07"
EOS = 256


def save_tokenizer(folder):
    """Token b is the byte b; 256 is <eos>, special; all that is not ASCII takes several tokens."""
    vocabulary = byte_alphabet() | {"<eos>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    whole.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    whole.save_pretrained(folder)
    return whole


def ids(text):
    return list(text.encode())


def rollouts(*groups, step=1):
    """Columns of groups (uid, prompt, [(response, reward), ...]); a reward may be per token."""
    columns = {name: [] for name in ("prompt_token_ids", "response_ids", "loss_masks", "rewards")}
    columns |= {name: [] for name in ("stop_reasons", "rollout_logprobs", "policy_versions")}
    uids = []
    for uid, prompt, samples in groups:
        for text, reward in samples:
            tokens = [*ids(text), EOS]
            columns["prompt_token_ids"].append(ids(prompt))
            columns["response_ids"].append(tokens)
            columns["loss_masks"].append([1] * len(tokens))
            columns["rewards"].append(reward)
            columns["stop_reasons"].append("stop" if reward else "length")
            columns["rollout_logprobs"].append([-0.5] * len(tokens))
            columns["policy_versions"].append(step - 1)
            uids.append(uid)
    return columns | {"rollout_metrics": {}}, uids


def make_run(folder, steps=3, metrics=None, groups=None, **settings):
    """A run folder without a ledger.

    Args:
        metrics: step -> numbers of its line.
        groups: step -> groups of `rollouts`.
    """
    folder.mkdir(parents=True)
    save_tokenizer(folder / "model")
    trainer = {"policy": {"model": {"path": str(folder / "model")}}, **settings}
    (folder / "config.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            line = {"step": step, "reward/avg_raw_reward": step / 10, "timing/wall": 2.0}
            line |= {"timing/generate": 1.5, "timing/other": 0.5}
            file.write(json.dumps(line | (metrics(step) if metrics else {})) + "\n")
    for step in range(1, steps + 1):
        given = groups(step) if groups else [("0:1", "2+2=", [("4", 1.0), (TEXT, 0.0)])]
        output, uids = rollouts(*given, step=step)
        write_rollouts(rollouts_path(folder, step), to_arrays(output), uids)
    return folder
