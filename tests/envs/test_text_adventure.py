"""The text game: its rules, its rewards by turn, and games that never meet."""

import pytest

from jaxrl import config as cfg, envs
from jaxrl.envs.toys.text_adventure import RULES, prompts
from jaxrl.train import train
from tests.test_train import ROOT, metric_lines

# The hall has the kitchen in the north, and the vault behind a door in the west.
HOUSE = {
    "passages": [["hall", "north", "kitchen"], ["hall", "west", "vault"]],
    "start": "hall",
    "key": "kitchen",
    "gold": "vault",
}


def play(env, *commands):
    """What the game says, and the reward, of each turn."""
    steps = [env.step(command) for command in commands]
    said = [step["observations"][0]["content"] if step["observations"] else "" for step in steps]
    return list(zip(said, [step["reward"] for step in steps], strict=True)), steps[-1]["done"]


def test_a_game_that_is_won():
    env = envs.make("text_adventure", {**HOUSE, "max_turns": 9})
    hall = "hall. exits north, west."
    walk = ("go north", "take key", "go south", "open door", "go west", "take gold")
    turns, done = play(env, *walk)
    assert turns == [
        ("kitchen. exits south. a key lies here.", 0.0),
        ("kitchen. exits south.", 0.25),
        (f"{hall} the door west is locked.", 0.0),
        (hall, 0.25),
        ("vault. exits east. gold lies here.", 0.0),
        ("", 0.5),
    ]
    assert done
    assert env.get_metrics() == {"key": 1.0, "door": 1.0, "gold": 1.0, "turns": 6}


def test_what_cannot_be_done_changes_nothing():
    env = envs.make("text_adventure", {**HOUSE, "max_turns": 20})
    wrong = ("go west", "go east", "open door", "take key", "take gold", "sing", "go up", "")
    turns, done = play(env, *wrong)
    assert not done
    assert turns == [
        ("that does nothing. hall. exits north, west. the door west is locked.", 0.0)
    ] * len(wrong)
    # nothing is earned twice
    twice, _ = play(env, "go north", "take key", "take key", "go south", "open door", "open door")
    assert [reward for _, reward in twice] == [0.0, 0.25, 0.0, 0.0, 0.25, 0.0]


def test_the_last_command_counts():
    env = envs.make("text_adventure", {**HOUSE, "max_turns": 9})
    (turn,), _ = play(env, "I may GO WEST or take key. No: Go North!")
    assert turn == ("kitchen. exits south. a key lies here.", 0.0)


def test_the_last_turn():
    env = envs.make("text_adventure", {**HOUSE, "max_turns": 2})
    turns, done = play(env, "go north", "take key")
    assert (turns[1], done) == (("", 0.25), True)  # what it earned counts, though nothing is said
    assert env.get_metrics() == {"key": 1.0, "door": 0.0, "gold": 0.0, "turns": 2}


@pytest.mark.parametrize("rooms", [2, 4, 15])
def test_every_game_can_be_won_as_its_row_says(rooms):
    for row in prompts(20, seed=3, rooms=rooms):
        commands = row["reward_spec"]["ground_truth"].split("; ")
        env = envs.make(row["env_class"], {**row, "max_turns": 99})
        turns, done = play(env, *commands)
        assert done
        assert [reward for _, reward in turns if reward] == [0.25, 0.25, 0.5]
        opening = row["prompt"][0]["content"]
        assert opening.startswith(f"{RULES} {row['start']}. exits ")
        places = {row["start"]} | {room for way in row["passages"] for room in way[::2]}
        assert len(places) == rooms


def test_rows_are_a_function_of_the_seed():
    rows = list(prompts(30, seed=1))
    assert rows == list(prompts(30, seed=1))
    assert rows != list(prompts(30, seed=2))
    assert len({str(row) for row in rows}) == 30
    # of the 840 games with two rooms there are some 750 and 84
    train, held_out = (
        {str(row) for row in prompts(size, 5, 2, split)}
        for split, size in (("train", 700), ("eval", 80))
    )
    assert (len(train), len(held_out)) == (700, 80)
    assert not train & held_out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"size": 0}, "size=0 must be at least 1"),
        ({"size": 1, "rooms": 1}, "rooms=1 2 to 15"),
        ({"size": 1, "rooms": 16}, "rooms=16 2 to 15"),
        ({"size": 900, "rooms": 2}, "found only 840 games of 2 rooms in split None"),
        ({"size": 1, "split": "test"}, "split must be 'train', 'eval' or None"),
    ],
)
def test_impossible_data_sets(arguments, problem):
    # 15 * 14 pairs of rooms in 4 directions are 840 games
    with pytest.raises(ValueError, match=problem):
        list(prompts(**arguments))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"key": None}, "start, key and gold are rooms"),
        ({"start": "vault"}, "the gold is not in the first"),
        ({"passages": []}, "start, key and gold are rooms"),
        ({"passages": [["hall", "up", "vault"]]}, "KeyError"),
        ({"passages": [*HOUSE["passages"], ["hall", "west", "den"]]}, "two ways lead west from"),
        ({"key": "vault"}, "cannot be won"),  # locked in
    ],
)
def test_houses_that_are_none(changes, problem):
    with pytest.raises(ValueError, match=problem):
        envs.make("text_adventure", {**HOUSE, **changes})


@pytest.mark.slow
def test_two_steps_of_training(tmp_path):
    changes = {
        "data.train_data": ["jaxrl.envs.toys.text_adventure:prompts(size=16, seed=0, rooms=2)"],
        "data.val_data": [],
        "environment.env_class": "text_adventure",
        "trainer.eval_interval": -1,
        "trainer.eval_before_train": False,
        "trainer.max_training_steps": 2,
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 4,
        "trainer.micro_train_batch_size_per_gpu": 2,
        "trainer.micro_forward_batch_size_per_gpu": 2,
        "trainer.max_prompt_length": 280,
        "trainer.algorithm.max_seq_len": 512,
        "generator.n_samples_per_prompt": 2,
        "generator.max_turns": 2,
        "generator.max_input_length": 380,
        "generator.sampling_params.max_generate_length": 12,
        "trainer.ckpt_interval": -1,
        "trainer.log_path": str(tmp_path),
        "trainer.ckpt_path": str(tmp_path / "checkpoints"),
        "trainer.export_path": str(tmp_path / "exports"),
        "trainer.run_name": "quickstart",
    }
    train(cfg.apply_overrides(cfg.load_config_file(str(ROOT / "configs/guess_number.py")), changes))
    lines = metric_lines(tmp_path)
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["environment/turns"] == line["generate/avg_turns"] == 2
        assert line["generate/env_errors"] == 0
        assert line["policy/rollout_train_logprobs_abs_diff_max"] <= 1e-4
