"""All shapes of a run are compiled before its steps."""

import pytest

from jaxrl.train import BasePPOExp
from jaxrl.trainer import Trainer
from tests.test_train import metric_lines, small


class WatchedTrainer(Trainer):
    """Notes the width of each batch."""

    def collate(self, output):
        batch = super().collate(output)
        self.widths = [*getattr(self, "widths", []), batch.tokens.shape[1]]
        return batch


class WatchedExp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        return WatchedTrainer(*args, **kwargs)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_varied_lengths_compile_nothing_after_the_first_step(tmp_path, capsys, packed):
    # Prompts of 2 and 10 tokens in random order and responses of 1 to 12: prompts fill the buckets
    # 8 and 12, rows of 3 to 22 tokens the buckets 8, 12, 16 and 24.
    lengths = {"short": 1, "long": 9}
    sources = {
        name: f"jaxrl.envs.sort_digits:prompts(size=8, seed=0, length={length})"
        for name, length in lengths.items()
    }
    changes = {
        "data.train_data": list(sources.values()),
        "data.val_data": [sources["short"]],
        "generator.sampling_params.max_generate_length": 12,
        "trainer.max_training_steps": 12,
        "trainer.epochs": 12,
        "trainer.train_batch_size": 2,
        "trainer.policy_mini_batch_size": 1,
        "trainer.eval_interval": 5,
        "trainer.ckpt_interval": -1,
        "trainer.hf_save_interval": -1,
        "trainer.use_sample_packing": packed,
    }
    trainer = WatchedExp(small(tmp_path, **changes)).run()
    printed = capsys.readouterr().out
    assert "prompts of [8, 12] tokens; rows of [8, 12, 16, 24] tokens" in printed
    assert "microbatches of 8 x 8, 8 x 12, 8 x 16, 8 x 24\n" in printed
    assert len(set(trainer.widths)) >= 2
    assert trainer.watch.recompiles == 0, capsys.readouterr().out
    assert len(metric_lines(tmp_path)) == 13  # 12 steps and the evaluation before them
