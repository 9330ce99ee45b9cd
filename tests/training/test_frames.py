"""How far it is from the training step to the formula of a loss."""

import traceback
from pathlib import Path

import jaxrl
from jaxrl.train import BasePPOExp
from jaxrl.trainer import Trainer
from tests.test_train import small

PACKAGE = str(Path(jaxrl.__file__).parent)
STACKS = []


def recording(log_probs, old_log_probs, advantages, config):
    STACKS.append(traceback.extract_stack())
    return -log_probs * advantages, {}


class Cold(Trainer):
    def warm_up(self):
        pass


class ColdExp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        return Cold(*args, **kwargs)


def test_there_are_at_most_five_frames_from_the_step_to_the_loss(tmp_path):
    """Of the package: those of JAX's own machinery and of the standard library are left out."""
    changes = {
        "trainer.algorithm.policy_loss_type": f"{__name__}:recording",
        "trainer.max_training_steps": 1,
        "trainer.eval_interval": -1,
        "trainer.eval_before_train": False,
        "trainer.ckpt_interval": -1,
        "trainer.hf_save_interval": -1,
    }
    ColdExp(small(tmp_path, **changes)).run()
    found = []
    for stack in STACKS:
        names = [f.name for f in stack if f.filename.startswith(PACKAGE) or f.name == "recording"]
        if "accumulate" in names:
            found.append(names[names.index("train_step") + 1 :])
    assert found
    for names in found:
        assert names == ["update", "gradients", "accumulate", "objective", "recording"]
