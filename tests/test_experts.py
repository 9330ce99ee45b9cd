"""Runs of a mixture of experts: the sampler's experts are replayed, recorded, and resumed."""

import numpy as np
import pytest

from jaxrl import config as cfg
from jaxrl.data.columns import NO_ROUTES, ROUTES
from jaxrl.records.ledger import read_rollouts, rollouts_path
from jaxrl.replay import Compared, replay
from jaxrl.rollout.conversations.stream import Unit, units_from_bytes, units_to_bytes
from jaxrl.train import BasePPOExp, train
from tests.test_resume import kill_after_step_2
from tests.test_train import GUESS, ROOT, assert_bitwise_equal, metric_lines, small

MIXTURE = {"trainer.policy.model.path": str(ROOT / "configs" / "tiny_mixture_model")}
REPLAY = {"trainer.policy.router_replay": "forward"}
LOCKSTEP = {
    "trainer.policy_mini_batch_size": 4,
    "trainer.algorithm.policy_loss_type": "decoupled_ppo",
    "trainer.fully_async.enabled": True,
    "trainer.fully_async.schedule": "lockstep",
    "trainer.fully_async.max_staleness_steps": 1,
}
QUIET = dict.fromkeys(
    ("trainer.eval_interval", "trainer.hf_save_interval", "trainer.print_example_interval"), -1
) | {"trainer.max_training_steps": 2}


@pytest.mark.slow
def test_a_run_replays_what_was_sampled_and_records_it(tmp_path):
    run = train(small(tmp_path, **QUIET, **MIXTURE, **REPLAY))
    for line in metric_lines(tmp_path):
        assert line["policy/router_differs"] < 1e-3  # float32 on both sides
        assert line["policy/rollout_train_logprobs_abs_diff_max"] < 1e-4
    output, _ = read_rollouts(rollouts_path(run.ledger.folder, 1))
    for prompt, response, routes in zip(
        output["prompt_token_ids"], output["response_ids"], output[ROUTES], strict=True
    ):
        assert routes.shape == (len(prompt) + len(response) - 1, 2, 2)
        assert routes.dtype == np.uint8
        assert (routes < 8).all()
        assert (routes[..., 0] != routes[..., 1]).all()
    found = [x for x in replay(run.ledger.folder, checkpoint="start") if isinstance(x, Compared)]
    assert [x.step for x in found] == [1, 2]
    assert not any(x.different for x in found)


@pytest.mark.slow  # tests/rollout/test_routes.py has conversations in the default run
@pytest.mark.parametrize("step_wise", [False, True])
def test_turns_of_a_conversation_are_replayed_where_they_stand(tmp_path, step_wise):
    """In bfloat16, where a router chooses otherwise now and then: packed, a forward pass before."""
    changes = {
        **MIXTURE,
        **REPLAY,
        "trainer.max_training_steps": 2,
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 2,
        "trainer.micro_train_batch_size_per_gpu": 2,
        "trainer.micro_forward_batch_size_per_gpu": 4,
        "generator.n_samples_per_prompt": 4,
        "generator.max_turns": 2,
        "generator.max_input_length": 26,
        "generator.step_wise_trajectories": step_wise,
        "generator.inference_engine.model_dtype": "bfloat16",
        "trainer.use_sample_packing": True,
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": -1,
        "trainer.log_path": str(tmp_path),
        "trainer.ckpt_path": str(tmp_path / "checkpoints"),
        "trainer.export_path": str(tmp_path / "exports"),
        "trainer.run_name": "quickstart",
    }
    train(cfg.apply_overrides(cfg.load_config_file(GUESS), changes))
    for line in metric_lines(tmp_path):
        assert line["generate/avg_turns"] > 1.5
        # float32 against bfloat16; routes that belong to other tokens would differ in most choices
        assert line["policy/router_differs"] < 0.05
        assert line["policy/rollout_train_logprobs_abs_diff_max"] < 0.1


@pytest.mark.slow  # tests/test_resume.py kills others in the default run
def test_killed_and_resumed_equals_uninterrupted(tmp_path):
    """Overlapping: units that wait in the checkpoint have their routes with them."""
    given = {**QUIET, **MIXTURE, **REPLAY, "trainer.max_training_steps": 4, **LOCKSTEP}
    whole = train(small(tmp_path / "whole", **given))
    config = small(tmp_path / "parts", **given)
    (tmp_path / "parts").mkdir()
    kill_after_step_2(tmp_path / "parts", config)
    again = train(config)
    assert int(again.state.step) == 4
    assert_bitwise_equal(again.state, whole.state)
    lines = [
        [{k: x for k, x in line.items() if not k.startswith("async/")} for line in metric_lines(of)]
        for of in (tmp_path / "parts", tmp_path / "whole")
    ]
    assert lines[0] == lines[1]


def test_units_in_a_checkpoint_keep_their_routes():
    ids = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    output = {
        "prompt_token_ids": [[1], [1]],
        "response_ids": [[2, 3, 4], [2]],
        "rewards": [1.0, 0.0],
        "loss_masks": [[1, 1, 1], [1]],
        "stop_reasons": ["stop", "abort"],
        "rollout_logprobs": [[0.0] * 3, [0.0]],
        "policy_versions": [0, 0],
        "rollout_metrics": {},
        ROUTES: [ids, NO_ROUTES],
    }
    without = {name: x for name, x in output.items() if name != ROUTES}
    first, second = units_from_bytes(units_to_bytes([Unit(3, output), Unit(4, without)]))
    np.testing.assert_array_equal(first.output[ROUTES][0], ids)
    assert [len(x) for x in (*first.output[ROUTES], *second.output[ROUTES])] == [3, 0, 0, 0]


class Silent:
    """A generator of one's own that does not say which experts there were."""

    def __init__(self, inner):
        self.inner = inner

    async def generate(self, batch):
        output = await self.inner.generate(batch)
        return {name: x for name, x in output.items() if name != ROUTES}


class SilentExp(BasePPOExp):
    def get_generator(self, *args, **kwargs):
        return Silent(super().get_generator(*args, **kwargs))


@pytest.mark.slow
def test_what_cannot_be_replayed_is_refused(tmp_path):
    with pytest.raises(ValueError, match="router_replay='forward' has no effect.*no experts"):
        train(small(tmp_path / "dense", **QUIET, **REPLAY))
    with pytest.raises(ValueError, match="the generator gives no 'rollout_expert_indices'"):
        SilentExp(small(tmp_path / "silent", **QUIET, **MIXTURE, **REPLAY)).run()
    engine = "generator.inference_engine."
    away = {f"{engine}run_engines_locally": False, f"{engine}remote_urls": ["http://10.0.0.1:1"]}
    for elsewhere in (away, {f"{engine}backend": "jetstream"}):
        with pytest.raises(ValueError, match="router_replay='forward'.*in this process"):
            cfg.validate(cfg.resolve(small(tmp_path, **MIXTURE, **REPLAY, **elsewhere)), 1)
