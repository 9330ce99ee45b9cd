"""Runs whose samples go on in the next step, with the real trainer and engine on eight devices.

Tokens are guessed from the answers of earlier epochs, and what was long is begun first.
"""

import jax
import numpy as np
import pytest

from jaxrl.audit import audit
from jaxrl.data.recorded import read_rollouts, rollouts_path
from jaxrl.records.callbacks import TrainingCallback
from jaxrl.rollout.conversations.carried import CARRIED
from jaxrl.tools.replay.recorded_run import RecordedRun
from jaxrl.train import BasePPOExp
from jaxrl.trainer import Trainer
from jaxrl.types import TrainBatch
from tests.test_train import assert_bitwise_equal, metric_lines, small

MOST, EXTRA, LONGEST = 3, 3, 7  # tokens of a step, groups beside a batch, tokens of an answer
CARRIES = {
    "data.train_data": ["jaxrl.envs.toys.sort_digits:prompts(size=8, seed=0)"],
    "trainer.max_training_steps": 6,
    "trainer.epochs": 3,  # two steps each
    "trainer.policy_mini_batch_size": 4,
    "trainer.algorithm.policy_loss_type": "rollout_is",
    "trainer.algorithm.use_kl_loss": False,
    "trainer.policy.optimizer_config.lr": 0.05,  # each version draws otherwise
    "trainer.policy.optimizer_config.num_warmup_steps": 0,
    "generator.sampling_params.max_generate_length": LONGEST,
    "generator.partial_rollouts.max_tokens_per_step": MOST,
    "generator.partial_rollouts.extra_prompts": EXTRA,
    "generator.longest_first": True,
    "generator.inference_engine.speculative_tokens": 3,
    "generator.inference_engine.speculative_history": 32,
    "trainer.eval_interval": 3,
    "trainer.ckpt_interval": 3,
    "trainer.hf_save_interval": -1,
    "trainer.dump_data_batch": False,
    "trainer.print_example_interval": -1,
    "trainer.logger": "jsonl",
}


class Watcher(TrainingCallback):
    """Keeps the weights of each version, and stops before a step."""

    def __init__(self, stop_in):
        self.weights, self.stop_in = {}, stop_in

    def on_step_start(self, trainer, given, control):
        if given.global_step == self.stop_in:
            raise KeyboardInterrupt
        self.weights[given.global_step - 1] = jax.device_get(trainer.params)


class Watched(BasePPOExp):
    def __init__(self, config, stop_in=None):
        super().__init__(config)
        self.watcher = Watcher(stop_in)

    def get_callbacks(self):
        return [self.watcher]


def run_of(folder, stop_in=None, **overrides):
    run = Watched(small(folder, **{**CARRIES, **overrides}), stop_in)
    return run, run.run()


@pytest.fixture(scope="module", name="whole")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run, trainer = run_of(folder)
    steps = [read_rollouts(rollouts_path(folder / "quickstart", step)) for step in range(1, 7)]
    return folder, run.watcher, trainer, [output for output, _ in steps]


def failures(folder):
    return {check.name: check.failures for check in audit(folder / "quickstart") if check.failures}


def test_every_answer_is_trained_once_and_at_its_end(whole):
    folder, _, _, steps = whole
    assert not failures(folder)
    for output in steps:
        assert len(output["response_ids"]) == 16
        assert CARRIED not in output["stop_reasons"]
        lengths = np.array([len(row) for row in output["response_ids"]])
        stopped = np.array(output["stop_reasons"]) == "stop"
        assert (stopped | (lengths == LONGEST)).all()
    lines = metric_lines(folder)[1:]
    assert [line["generate/carried_groups"] for line in lines] == [EXTRA] * 5 + [0]
    assert lines[0]["generate/carried_tokens"] == 0
    assert lines[1]["generate/carried_tokens"] > 0


def test_an_answer_has_at_most_so_many_tokens_of_a_call_of_the_generator(whole):
    _, _, _, steps = whole
    several = 0
    for step, output in enumerate(steps, 1):
        for versions in output["token_versions"]:
            assert sorted(versions) == versions
            assert versions[-1] <= step - 1
            several += len(set(versions)) > 1
    assert several > 4


def test_tokens_have_the_log_probs_of_the_policy_that_drew_them(whole):
    """Also where an answer goes on: all of its context is prefilled by the weights of then."""
    _, watcher, trainer, steps = whole
    compared = 0
    for output in steps[1:4]:
        begin, width = len(output["prompt_token_ids"][0]), 5 + LONGEST
        columns = output["prompt_token_ids"], output["response_ids"]
        rows = [[*prompt, *answer] for prompt, answer in zip(*columns, strict=True)]
        tokens = np.array([row + [0] * (width - len(row)) for row in rows], np.int32)
        at, lengths = np.arange(width), np.array([[len(row)] for row in rows])
        mask = (at >= begin) & (at < lengths)
        batch = TrainBatch(
            tokens=tokens,
            lengths=np.array([len(r) for r in rows], np.int32),
            response_mask=mask.astype(np.float32),
            loss_mask=mask.astype(np.float32),
            rewards=np.zeros(tokens.shape, np.float32),
            rollout_log_probs=None,
            index=np.arange(16) // 4,
            policy_versions=np.zeros(16, np.int32),
            row_ids=np.arange(16),
        )
        for version in {v for row in output["token_versions"] for v in row}:
            scored, _ = trainer.forward_pass(watcher.weights[version], batch)
            for row, versions in enumerate(output["token_versions"]):
                for i, drawn_by in enumerate(versions):
                    if drawn_by == version:
                        expected = np.asarray(scored)[row, begin + i]
                        found = output["rollout_logprobs"][row][i]
                        assert abs(found - expected) < 2e-4
                        compared += 1
    assert compared > 200


def test_a_run_that_is_stopped_and_resumed_has_the_same_bits(whole, tmp_path):
    folder, _, trainer, steps = whole
    with pytest.raises(KeyboardInterrupt):
        run_of(tmp_path, stop_in=6)
    _, again = run_of(tmp_path)  # from the checkpoint of step 3, which has three groups
    assert_bitwise_equal(again.state, trainer.state)
    assert metric_lines(tmp_path) == metric_lines(folder)
    assert not failures(tmp_path)
    for step in (4, 5, 6):
        output, _ = read_rollouts(rollouts_path(tmp_path / "quickstart", step))
        assert output["response_ids"] == steps[step - 1]["response_ids"]
        assert output["token_versions"] == steps[step - 1]["token_versions"]


def test_with_dynamic_sampling_every_batch_is_of_groups_at_their_end(tmp_path):
    settings = {
        "trainer.algorithm.dynamic_sampling.type": "filter",
        "trainer.algorithm.dynamic_sampling.max_sample_batches": 40,
        "trainer.max_training_steps": 2,
        "trainer.eval_interval": -1,
    }
    _, trainer = run_of(tmp_path, **settings)
    assert int(trainer.state.batches_drawn) > 2
    assert not failures(tmp_path)
    recorded = RecordedRun(tmp_path / "quickstart")  # as a replay counts them
    draws = sum(step.draws for step in recorded.steps.values())
    assert draws == int(trainer.state.batches_drawn)


def test_a_trainer_that_chooses_its_prompts_is_refused(tmp_path):
    class Choosing(Trainer):
        def next_prompts(self, step):
            return self.prompts_of(0)

    class Run(BasePPOExp):
        def get_trainer(self, *args, **kwargs):
            return Choosing(*args, **kwargs)

    with pytest.raises(ValueError, match="partial_rollouts: Choosing chooses its prompts"):
        Run(small(tmp_path, **CARRIES)).run()
