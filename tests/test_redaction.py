"""Keys are neither taken from a config nor shown by an error."""

import json
import re
import traceback

import pytest

from jaxrl.config import TrainConfig, check_constraints, resolve
from jaxrl.config.dataclass_config import flatten
from jaxrl.records.run_logger import RunLogger
from jaxrl.redaction import holds_key, names_key, redacted
from jaxrl.rollout.remote.dialects import DIALECTS
from jaxrl.rollout.remote.http_client import RemoteOptions, RemoteServer

KEY = "hunter2secret"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"https://me:{KEY}@host/v1 is away", "https://<hidden>@host/v1 is away"),
        (f"at wss://{KEY}@host", "at wss://<hidden>@host"),
        (f"GET /v1?a=1&api_key={KEY}&b=2 gives 401", "GET /v1?a=1&api_key=<hidden>&b=2 gives 401"),
        (f"https://h/?X-Amz-Signature={KEY}#top", "https://h/?X-Amz-Signature=<hidden>#top"),
        (f"no such key: sk-proj-{KEY}0123456789", "no such key: <hidden>"),
        ("hf_" + 30 * "a", "<hidden>"),
        (f"Authorization: Bearer {KEY}", "Authorization: Bearer <hidden>"),
        (f"{{'api_key': '{KEY}', 'n': 1}}", "{'api_key': '<hidden>', 'n': 1}"),
        (f'{{"hf_token": "{KEY}"}}', '{"hf_token": "<hidden>"}'),
        (f"rewards:judge(api_key='{KEY}', n=2)", "rewards:judge(api_key='<hidden>', n=2)"),
        # what has the look and is none
        ("hf://datasets/openai/gsm8k@main", "hf://datasets/openai/gsm8k@main"),
        ("https://host/a@b?monkey=1&design=2", "https://host/a@b?monkey=1&design=2"),
        ("runs/hf_exports/sk-learn, the bearer of bad news", None),
        ("{'max_tokens': '8', 'stop_token': '</s>'}", None),
        ('Say {"token": "yes"} or {"secret": "not at all"}', None),
        ("runs/gemma-sk-instruct_lora_rank_16_lr_1e_5", None),
        ("models/opus-mt-en-sk-finetuned_on_translations", None),
        ("rewards:judge(tokens='a', stop_token='</s>')", None),
    ],
)
def test_keys_in_text(text, shown):
    assert redacted(text) == (text if shown is None else shown)
    assert KEY not in redacted(text)


def test_values_of_the_environment(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "plainwords")
    monkeypatch.setenv("SHORT_KEY", "abc")  # would hide what is no key
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false-or-true")
    said = "plainwords abc false-or-true and words"
    assert redacted(said, "words") == "<hidden> abc false-or-true and <hidden>"
    assert names_key("AWS_SECRET_ACCESS_KEY")
    assert not names_key("TOKENIZERS_PARALLELISM") and not names_key("HOME")


def test_values_that_hold_a_key():
    assert holds_key("a.base_url", f"http://u:{KEY}@host")
    assert holds_key("a.kwargs", {"deep": [{"api-key": KEY}]})
    assert holds_key("data.train_data", [f"my_pkg.rows:hub(token='{KEY}')"])
    assert holds_key("a.my_api_key", KEY) and holds_key("token", KEY)
    assert not holds_key("a.my_api_key", "") and not holds_key("a.api_key_env", "OPENAI_API_KEY")
    assert not holds_key("a.kwargs", {"max_tokens": 3, "pad_token": "<pad>", "tokenizer": "path"})


def test_no_field_of_a_config_takes_a_key():
    """Planted in every field, as the command line has it; no error shows it, nor its causes."""
    planted = (
        f"https://me:{KEY}@host/v1",
        f"['https://host/v1?api_key={KEY}']",
        f"{{'api_key': '{KEY}'}}",
        f'[\'my_pkg.my_module:judge(model="m", api_key="{KEY}")\']',
    )
    fields = flatten(TrainConfig())
    assert len(fields) > 400
    for field in fields:
        for text in planted:
            named = f"{re.escape(field)}|trainer.ckpt_path"  # which comes from the name of the run
            with pytest.raises(ValueError, match=named) as refused:
                check_constraints(resolve(TrainConfig.from_cli_overrides([f"{field}={text}"])))
            assert KEY not in "".join(traceback.format_exception_only(refused.value))


@pytest.mark.parametrize(
    "field",
    [
        "environment.skyrl_gym.llm_as_a_judge.api_key_env",
        "environment.skyrl_gym.search.api_key_env",
        "generator.inference_engine.api_token_env",
    ],
)
def test_a_key_in_the_place_of_its_variable(field):
    check_constraints(TrainConfig.from_cli_overrides([f"{field}=MY_KEY"]))
    with pytest.raises(ValueError, match="<hidden>.*name of a variable") as refused:
        check_constraints(TrainConfig.from_cli_overrides([f"{field}={KEY}-0123"]))
    assert KEY not in str(refused.value)


def test_a_logger_that_repeats_its_key(tmp_path, monkeypatch, capsys):
    def refuse(name, run):
        raise PermissionError(f"the key {KEY} is not known at https://me:{KEY}@host")

    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setattr("jaxrl.records.run_logger.open_logger", refuse)
    RunLogger(tmp_path, ["wandb"], 0, config={"a": 1}).close()
    said = capsys.readouterr().err
    assert "PermissionError: the key <hidden> is not known at https://<hidden>@host" in said
    assert not any(KEY in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


def test_a_server_that_repeats_its_token():
    server = RemoteServer("http://host", DIALECTS["vllm"], RemoteOptions(token=KEY))
    for answer in (f"no {KEY} here", json.dumps({"error": {"message": f"no {KEY} here"}})):
        assert server._error_message(answer) == "no <hidden> here"
