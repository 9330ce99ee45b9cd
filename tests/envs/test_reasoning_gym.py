"""Rows from reasoning-gym and their scores, over a trip through parquet."""

import json
import sys
from collections import Counter
from fractions import Fraction

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrl import envs
from jaxrl.data.prompts import load_rows
from jaxrl.envs.adapters import reasoning_gym, tagged_json
from jaxrl.envs.adapters.reasoning_gym import curriculum, prompts

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
# Families that name no answer, because many are right.
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


def all_families():
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - {"composite"})


def make(row):
    extras = {key: row[key] for key in row if key not in ("prompt", "env_class")}
    return envs.make(row["env_class"], extras)


def step(row, response, **reward_spec):
    return make({**row, "reward_spec": {**row["reward_spec"], **reward_spec}}).step(response)


@pytest.fixture
def row():
    """7 + 8 = 15 as a row."""
    [row] = prompts("chain_sum", size=1, seed=1, **ONE_DIGIT)
    entry = {"question": "7 + 8 =", "answer": "15", "metadata": {}}
    return {
        **row,
        "entry": json.dumps(entry),
        "reward_spec": {"ground_truth": "15", "extract": "last_number"},
    }


# ---- rows ----------------------------------------------------------------------------------------


def test_row_of_chain_sum():
    [row] = prompts("chain_sum", size=1, seed=0, extract="last_number", **ONE_DIGIT)
    question = row["prompt"][0]["content"]
    left, operator, right = question.removesuffix(" =").split()[-3:]
    answer = int(left) + int(right) if operator == "+" else int(left) - int(right)
    assert question.startswith("State the final answer to the following arithmetic problem: ")
    assert row["reward_spec"] == {
        "method": "reasoning_gym",
        "ground_truth": str(answer),
        "extract": "last_number",
        "partial_credit": True,
    }
    assert (row["env_class"], row["data_source"]) == ("reasoning_gym:chain_sum", "chain_sum")
    assert json.loads(row["family_config"]) == ONE_DIGIT


def test_instruction_is_a_system_message():
    [row] = prompts("chain_sum", size=1, instruction="Answer with the number only.")
    assert [m["role"] for m in row["prompt"]] == ["system", "user"]
    assert row["prompt"][0]["content"] == "Answer with the number only."


def questions(*args, **kwargs):
    return [row["prompt"][-1]["content"] for row in prompts(*args, **kwargs)]


def test_rows_are_fixed_by_the_seed_and_seeds_do_not_overlap():
    # reasoning-gym's own seeds 1 and 2 share all items but one.
    first = questions("chain_sum", size=30, seed=1)
    assert first == questions("chain_sum", size=30, seed=1)
    assert not set(first) & set(questions("chain_sum", size=30, seed=2))


