"""Reading data sets, filtering prompts, and the order of batches."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrl.data.prompts import check_files, load_prompts, load_rows
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.types import Prompt

TINY = Path(__file__).parents[2] / "configs" / "tiny_char_model"
HERE = "tests.data.test_prompts"


def user(text):
    return [{"role": "user", "content": text}]


def rows_for_tests(size=2, seed=0, family="a"):
    """A generator for the sources below."""
    for i in range(size):
        yield {"prompt": user(f"{family}{seed}{i}"), "number": np.int64(i), "grid": np.eye(2)}


def rows_with_a_flaw():
    yield {"prompt": user("1")}
    yield "not a row"


@pytest.fixture(autouse=True)
def module_name(monkeypatch):
    """Makes this module importable under a fixed name, whatever pytest calls it."""
    import sys

    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# ---- load_rows: what is accepted -----------------------------------------------------------------


def test_parquet_rows_are_plain_python(tmp_path):
    path = tmp_path / "train.parquet"
    rows = [
        {
            "prompt": user("1+1"),
            "env_class": "gsm8k",
            "reward_spec": {"method": "rule", "ground_truth": "2"},
            "extra_info": {"index": 0, "scores": [0.5, 1.0]},
        },
        {"prompt": user("2+2"), "reward_spec": {"method": "rule", "ground_truth": "4"}},
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    first, second = load_rows(str(path))
    assert first == rows[0]
    assert type(first["extra_info"]["scores"]) is list
    # Parquet fills the columns that a row does not have.
    assert second == {**rows[1], "env_class": None, "extra_info": None}


def test_keys_that_parquet_added_to_messages_are_removed(tmp_path):
    path = tmp_path / "tools.parquet"
    prompt = [{"role": "system", "content": "s"}, {"role": "tool", "content": "t", "name": "f"}]
    pq.write_table(pa.Table.from_pylist([{"prompt": prompt}]), path)
    assert pq.read_table(path).to_pylist()[0]["prompt"][0]["name"] is None
    assert load_rows(str(path)) == [{"prompt": prompt}]


def test_jsonl_skips_blank_lines(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": [{"role": "user", "content": "1"}], "level": 3}\n\n')
    assert load_rows(str(path)) == [{"prompt": user("1"), "level": 3}]


def test_json_is_a_list_or_lines(tmp_path):
    rows = [{"prompt": user("1")}, {"prompt": user("2")}]
    as_list, as_lines = tmp_path / "list.json", tmp_path / "lines.json"
    as_list.write_text(json.dumps(rows, indent=2))
    write_jsonl(as_lines, rows)
    assert load_rows(str(as_list)) == load_rows(str(as_lines)) == rows


def test_a_string_is_one_user_message(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "what is 1+1?"}])
    assert load_rows(path) == [{"prompt": user("what is 1+1?")}]


def test_generator_with_and_without_arguments():
    rows = load_rows(f"{HERE}:rows_for_tests(size=3, seed=-1, family='b')")
    assert [row["prompt"][0]["content"] for row in rows] == ["b-10", "b-11", "b-12"]
    assert rows[1] == {"prompt": user("b-11"), "number": 1, "grid": [[1.0, 0.0], [0.0, 1.0]]}
    assert type(rows[1]["number"]) is int
    assert len(load_rows(f"{HERE}:rows_for_tests")) == 2


# ---- load_rows: what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "1"}, "no 'prompt'; the columns are ['question']"),
        ({"prompt": None}, "the prompt is null"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": 3}, "the prompt is neither text nor a list of messages but int 3"),
        (
            {"prompt": {"role": "user"}},
            "the prompt is neither text nor a list of messages but dict",
        ),
        ({"prompt": ["hi"]}, "message 0 is not a dict with role and content but 'hi'"),
        ({"prompt": [{"content": "1"}]}, "message 0 has no role; its keys are ['content']"),
        ({"prompt": [*user("1"), {"role": "user"}]}, "message 1 (role 'user') has no content"),
        ({"prompt": user("1"), "env_class": 3}, "env_class is not a string: 3"),
        ([1, 2], "not a dict but list '[1, 2]'"),
    ],
)
def test_bad_row_is_reported_with_file_and_number(tmp_path, row, problem):
    path = write_jsonl(tmp_path / "bad.jsonl", [{"prompt": "ok"}, row])
    with pytest.raises(ValueError, match=re.escape(f"{path}: 1 of 2 rows are bad:")) as error:
        load_rows(path)
    assert f"row 1: {problem}" in str(error.value)


def test_only_the_first_bad_rows_are_listed(tmp_path):
    path = write_jsonl(tmp_path / "bad.jsonl", [{"prompt": "ok"}] + [{"prompt": ""}] * 8)
    with pytest.raises(ValueError, match="8 of 9 rows are bad") as error:
        load_rows(path)
    lines = str(error.value).splitlines()
    assert lines[1:] == [f"  row {i}: the prompt is empty" for i in range(1, 6)] + ["  and 3 more"]


def test_bad_row_of_a_generator():
    with pytest.raises(ValueError, match="row 1: not a dict but str 'not a row'"):
        load_rows(f"{HERE}:rows_with_a_flaw")


def test_malformed_json_line_is_numbered_from_one(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "1"}\n{"prompt": \n')
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2: malformed JSON: Expecting value"):
        load_rows(str(path))


def test_malformed_json_list_names_the_line(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text('[\n{"prompt": "1"},\n{"prompt" 2}]')
    with pytest.raises(ValueError, match=r"bad\.json, line 3: malformed JSON"):
        load_rows(str(path))


def test_file_that_is_no_parquet(tmp_path):
    path = tmp_path / "bad.parquet"
    path.write_text("prompt,answer\n")
    with pytest.raises(ValueError, match=r"bad\.parquet is not a readable parquet file"):
        load_rows(str(path))


@pytest.mark.parametrize(("name", "text"), [("e.jsonl", ""), ("e.json", "[]"), ("f.jsonl", "\n")])
def test_empty_data_set(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name}' is empty"):
        load_rows(str(tmp_path / name))


def test_missing_file():
    with pytest.raises(ValueError, match=r"data file '/no/train\.parquet' does not exist"):
        load_rows("/no/train.parquet")


def test_missing_files_of_a_known_data_set_come_with_the_command_that_writes_them(tmp_path):
    there, folder = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1"}]), tmp_path / "gsm8k"
    check_files([there, "my.module:rows"])
    files = [f"{folder}/train.parquet", f"{folder}/validation.parquet"]
    with pytest.raises(ValueError) as error:
        check_files([there, *files])
    assert str(error.value) == (
        f"data files '{files[0]}', '{files[1]}' do not exist (looked in {Path.cwd()}). To write: "
        f"python -m jaxrl.data.prepare gsm8k --output {folder}"
    )
    with pytest.raises(ValueError, match=r"mine/train\.parquet' does not exist \(looked in \S+\)$"):
        check_files(["data/mine/train.parquet"])


@pytest.mark.parametrize("source", ["train.csv", "openai/gsm8k", "", "openai/gsm8k:train"])
def test_unknown_kind_of_source(source):
    with pytest.raises(ValueError, match=f"data source '{source}' is not a .parquet, .jsonl"):
        load_rows(source)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("rows_for_tests(size=2+3*len('a'))", r"size=2 \+ 3 \* len\('a'\) is not a literal"),
        ("rows_for_tests(family=__import__('os'))", r"family=__import__\('os'\) is not a literal"),
        ("rows_for_tests(3)", "write the arguments as name=value"),
        ("rows_for_tests(**{'size': 3})", "write the arguments as name=value"),
        ("rows_for_tests(size=3)(seed=1)", r"must be one call 'pkg\.module:function\(\.\.\.\)'"),
        ("rows_for_tests(size=)", "is not a valid call"),
        (
            "rows_for_tests(sizze=3)",
            r"unexpected keyword argument 'sizze'; the signature is rows_for",
        ),
        ("row_for_tests(size=3)", "has no function 'row_for_tests'; did you mean 'rows_for_tests'"),
    ],
)
def test_bad_generator_call(call, problem):
    with pytest.raises(ValueError, match=problem):
        load_rows(f"{HERE}:{call}")


def test_missing_module():
    with pytest.raises(ValueError, match="there is no module 'nowhere'"):
        load_rows("nowhere.to_be:found()")


def test_a_generator_that_raises_is_named_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "raises_rows.py").write_text("def rows():\n    yield {}['question']\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = r"'raises_rows:rows\(\)' raised KeyError: 'question' .*raises_rows.py:2.$"
    with pytest.raises(ValueError, match=said):
        load_rows("raises_rows:rows()")


def test_a_file_in_another_encoding_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(ValueError, match="a.jsonl is not text in UTF-8"):
        load_rows(str(tmp_path / "a.jsonl"))


def test_a_mark_of_byte_order_is_no_text(tmp_path):
    for name in ("a.jsonl", "a.json"):
        content = b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n'
        (tmp_path / name).write_bytes(content)
        prompts = [row["prompt"] for row in load_rows(str(tmp_path / name))]
        assert prompts == [user("a"), user("b")]


def test_what_is_no_file_of_rows_is_told_what_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts.parquet").mkdir()
    for name in ("a.jsonl", "b.jsonl", "parts.parquet/0.parquet", "parts.parquet/_SUCCESS"):
        (tmp_path / name).write_text("")
    for name in ("packed.jsonl.gz", "table.csv"):
        (tmp_path / name).write_text("prompt")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1\n"
    for name in ("unfetched.parquet", "unfetched.jsonl"):
        (tmp_path / name).write_text(pointer)
    for source, said in {
        "parts.parquet": "a folder; name its files: ['parts.parquet/0.parquet']",
        "parts.parquet/": "a folder; name its files: ['parts.parquet/0.parquet']",
        "*.jsonl": "a pattern, which is not expanded; name its files: "
        "['a.jsonl', 'b.jsonl', 'unfetched.jsonl']",
        "none*.jsonl": "not expanded; name its files: .parquet, .jsonl, .json; here are none",
        "packed.jsonl.gz": "unpack it first",
        "table.csv": "write its rows as one of these",
        "openai/gsm8k": "name a parquet file that you have downloaded",
        "what is 1 + 1?": "If these are prompts, write rows",
        "unfetched.parquet": "git lfs pull",
        "unfetched.jsonl": "git lfs pull",
    }.items():
        with pytest.raises(ValueError, match=re.escape(said)) as error:
            load_rows(source)
        assert ("If these are prompts" in str(error.value)) is (source == "what is 1 + 1?")


def test_messages_as_json_text_are_refused_and_other_text_is_not(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": json.dumps(user("hi"))}])
    with pytest.raises(ValueError, match=r"row 0: the prompt is messages written as JSON text: "):
        load_rows(path)
    texts = ["[1, 2]", "[]", '[{"role": "user"}]', "[not JSON", '{"role": "user"}']
    path = write_jsonl(tmp_path / "b.jsonl", [{"prompt": text} for text in texts])
    assert [row["prompt"] for row in load_rows(path)] == [user(text) for text in texts]


def test_a_truth_that_is_no_number_is_none(tmp_path):
    rows = [{"prompt": "1", "reward_spec": {"ground_truth": x}} for x in (2.0, math.nan)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for path in (str(tmp_path / "a.parquet"), write_jsonl(tmp_path / "a.jsonl", rows)):
        truths = [row["reward_spec"]["ground_truth"] for row in load_rows(path)]
        assert truths == [2.0, None]


def test_a_parquet_file_that_arrow_cannot_read_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": "1"}]), path)

    class Nested(pq.ParquetFile):
        def iter_batches(self):  # as of 2 GB in one group of rows
            raise pa.ArrowNotImplementedError("Nested data conversions not implemented")

    monkeypatch.setattr(pq, "ParquetFile", Nested)
    with pytest.raises(ValueError, match=r"a.parquet has a column .*Nested data.*row_group_size"):
        load_rows(str(path))


def test_module_that_lacks_an_import_says_so(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="'needs_more:rows': there is no module 'not_installed'"):
        load_rows("needs_more:rows")


# ---- load_prompts --------------------------------------------------------------------------------


def load(sources, tokenizer=None, max_prompt_length=100, **options):
    return load_prompts(
        sources,
        tokenizer or load_tokenizer(TINY),
        max_prompt_length=max_prompt_length,
        default_env_class="gsm8k",
        **options,
    )


def test_prompts_carry_tokens_env_class_and_extras(tmp_path):
    first = write_jsonl(
        tmp_path / "a.jsonl", [{"prompt": "31", "reward_spec": {"ground_truth": "13"}, "level": 2}]
    )
    second = write_jsonl(
        tmp_path / "b.jsonl", [{"prompt": "4"}, {"prompt": "20", "env_class": "sort_digits"}]
    )
    prompts, num_filtered = load([first, second])
    # Token i is digit i, the generation prompt ">" is 13.
    assert prompts == [
        Prompt(
            uid="0:0",
            messages=user("31"),
            tokens=(3, 1, 13),
            env_class="gsm8k",
            extras={"reward_spec": {"ground_truth": "13"}, "level": 2},
        ),
        Prompt(uid="1:0", messages=user("4"), tokens=(4, 13), env_class="gsm8k", extras={}),
        Prompt("1:1", user("20"), (2, 0, 13), "sort_digits", {}),
    ]
    assert num_filtered == [0, 0]


def test_long_prompts_are_dropped_and_uids_stay(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1" * n} for n in (3, 4, 5, 2)])
    # With ">" the lengths are 4, 5, 6 and 3; a length equal to the limit stays.
    prompts, num_filtered = load([path], max_prompt_length=4)
    assert ([p.uid for p in prompts], num_filtered) == (["0:0", "0:3"], [2])


def test_all_prompts_too_long_says_how_long(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "123456"}, {"prompt": "12345"}])
    message = "all 2 prompts are longer than max_prompt_length=5 tokens; the shortest has 6"
    with pytest.raises(ValueError, match=message):
        load([path], max_prompt_length=5)


def test_chat_template_kwargs_reach_the_template(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "12"}])
    tokenizer = load_tokenizer(TINY)
    tokenizer.chat_template = "{{ messages[0]['content'] }}{{ mark }}"
    prompts, _ = load([path], tokenizer, chat_template_kwargs={"mark": "=="})
    assert prompts[0].tokens == (1, 2, 12, 12)


def test_template_that_refuses_a_row_names_it(tmp_path):
    rows = [{"prompt": "1"}, {"prompt": "2"}, {"prompt": "2"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    tokenizer = load_tokenizer(TINY)
    tokenizer.chat_template = (
        "{% if messages[0]['content'] == '2' %}{{ raise_exception('no twos') }}{% endif %}1"
    )
    with pytest.raises(ValueError, match="the chat template refuses rows") as error:
        load([path], tokenizer)
    first, *listed = str(error.value).splitlines()
    assert first.endswith(f"{path}: 2 of 3 rows are bad:")
    assert [line.split(":")[0] for line in listed] == ["  row 1", "  row 2"]
    assert all("no twos" in line for line in listed)


@pytest.mark.parametrize(
    ("sources", "problem"),
    [([], "no data source was given"), ("a.jsonl", "list of strings, got the string 'a.jsonl'")],
)
def test_sources_must_be_a_list(sources, problem):
    with pytest.raises(ValueError, match=problem):
        load(sources)
