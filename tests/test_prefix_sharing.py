"""Runs whose trajectories share what they begin with: the same training, and resumed to the bit."""

import pytest

from jaxrl.train import train
from tests.test_resume import TALKS
from tests.test_train import assert_bitwise_equal, assert_trained_alike, metric_lines, small


def letters(action):
    """A reward by which the samples of a prompt differ, however short they are."""
    return sum(map(ord, action)) % 5 / 4


SETTINGS = {
    "trainer.policy.mesh.fsdp": 2,
    "trainer.policy.mesh.tensor": 4,
    "trainer.micro_train_batch_size_per_gpu": 2,
    "trainer.micro_forward_batch_size_per_gpu": 2,
    "generator.sampling_params.max_generate_length": 2,  # with 5 of a prompt: of one width
    "environment.reward_functions": [f"{__name__}:letters"],
    "trainer.hf_save_interval": -1,
    "trainer.eval_interval": -1,
}
CUT = "trainer/packing_efficiency", "trainer/prefix_sharing", "trainer/tflops", "trainer/mfu"


def run(folder, **settings):
    return train(small(folder, **(SETTINGS | settings)))


def learnt(folder):
    """What a step says, but for how its rows were cut."""
    return [
        {name: x for name, x in line.items() if not name.startswith(CUT)}
        for line in metric_lines(folder)
    ]


def test_shared_prefixes_train_to_the_same_weights_and_resume_to_the_bit(tmp_path, capsys):
    flat = run(tmp_path / "flat", **{"trainer.prefix_sharing": "off"})
    trees = run(tmp_path / "trees", **{"trainer.prefix_sharing": "on"})
    printed = capsys.readouterr().out
    assert "prefix_sharing on" in printed
    assert "of trees" in printed
    assert trees.watch.recompiles == 0
    assert_trained_alike(trees.state, flat.state)
    for found, expected in zip(learnt(tmp_path / "trees"), learnt(tmp_path / "flat"), strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    for line in metric_lines(tmp_path / "trees"):
        computed, avoided = (
            line[f"trainer/prefix_sharing_{name}"] for name in ("computed", "avoided")
        )
        assert line["reward/avg_raw_reward"] > 0
        assert line["trainer/prefix_sharing"] > 0.1
        assert avoided > 0
        assert computed > 0
        assert line["trainer/packing_efficiency"] <= 1
    resumed = run(
        tmp_path / "resumed",
        **{
            "trainer.prefix_sharing": "on",
            "trainer.resume_mode": "from_path",
            "trainer.resume_path": str(tmp_path / "trees" / "checkpoints" / "global_step_2"),
        },
    )
    assert_bitwise_equal(resumed.state, trees.state)


REFUSED = {
    "keep a state": {"trainer.policy.model.path": "configs/tiny_hybrid_model"},
    "mesh.context": {"trainer.policy.mesh.fsdp": 4, "trainer.policy.mesh.context": 2},
    "lora.dropout": {"trainer.policy.model.lora.rank": 2, "trainer.policy.model.lora.dropout": 0.1},
    "trainer.exact": {"trainer.exact": "log_probs"},
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_share_is_refused_by_name(tmp_path, why):
    settings = {"trainer.prefix_sharing": "on", "trainer.eval_interval": -1}
    with pytest.raises(ValueError, match=rf"trainer.prefix_sharing='on': .*{why}.*set it to 'off'"):
        train(small(tmp_path, **settings, **REFUSED[why]))


def test_a_kernel_of_trees_that_there_are_not_is_refused(tmp_path):
    settings = {"trainer.prefix_sharing": "off", "trainer.kernels": {"tree_attention": "xla"}}
    with pytest.raises(ValueError, match="'tree_attention'.='xla' has no effect: no prefixes"):
        train(small(tmp_path, **settings))


@pytest.mark.slow
def test_turns_in_rows_of_their_own_share_their_history(tmp_path):
    settings = {**TALKS, "generator.step_wise_trajectories": True}
    settings["environment.reward_functions"] = []
    for part in ("train", "forward"):
        settings[f"trainer.micro_{part}_batch_size_per_gpu"] = 4
    flat = run(tmp_path / "flat", **settings, **{"trainer.prefix_sharing": "off"})
    trees = run(tmp_path / "trees", **settings, **{"trainer.prefix_sharing": "on"})
    assert_trained_alike(trees.state, flat.state)
    shared = [line["trainer/prefix_sharing"] for line in metric_lines(tmp_path / "trees")]
    assert min(shared) > 0.3