def test_splits_never_meet():
    # There are 200 such questions, so 400 draws see most of them; a split still keeps them apart.
    train = questions("chain_sum", size=400, seed=1, split="train", **ONE_DIGIT)
    evaluation = questions("chain_sum", size=40, seed=2, split="eval", **ONE_DIGIT)
    assert (len(train), len(evaluation)) == (400, 40)
    assert not set(train) & set(evaluation)
    assert set(train) & set(questions("chain_sum", size=40, seed=2, **ONE_DIGIT))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"family": "chain_sums"}, "unknown .* 'chain_sums'; did you mean 'chain_sum'. the fam"),
        ({"family": "composite"}, "'composite' refuses the settings {}: Must specify at least one"),
        (
            {"family": "composite", "datasets": [{"name": "gcd"}, {"name": "gcx"}]},
            "'composite' refuses the settings .*'gcx' not registered",
        ),
        ({"min_terms": 5, "max_terms": 2}, "'chain_sum' refuses .*max_terms must be >= min_terms"),
        ({"terms": 5}, "'chain_sum' refuses the settings {'terms': 5}: .*'terms'"),
        ({"extract": "json"}, "extract must be one of answer_tag, last_number, got 'json'"),
        ({"split": "test"}, "split must be 'train', 'eval' or None, got 'test'"),
        ({"seed": 4001}, "seed must be 0 to 4000, got 4001"),
        ({"size": 0}, "size must be 1 to 999950 for split None, got 0"),
        ({"size": 40_000, "split": "eval"}, "size must be 1 to 33331 for split 'eval', got 40000"),
    ],
)
def test_impossible_data_sets(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        list(prompts(**{"family": "chain_sum", "size": 2, **arguments}))


def test_split_that_is_too_small():
    # One number, hence one question; by its checksum it is for training. 50 + 30 * 2 draws.
    with pytest.raises(ValueError, match="gave only 0 questions of split 'eval' in 110 draws, 2"):
        list(prompts("count_bits", size=2, split="eval", min_n=5, max_n=5))
    assert len(questions("count_bits", size=2, split="train", min_n=5, max_n=5)) == 2


def test_items_that_the_family_cannot_make_are_passed_over(monkeypatch):
    from reasoning_gym.arithmetic.chain_sum import ChainSumDataset

    real = ChainSumDataset.__getitem__

    def sometimes(self, idx):
        if idx == 1:
            raise RuntimeError("gave up")
        return real(self, idx)

    expected = questions("chain_sum", size=4, seed=1)
    monkeypatch.setattr(ChainSumDataset, "__getitem__", sometimes)
    assert questions("chain_sum", size=3, seed=1) == [expected[i] for i in (0, 2, 3)]


def test_entry_survives_as_text():
    entry = {"a": (1, [2.5, (3,)]), "b": {1: "x", (0, 1): None}, "c": Fraction(1, 3), "d": {}}
    text = tagged_json.encode(entry)
    assert tagged_json.decode(text) == entry
    assert type(tagged_json.decode(text)["a"]) is tuple


def test_entry_that_cannot_be_text_names_the_family():
    with pytest.raises(ValueError, match="family 'chain_sum' holds what JSON cannot: .* set"):
        reasoning_gym._text({"a": {1, 2}}, "chain_sum")


def test_missing_package_says_how_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ImportError, match=r"package reasoning-gym: pip install 'jaxrl\[envs\]'"):
        list(prompts("chain_sum", size=1))
    with pytest.raises(ImportError, match=r"pip install 'jaxrl\[envs\]'"):
        envs.load("reasoning_gym:chain_sum")


def test_rows_of_a_mixture_belong_to_its_families():
    datasets = [
        {"name": "chain_sum", "weight": 3.0, "config": ONE_DIGIT},
        {"name": "gcd", "config": {"max_numbers": 2}},
    ]
    rows = list(prompts("composite", size=40, seed=1, datasets=datasets))
    assert rows == list(prompts("composite", size=40, seed=1, datasets=datasets))
    counts = Counter(row["env_class"] for row in rows)
    assert set(counts) == {"reasoning_gym:chain_sum", "reasoning_gym:gcd"}
    assert 20 < counts["reasoning_gym:chain_sum"] < 40  # three quarters of 40 are 30
    for row in rows:
        assert json.loads(row["family_config"]) == datasets[row["data_source"] == "gcd"]["config"]
        assert step(row, row["reward_spec"]["ground_truth"])["reward"] == 1.0
    with pytest.raises(ValueError, match="'composite' have the env_class of the family"):
        envs.load("reasoning_gym:composite")


# ---- difficulty ----------------------------------------------------------------------------------


def terms(row):
    """How many numbers are added in a question of chain_sum."""
    return (
        len(row["prompt"][0]["content"].removesuffix(" =").split("problem: ")[1].split()) // 2 + 1
    )


def test_rows_become_harder_in_the_given_order():
    rows = list(curriculum("chain_sum", size=25, levels=[0, 1, 3], mode="upper_bound"))
    # 25 rows at 3 levels: 9, 8 and 8
    assert [row["level"] for row in rows] == [0] * 9 + [1] * 8 + [2] * 8
    # reasoning-gym's levels of num_terms are 2, 3, 4, 5, ..
    found = [{terms(row) for row in rows if row["level"] == level} for level in range(3)]
    assert found == [{2}, {3}, {5}]
    config = json.loads(rows[-1]["family_config"])
    assert (config["min_terms"], config["max_terms"]) == (5, 5)
    assert step(rows[-1], rows[-1]["reward_spec"]["ground_truth"])["reward"] == 1.0
    assert rows == list(curriculum("chain_sum", size=25, levels=[0, 1, 3], mode="upper_bound"))


