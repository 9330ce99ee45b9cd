"""`python -m jaxrl.evaluate`: a checkpoint, model folders and a server give the same answers."""

import json
from pathlib import Path

import jax
import pytest

from jaxrl.evaluate import evaluate_subject, main, table
from jaxrl.rollout.server.build import make_server
from jaxrl.tools.evaluate.target import EvalTarget, find_target
from jaxrl.train import BasePPOExp, train
from tests.test_train import QUICKSTART, metric_lines, small

SAMPLED = {
    "generator.eval_n_samples_per_prompt": 4,
    "generator.eval_sampling_params": {"temperature": 1.0, "max_generate_length": 6},
}


def answers(results):
    text = Path(results["folder"], "sort_digits.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def said(results):
    return [(row["uid"], row["tokens"], row["reward"]) for row in answers(results)]


@pytest.mark.slow  # three engines and a server
@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_checkpoint_export_and_server_agree(finished, tmp_path, how):
    folder, _ = finished
    export = folder / "exports/global_step_4/policy"
    config = small(folder, **how)
    serving = {
        "trainer.policy.model.path": str(export),
        "trainer.policy.model.random_init": False,
        "generator.inference_engine.http_endpoint_port": 0,
        "serve.max_num_seqs": 32,
        "serve.max_model_len": 64,
    }
    server = make_server(small(folder, **serving), jax.devices()[:1])
    server.start()
    try:
        found = [
            evaluate_subject(config, str(subject), step=4, output=tmp_path / str(number))
            for number, subject in enumerate(
                (folder / "checkpoints/global_step_4", export, server.url)
            )
        ]
    finally:
        server.stop()
    assert [results["kind"] for results in found] == ["checkpoint", "model", "server"]
    assert said(found[0]) == said(found[1]) == said(found[2])
    assert len(said(found[0])) == 8 * config.generator.eval_n_samples_per_prompt
    assert found[0]["metrics"] == found[1]["metrics"] == found[2]["metrics"]


@pytest.mark.slow  # a run
def test_adapters_score_as_in_their_run(tmp_path):
    lora = {"trainer.policy.model.lora.rank": 4, "trainer.max_training_steps": 2}
    config = small(tmp_path, **lora, **{"trainer.hf_save_interval": 2})
    train(config)
    logged = {k: v for k, v in metric_lines(tmp_path)[-1].items() if k.startswith("eval/")}
    subjects = "checkpoints/global_step_2", "exports/global_step_2/policy"
    found = [
        evaluate_subject(config, f"{tmp_path}/{s}", step=2, output=tmp_path / f"out{n}")
        for n, s in enumerate(subjects)
    ]
    assert [results["kind"] for results in found] == ["checkpoint", "adapter"]
    assert found[0]["metrics"] == found[1]["metrics"] == logged
    assert said(found[0]) == said(found[1])


def test_what_a_subject_is(tmp_path):
    checkpoint = tmp_path / "checkpoints/global_step_2"
    for part in ("state", "meta"):
        (checkpoint / part).mkdir(parents=True)
    assert find_target(f"{checkpoint}/") == EvalTarget("checkpoint", str(checkpoint), 2)
    model, adapter = "configs/tiny_char_model", tmp_path / "adapter"
    assert find_target(model) == EvalTarget("model", str(Path(model).absolute()))
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    assert find_target(str(adapter)) == EvalTarget("adapter", str(adapter))
    assert find_target("Qwen/Qwen3-0.6B") == EvalTarget("model", "Qwen/Qwen3-0.6B")
    assert find_target("http://a:1/v1, http://b:2/").urls == ["http://a:1", "http://b:2"]
    with pytest.raises(ValueError, match=r"neither a model folder.*\['global_step_2'\]"):
        find_target(f"{tmp_path}/checkpoints")
    with pytest.raises(ValueError, match=r"--subject='.*/none' does not exist; give a model"):
        find_target(f"{tmp_path}/none")


def run_command(capsys, *flags):
    status = main([f"--config={QUICKSTART}", *flags])
    return status, capsys.readouterr()


@pytest.mark.parametrize("logger", ["console", ["jsonl"]])
def test_without_the_console_nothing_is_said(tmp_path, capsys, logger):
    class Stopped(BasePPOExp):
        def check_environments(self, prompts):
            raise ValueError("so far")

    config = small(tmp_path, **{"trainer.logger": logger})
    with pytest.raises(ValueError, match="so far"):
        evaluate_subject(config, output=tmp_path / "scores", run_class=Stopped)
    assert ("prompts from" in capsys.readouterr().out) == (logger == "console")


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    assert main(["--help"]) == 0
    assert "--subject" in capsys.readouterr().out
    output = f"--output={tmp_path}/out"
    model = "--subject=configs/tiny_char_model"
    for flags, message in (
        ((f"--subject={tmp_path}/none",), "does not exist"),
        (("--subject=http://127.0.0.1:9", output), "http://127.0.0.1:9 does not answer as a nativ"),
        ((model, "--config.data.val_data=[]", output), "data.val_data=[] has no prompts"),
        ((model, "--config.data.val_data=['none.jsonl']", output), "'none.jsonl' does not exist"),
        ((model, "--config.generator.eval_pass_at_k=[2]", output), "eval_pass_at_k=[2]: of gener"),
        ((model, output), "safetensors"),
        (("--subjec=x",), "unknown argument '--subjec=x'"),
    ):
        status, printed = run_command(capsys, *flags)
        assert status == 2
        *warnings, error = printed.err.splitlines()  # a server that is away is warned of, too
        assert all(line.startswith("warning: ") for line in warnings)
        assert error.startswith("error: ")
        assert message in error


def test_the_table():
    metrics = {}
    for source, low in (("gsm8k", 0.25), ("all", None)):
        numbers = {"avg_score": 0.5, "pass_at_1": 0.5, "mean_positive_reward": 0.5}
        ends = {} if low is None else {"avg_score_ci_low": low, "avg_score_ci_high": 0.75}
        numbers |= ends | {"num_prompts": 3, "avg_num_tokens": 4.25, "stop_ratio": 1.0}
        metrics |= {f"eval/{source}/{name}": value for name, value in numbers.items()}
    assert table(metrics).splitlines() == [
        "source  prompts  avg_score              pass_at_1  avg_num_tokens  stop_ratio",
        "gsm8k   3        0.5000 [0.250, 0.750]  0.5000     4.2             1.000",
        "all     3        0.5000                 0.5000     4.2             1.000",
    ]
