"""`python -m jaxrl.data.prepare` on small copies with the files and columns of the hub's."""

import json
import os
import sqlite3

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrl import envs
from jaxrl.data.benchmarks import BENCHMARKS, last_boxed
from jaxrl.data.prepare import main, prepare
from jaxrl.data.prompts import load_prompts, load_rows
from jaxrl.data.tokenizer import character_tokenizer

GSM8K = {"question": "6 eggs, 2 eaten?", "answer": "6 - 2 = <<6-2=4>>4\n#### 4"}
LARGE = {"question": "How far?", "answer": "So it is far.\n#### -1,250"}
MATH = {
    "problem": "What is $1/2$?",
    "level": "Level 3",
    "type": "Algebra",
    "solution": r"It is \boxed{1}, or \boxed{\frac{1}{2}}.",
}
EASY = {**MATH, "problem": "What is $1 + 1$?", "level": "Level 1", "solution": r"\boxed 2 it is"}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": "Solve. Answer: $Answer\n\nHow many?", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}
SQL = {
    "data_source": "synsql",
    "prompt": [{"role": "system", "content": "Query."}, {"role": "user", "content": "Who is 36?"}],
    "reward_spec": {"method": "rule", "ground_truth": "SELECT name FROM people WHERE age = 36"},
    "db_id": "shop",
    "data": "spider",
}
SEARCH = {
    "id": "train_0",
    "question": "who wrote Faust?",
    "golden_answers": ["Goethe", "Johann Wolfgang von Goethe"],
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "an older template"}],
    "ability": "fact-reasoning",
    "reward_model": {"ground_truth": {"target": ["Goethe"]}, "style": "rule"},
    "extra_info": {"index": 0, "split": "train"},
    "metadata": None,
}
AIME = """ID,Year,Problem Number,Question,Answer,Part
1983-1,1983,1,"Find $x$,
an integer.",60,
2024-I-4,2024,4,"Find ""m + n"".",073,I
"""


def variant(row, text):
    """The row with another question."""
    return json.loads(json.dumps(row).replace(text[0], text[1]))


COPIES = {  # files of a copy -> their rows
    "gsm8k": {
        "main/train-00000-of-00001.parquet": [GSM8K, LARGE],
        "main/test-00000-of-00001.parquet": [variant(GSM8K, ("eggs", "figs"))],
        "socratic/train-00000-of-00001.parquet": [variant(GSM8K, ("eggs", "no"))],
    },
    "math": {
        "data/train-00000-of-00002.parquet": [MATH],
        "data/train-00001-of-00002.parquet": [EASY],
        "data/test-00000-of-00001.parquet": [variant(MATH, ("What is", "Tell"))],
        "algebra/train-00000-of-00001.parquet": [MATH],
    },
    "dapo": {
        "data/dapo-math-17k.parquet": [
            DAPO,
            variant(DAPO, ("How many", "Whom")),
            DAPO,
            variant(variant(DAPO, ("How many", "Whom")), ("34", "35")),  # another answer: neither
            variant(DAPO, ("How many", "How far")),
        ],
        "data/aime-2024.parquet": [variant(DAPO, ("How many", "How late"))] * 3,
    },
    "aime": {"AIME_Dataset_1983_2024.csv": AIME},
    "text2sql": {"train.parquet": [SQL], "validation.parquet": [variant(SQL, ("Who", "Which"))]},
    "searchr1": {"train.parquet": [SEARCH], "test.parquet": [variant(SEARCH, ("wrote", "made"))]},
}
ANSWERS = {
    "gsm8k": "It is so.\n#### {}",
    "math": "So \\boxed{{{}}}",
    "aime": "Thus\nAnswer: {}",
    "text2sql": "<think>so</think><solution>{}</solution>",
    "search": "<think>so</think><answer>{}</answer>",
}


@pytest.fixture(params=BENCHMARKS)
def copy(request, tmp_path):
    """Name of a data set and a folder with the files that the hub has."""
    return request.param, write_copy(request.param, tmp_path / "copy")


def write_copy(name, folder):
    for file, rows in COPIES[name].items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(rows, str):
            path.write_text(rows)
        else:
            pq.write_table(pa.Table.from_pylist(rows), path)
    return folder


def test_every_row_loads_and_is_rewarded_for_its_own_answer(copy, tmp_path):
    name, folder = copy
    output = tmp_path / "data"
    written = prepare(name, output, str(folder))
    database = tmp_path / "db/spider/database/shop/shop.sqlite"
    database.parent.mkdir(parents=True)
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE people (name TEXT, age INT)")
        connection.execute("INSERT INTO people VALUES ('Ada', 36)")
    settings = {
        "text2sql": {"db_path": str(tmp_path / "db")},
        "search": {"search_url": "http://127.0.0.1:9/retrieve"},  # nothing is searched
    }
    files = [str(output / f"{split}.parquet") for split in ("train", "validation")]
    tokenizer = character_tokenizer("ab>")
    found, dropped = load_prompts(
        files, tokenizer, max_prompt_length=10_000, default_env_class="none"
    )
    assert dropped == [0, 0] and len(found) == sum(written.values())
    for prompt in found:
        spec = prompt.extras.get("reward_spec") or prompt.extras["reward_model"]
        truth = spec["ground_truth"]
        truth = truth["target"][0] if isinstance(truth, dict) else truth
        rewards = []
        for answer in (truth, "no such thing"):
            env = envs.make(prompt.env_class, {"max_turns": 1, **prompt.extras}, settings)
            env.init(prompt.messages)
            rewards.append(env.step(ANSWERS[prompt.env_class].format(answer))["reward"])
            env.close()
        assert rewards[0] == 1.0 > rewards[1]