def test_a_level_can_be_given_by_attribute():
    [row] = curriculum("chain_sum", size=1, levels=[{"*": 1, "num_digits": 2}], allow_negation=True)
    config = json.loads(row["family_config"])
    # levels of num_terms: 2, 3, ..; of num_digits: 1, 2, 3, ..; "inclusive" starts with the first
    assert config == {
        **{"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 3},
        "allow_negation": True,
    }


def test_levels_draw_different_items():
    rows = list(curriculum("chain_sum", size=40, levels=[1, 1], seed=2))
    half = [{row["prompt"][0]["content"] for row in part} for part in (rows[:20], rows[20:])]
    assert len(half[0] & half[1]) < 5
    assert make(rows[0]).get_metrics() == {"level": 0.0}
    env = make(rows[-1])
    env.step("")
    assert env.get_metrics()["level"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"levels": []}, r"levels must be 1 to size=4 levels, got \[\]"),
        ({"levels": [0] * 5}, "levels must be 1 to size=4 levels, got"),
        ({"levels": [0, 99]}, r"'chain_sum' has no level 99 of '\*'; the highest levels are {'num"),
        ({"levels": [-1]}, "has no level -1 of"),
        ({"levels": [{"terms": 1}]}, "has no level 1 of 'terms'; the highest levels are {'num_te"),
        ({"mode": "last_k"}, "mode must be one of upper_bound, inclusive, got 'last_k'"),
        ({"family": "acre"}, "reasoning-gym has no curriculum for its family 'acre'"),
        ({"family": "chain_sun"}, "did you mean 'chain_sum'"),
        ({"terms": 2}, "'chain_sum' refuses the settings {'terms': 2}"),
        ({"family": "survo", "levels": [2]}, "'survo' refuses the settings .*max_empty must be <="),
        ({"split": "test"}, "split must be 'train', 'eval' or None, got 'test'"),
    ],
)
def test_impossible_curricula(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        list(curriculum(**{"family": "chain_sum", "size": 4, "levels": [0, 1], **arguments}))


# ---- scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("7 + 8 = 15.", 1.0),
        ("15", 1.0),
        ("The answer is 15.0", 1.0),  # the family compares numbers
        ("I say 155", 2 / 3),  # contains "15": 2 of 3 characters
        ("7 + 8 = 16", 0.0),
        ("15 is not 16", 0.0),
        ("no idea", 0.0),
    ],
)
def test_last_number_is_scored_by_the_family(row, response, reward):
    assert step(row, response)["reward"] == pytest.approx(reward)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<answer>15</answer>", 1.0),
        ("15", 1.0),
        ("7 + 8 = 15", 0.2),  # 2 of 10 characters
        ("<answer>16</answer> 15", 0.0),
    ],
)
def test_answer_tag_or_the_whole_text(row, response, reward):
    assert step(row, response, extract="answer_tag")["reward"] == pytest.approx(reward)


def test_without_partial_credit_only_full_marks_count(row):
    assert step(row, "155", partial_credit=False)["reward"] == 0.0
    assert step(row, "15", partial_credit=False)["reward"] == 1.0


def test_step_and_metrics(row):
    env = make(row)
    assert env.step("it is 155") == {
        "observations": [],
        "reward": pytest.approx(2 / 3),
        "done": True,
        "metadata": {"answer": "155", "score": pytest.approx(2 / 3), "error": None},
    }
    assert env.get_metrics() == {"solved": 0.0, "score": pytest.approx(2 / 3), "unreadable": 0.0}


def test_answer_that_the_scorer_chokes_on_earns_nothing():
    [row] = prompts("prime_factorization", size=1)
    env = make(row)
    output = env.step("I do not know")
    assert output["reward"] == 0.0
    assert "ValueError" in output["metadata"]["error"]
    assert env.get_metrics() == {"solved": 0.0, "score": 0.0, "unreadable": 1.0}


