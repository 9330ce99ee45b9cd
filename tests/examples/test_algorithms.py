"""The scripts of examples/algorithms train the quickstart's model for a step."""

import importlib.util
from pathlib import Path

import pytest

from jaxrl.registry import AdvantageEstimatorRegistry, PolicyLossRegistry
from tests.test_train import QUICKSTART, metric_lines

FOLDER = Path(__file__).parents[2] / "examples" / "algorithms"
SMALL = {
    "trainer.run_name": "quickstart",
    "trainer.max_training_steps": 1,
    "trainer.train_batch_size": 16,  # 256 responses, so that some of the random ones earn something
    "trainer.policy_mini_batch_size": 16,
    "trainer.eval_interval": -1,
    "trainer.ckpt_interval": -1,
    "trainer.hf_save_interval": -1,
}


@pytest.fixture(autouse=True)
def clean_registries():
    yield
    PolicyLossRegistry.repopulate()
    AdvantageEstimatorRegistry.repopulate()


def run(name, folder):
    """The metrics of the run."""
    path = FOLDER / name / f"main_{name}.py"
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    paths = {"log_path": "", "ckpt_path": "checkpoints", "export_path": "exports"}
    settings = {**SMALL, **{f"trainer.{key}": folder / value for key, value in paths.items()}}
    flags = [f"--config.{key}={value}" for key, value in settings.items()]
    trainer = script.main([f"--config={QUICKSTART}", *flags])
    return trainer, metric_lines(folder)


@pytest.mark.slow
def test_custom_policy_loss(tmp_path):
    _, (line,) = run("custom_policy_loss", tmp_path)
    assert line["policy/grad_norm"] > 0
    assert line["policy/loss_metrics/advantage_max"] > 0


@pytest.mark.slow
def test_custom_advantage_estimator(tmp_path):
    _, (line,) = run("custom_advantage_estimator", tmp_path)
    assert line["policy/grad_norm"] > 0
    assert line["loss/avg_raw_advantages_abs"] > 0


@pytest.mark.slow
def test_dapo(tmp_path):
    trainer, (line,) = run("dapo", tmp_path)
    assert type(trainer).__name__ == "DAPOTrainer"
    assert trainer.config.trainer.algorithm.eps_clip_high == 0.28
    assert line["policy/grad_norm"] > 0
    # 6 tokens at most, the last 2 of them punished: untrained responses rarely stop before 4
    assert line["reward/avg_raw_reward"] < 0