def test_the_same_source_gives_the_same_bytes(copy, tmp_path):
    name, folder = copy
    for output in ("one", "two"):
        prepare(name, tmp_path / output, str(folder))
    for split in ("train", "validation"):
        one, two = ((tmp_path / output / f"{split}.parquet") for output in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
    assert sorted(os.listdir(tmp_path / "one")) == ["train.parquet", "validation.parquet"]


def rows_of(name, tmp_path, split="train", **given):
    folder = write_copy(name, tmp_path / "copy")
    prepare(name, tmp_path / "data", str(folder), **given)
    return load_rows(str(tmp_path / f"data/{split}.parquet"))


def test_gsm8k_has_skyrls_columns(tmp_path):
    first, second = rows_of("gsm8k", tmp_path)
    question = 'Let\'s think step by step and output the final answer after "####".'
    assert first == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"6 eggs, 2 eaten? {question}"}],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": "4"},
        "completion": GSM8K["answer"],
        "extra_info": {"split": "train", "index": 0, **GSM8K},
    }
    assert second["reward_spec"]["ground_truth"] == "-1250"


def test_maths_shards_are_read_in_order_and_its_levels_chosen(tmp_path):
    both = rows_of("math", tmp_path)
    assert [row["reward_spec"]["ground_truth"] for row in both] == ["\\frac{1}{2}", "2"]
    assert [row["extra_info"]["level"] for row in both] == ["Level 3", "Level 1"]
    assert rows_of("math", tmp_path, levels=[1]) == both[1:]
    assert len(rows_of("math", tmp_path, "validation", levels=[1])) == 1  # all levels
    with pytest.raises(ValueError, match=r"--levels \[5\]: no row of train has one of these"):
        prepare("math", tmp_path / "data", str(tmp_path / "copy"), levels=[5])
    with pytest.raises(ValueError, match="gsm8k has no levels"):
        prepare("gsm8k", tmp_path / "data", levels=[5])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{1} \boxed{{a}+\text{b}} so", r"{a}+\text{b}"),
        (r"\fbox{ 3 }", "3"),
        (r"$\boxed 5$ it is", "5"),
        (r"\boxed{1", None),
        ("none", None),
    ],
)
def test_last_boxed(text, expected):
    assert last_boxed(text) == expected


def test_dapo_keeps_each_prompt_once_and_none_with_two_answers(tmp_path):
    rows = rows_of("dapo", tmp_path)
    assert [row["prompt"][0]["content"][-9:] for row in rows] == ["How many?", "\nHow far?"]
    assert rows[0]["reward_model"] == {"style": "rule", "ground_truth": "34"}
    assert [row["extra_info"]["index"] for row in rows] == [0, 4]
    assert len(load_rows(str(tmp_path / "data/validation.parquet"))) == 1


def test_aime_of_2024_is_for_evaluation(tmp_path):
    (row,) = rows_of("aime", tmp_path, "validation")
    assert (row["data_source"], row["reward_model"]["ground_truth"]) == ("aime_2024", "73")
    assert '\n\nFind "m + n".\n\nRemember' in row["prompt"][0]["content"]
    (row,) = load_rows(str(tmp_path / "data/train.parquet"))
    assert (row["data_source"], row["reward_model"]["ground_truth"]) == ("aime", "60")
    prepare("aime", tmp_path / "of_file", str(tmp_path / "copy/AIME_Dataset_1983_2024.csv"))
    assert load_rows(str(tmp_path / "of_file/train.parquet")) == [row]


def test_searchr1_asks_in_search_r1s_words_and_leaves_documents_out(tmp_path):
    (row,) = rows_of("searchr1", tmp_path)
    assert row["data_source"] == "searchR1_nq" and "metadata" not in row
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["prompt"][1]["content"].endswith("Beijing </answer>. Question: who wrote Faust?")
    assert row["reward_spec"]["ground_truth"]["target"] == SEARCH["golden_answers"]


def test_verls_columns_and_another_environment(tmp_path):
    older = {**SQL, "reward_model": {"style": "rule", "ground_truth": "SELECT 1"}}
    del older["reward_spec"]
    file = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([older]), file)
    assert prepare("text2sql", tmp_path / "data", str(file), env_class="a.b:C") == {"train": 1}
    (row,) = load_rows(str(tmp_path / "data/train.parquet"))
    assert (row["reward_spec"]["ground_truth"], row["env_class"]) == ("SELECT 1", "a.b:C")


# ---- what is wrong -------------------------------------------------------------------------------


