"""MLflow with the real package, in a store of files; `pip install 'jaxrl[mlflow]'`."""

import pytest

from jaxrl.records.json_lines import read_lines
from jaxrl.records.run_logger import RunLogger

pytest.importorskip("mlflow")


def write_run(folder, steps, *, finished=0):
    config = {"trainer": {"seed": 1, "policy_loss_kwargs": {}}, "data": {"train_data": ["a"] * 500}}
    logger = RunLogger(
        folder, ["mlflow"], finished, config=config, project="sums", run_name="first"
    )
    for step in steps:
        logger.log(step, {"trainer/global_step": step, "eval/a(b)/x": step / 2})
    logger.close()


def test_a_run_is_recorded_and_resumed_under_its_id(tmp_path, capsys, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write_run(tmp_path / "run", [1, 2, 3])
    write_run(tmp_path / "run", [3, 4], finished=2)
    assert "failed" not in capsys.readouterr().err
    client = MlflowClient(f"file:{tmp_path}/mlruns")
    experiment = client.get_experiment_by_name("sums")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == (tmp_path / "run/mlflow_run_id.txt").read_text().strip()
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params["trainer.seed"] == "1"
    history = client.get_metric_history(run.info.run_id, "eval/a_b_/x")
    assert [(point.step, point.value) for point in history] == [(1, 0.5), (2, 1), (3, 1.5), (4, 2)]


def test_a_server_that_is_gone_does_not_stop_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    write_run(tmp_path, [1, 2])
    assert capsys.readouterr().err.count("logger 'mlflow' failed") == 1
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]