@pytest.mark.parametrize("family", ["spiral_matrix", "countdown"])
def test_answer_is_never_run_as_code(family, tmp_path):
    [row] = prompts(family, size=1)
    target = tmp_path / "written_by_the_model"
    output = step(row, f"__import__('pathlib').Path({str(target)!r}).touch()")
    assert output["metadata"]["error"] == "the scorer would run this answer as code"
    assert not target.exists()


def test_answer_too_deep_to_parse_earns_nothing():
    [row] = prompts("countdown", size=1)
    assert step(row, "-" * 100_000 + "1")["reward"] == 0.0


def test_settings_of_the_family_reach_its_scorer():
    # arc_agi, for one, reads an answer in the board format of its settings.
    first = make(next(prompts("chain_sum", size=1)))
    second = make(next(prompts("chain_sum", size=1, **ONE_DIGIT)))
    third = make(next(prompts("chain_sum", size=1, seed=7, **ONE_DIGIT)))
    assert first._dataset is not second._dataset
    assert second._dataset is third._dataset
    assert second._dataset.config.max_terms == 2


def test_row_without_entry():
    with pytest.raises(ValueError, match="'reasoning_gym:gcd' needs the column 'entry', which"):
        envs.make("reasoning_gym:gcd", {"reward_spec": {"ground_truth": "4"}})


def test_unknown_family_of_a_row(row):
    with pytest.raises(ValueError, match="unknown reasoning-gym family 'chain_sun'; did you mean"):
        make({**row, "env_class": "reasoning_gym:chain_sun"})


# ---- families ------------------------------------------------------------------------------------


def check_families(families, tmp_path):
    """Rows survive parquet as they are, and the right answer scores 1 after it."""
    rows = [row for family in families for row in prompts(family, size=2, seed=3)]
    path = tmp_path / "families.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    loaded = load_rows(str(path))
    assert loaded == rows
    for row in loaded:
        family, answer = row["data_source"], row["reward_spec"]["ground_truth"]
        score = make(row).step(f"So <answer>{answer}</answer>")["metadata"]["score"]
        if family not in WITHOUT_ANSWER:
            assert score == 1.0, (family, answer, score)
        for junk in ("", "junk", "[1, 2", "3", "{}", "None"):
            assert 0.0 <= make(row).step(junk)["reward"] <= 1.0, (family, junk)


# rearc compares tuples, graph_color looks up integer keys: what JSON alone would lose.
def test_three_families(tmp_path):
    check_families(["chain_sum", "graph_color", "rearc"], tmp_path)


def test_coloring_a_graph_needs_integer_keys():
    rows = prompts("graph_color", size=5, seed=0, min_num_vertices=3, max_num_vertices=4)
    for row in rows:
        env = make(row)
        solution = env.entry["metadata"]["possible_answer"]
        assert all(isinstance(vertex, int) for vertex in solution)
        assert env.step(json.dumps(solution))["reward"] == 1.0


@pytest.mark.slow
def test_all_families(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # codeio runs programs of its own, and some write files
    families = all_families()
    assert len(families) == 105
    check_families(families, tmp_path)


@pytest.mark.slow
def test_every_curriculum_has_rows_at_its_first_and_second_level(tmp_path, monkeypatch):
    from reasoning_gym.factory import CURRICULA

    monkeypatch.chdir(tmp_path)
    assert set(all_families()) - set(CURRICULA) == {"acre", "gsm_symbolic", "list_functions"}
    refused = {}
    for family in CURRICULA:
        for level in (0, 1):
            try:
                [row] = curriculum(family, size=1, levels=[level])
            except ValueError as error:
                refused[family, level] = str(error).rpartition(": ")[2]
                continue
            assert 0.0 <= make(row).step("junk")["reward"] <= 1.0
    # Levels that reasoning-gym's own settings refuse.
    assert refused == {
        ("knight_swap", 0): "min_nodes must be >= 6",
        ("knight_swap", 1): "min_nodes must be >= 6",
        ("modulo_grid", 1): "max_target must be greater than 0",
    }


@pytest.mark.slow
def test_all_families_are_fixed_by_the_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for family in all_families():
        first, second = (list(prompts(family, size=2, seed=5)) for _ in range(2))
        assert first == second, family