def test_the_command_says_what_it_wrote(tmp_path, capsys):
    folder, output = write_copy("gsm8k", tmp_path / "copy"), tmp_path / "data"
    (folder / "main/test-00000-of-00001.parquet").unlink()
    assert main(["gsm8k", "--output", str(output), "--source", str(folder)]) == 0
    said = capsys.readouterr().out
    assert f"{output}/train.parquet: 2 rows" in said
    assert f"{folder} has none of the files main/test-*.parquet, " in said
    assert "no validation.parquet is written" in said and os.listdir(output) == ["train.parquet"]


AIME_HEAD = "Year,Question,Answer"


def test_a_split_without_rows_is_not_written(tmp_path, capsys):
    file, output = tmp_path / "aime.csv", tmp_path / "data"
    file.write_text(f"{AIME_HEAD}\n1990,{'long ' * 30_000},²\n")  # a field over 128 Ki
    assert main(["aime", "--output", str(output), "--source", str(file)]) == 0
    assert os.listdir(output) == ["train.parquet"]
    (row,) = load_rows(str(output / "train.parquet"))
    assert row["reward_model"]["ground_truth"] == "²"
    file.write_text(f"{AIME_HEAD}\n2024,q,1\n")
    assert main(["aime", "--output", str(output), "--source", str(file)]) == 2
    assert "has no row for train" in capsys.readouterr().err


def test_a_validation_of_another_source_is_not_left_beside_the_new_train(tmp_path):
    folder, output = write_copy("gsm8k", tmp_path / "copy"), tmp_path / "data"
    prepare("gsm8k", output, str(folder))
    before = (output / "train.parquet").read_bytes()
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps(GSM8K))
    with pytest.raises(ValueError, match=r"validation.parquet is of another source.*remove it"):
        prepare("gsm8k", output, str(file))
    assert (output / "train.parquet").read_bytes() == before
    (output / "validation.parquet").unlink()
    assert prepare("gsm8k", output, str(file)) == {"train": 1}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "aime.csv",
            f"{AIME_HEAD}\n1990,q,1\n1991,".encode() + b"\xff" * 9999,
            ": cannot be read after [01] rows",
        ),
        (
            "aime.csv",
            f"{AIME_HEAD}\n1990,{'x' * 17_000_000},1\n".encode(),
            ": cannot be read after 0 rows: field l",
        ),
        ("aime.jsonl", b"\xff\xfe", r" is not text in UTF-8 \('utf-8' codec"),
    ],
    ids=["encoding", "field", "jsonl"],
)
def test_a_file_that_cannot_be_read_is_named(name, content, message, tmp_path):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}{message}"):
        prepare("aime", tmp_path / "data", str(file))


def test_a_full_stop_is_no_part_of_the_answer(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({**GSM8K, "answer": "#### 1,012."}))
    prepare("gsm8k", tmp_path / "data", str(file))
    (row,) = load_rows(str(tmp_path / "data/train.parquet"))
    assert row["reward_spec"]["ground_truth"] == "1012"


@pytest.mark.parametrize("answers", [["a", None], [], None, "a", ["a", 3], [""]])
def test_answers_that_are_none(answers, tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({**SEARCH, "golden_answers": answers}))
    with pytest.raises(ValueError, match="row 0: golden_answers is not a list of answers but"):
        prepare("searchr1", tmp_path / "data", str(file))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([GSM8K, "text"], r"1 of 2 rows.*row 1: not a row with columns but 'text'"),
        ([[GSM8K]], r"row 0: not a row with columns but \["),
        ([{**GSM8K, "question": {"a": 1}}], r"question is neither a text nor a whole number but"),
        ([{**GSM8K, "answer": "#### ."}], r"the answer has no '#### <number>'"),
        ([{"question": "q", "reply": "r"}], r"1 of 1 rows are bad:.*row 0: no 'answer'; the col"),
        ([GSM8K, {**GSM8K, "answer": "4"}], r"1 of 2 rows.*row 1: the answer has no '#### <numbe"),
    ],
)
def test_bad_rows_are_listed_and_nothing_is_written(rows, message, tmp_path, capsys):
    file, output = tmp_path / "train.jsonl", tmp_path / "data"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert main(["gsm8k", "--output", str(output), "--source", str(file)]) == 2
    assert not output.exists()
    said = " ".join(capsys.readouterr().err.split())
    with pytest.raises(ValueError, match=message):
        raise ValueError(said)


def test_a_source_that_is_not_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["gsm8k", "--output", "data", "--source", "copies"]) == 2
    assert "--source 'copies' is neither a file or folder (looked in" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["gsm8k", "--output", "data", "--source", "empty"]) == 2
    assert "empty has none of the files main/train-*.parquet" in capsys.readouterr().err


def test_a_hub_that_cannot_be_reached_names_the_way_without_it(tmp_path, monkeypatch, capsys):
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert main(["gsm8k", "--output", "my data"]) == 2
    said = capsys.readouterr().err
    assert "data set 'openai/gsm8k' cannot be had from the Hugging Face hub (" in said
    assert "hf download openai/gsm8k --repo-type dataset --local-dir FOLDER" in said
    assert "prepare gsm8k --output 'my data' --source FOLDER" in said
