"""The data sets that `python -m jaxrl.data.prepare` knows: where they are, and their rows as ours.

The columns are SkyRL's; `completion`, where there is a solution, is for `jaxrl.sft`. The words of
the prompts are the published ones: environments look for the answer where they ask for it, and
results are compared under them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl.data.messages import BadRow, messages_of

Row = dict[str, Any]

_GSM8K = 'Let\'s think step by step and output the final answer after "####".'
_GSM8K_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
_MATH = "Let's think step by step and output the final answer within \\boxed{}."
_MATH_ANSWER = re.compile(r"\\f?box(?:ed)?\s*(?:(?P<brace>\{)|(?P<plain>[^\s{$]+))")
_DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    '{question}\n\nRemember to put your answer on its own line after "Answer:".'
)
_LAST_YEAR = 2024  # of AIME: it is for evaluation
_SEARCH_R1 = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every "
    "time you get new information. After reasoning, if you find you lack some knowledge, you can "
    "call a search engine by <search> query </search> and it will return the top searched results "
    "between <information> and </information>. You can search as many times as you want. If you "
    "find no further external knowledge needed, you can directly provide the answer inside "
    "<answer> and </answer>, without detailed illustrations. For example, <answer> Beijing "
    "</answer>. Question: "
)
_ASSISTANT = "You are a helpful and harmless assistant."


@dataclass(frozen=True)
class Split:
    """Name the files of one split of a data set.

    Attributes:
        hub: the data set on the Hugging Face hub.
        files: patterns of paths in it; the first that a file matches counts.
    """

    hub: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Benchmark:
    """Describe a data set and how its rows become ours.

    Attributes:
        train, validation: its files.
        convert: a row, its number and "train" or "test" -> our row; None: it is of the other split.
        distinct: prompts that occur several times are kept once, those with several answers never.
    """

    train: Split
    validation: Split
    convert: Callable[[Row, int, str], Row | None]
    distinct: bool = False


def gsm8k(row: Row, index: int, split: str) -> Row:
    """Convert a row of GSM8K: `question`, and `answer` after ####.

    Cobbe et al. 2021, https://arxiv.org/abs/2110.14168.
    """
    question, answer = _text(row, "question"), _text(row, "answer")
    found = _GSM8K_ANSWER.search(answer)
    truth = found[1].replace(",", "").rstrip(".") if found else ""
    if not any(map(str.isdigit, truth)):
        raise BadRow(f"the answer has no '#### <number>': {answer[-60:]!r}")
    return {
        "data_source": "openai/gsm8k",
        "prompt": _user(f"{question} {_GSM8K}"),
        "env_class": "gsm8k",
        "reward_spec": _rule(truth),
        "completion": answer,
        "extra_info": _info(index, split) | {"answer": answer, "question": question},
    }


def math(row: Row, index: int, split: str) -> Row:
    r"""Convert a row of MATH, whose answer is \boxed in its solution.

    Hendrycks et al. 2021, https://arxiv.org/abs/2103.03874.
    """
    problem, solution = _text(row, "problem"), _text(row, "solution")
    answer = last_boxed(solution)
    if not answer:
        raise BadRow(f"the solution has no \\boxed{{..}}: {solution[-60:]!r}")
    about = {name: row.get(name) for name in ("level", "type")}
    return {
        "data_source": "DigitalLearningGmbH/MATH-lighteval",
        "prompt": _user(f"{problem} {_MATH}"),
        "env_class": "math",
        "reward_spec": _rule(answer),
        "completion": solution,
        "extra_info": _info(index, split) | about | {"question": problem},
    }


def dapo(row: Row, index: int, split: str) -> Row:
    """Convert a row of DAPO's data, which is in verl's columns, prompt and all.

    Yu et al. 2025, https://arxiv.org/abs/2503.14476.
    """
    return {
        "data_source": _text(row, "data_source"),
        "prompt": messages_of(row.get("prompt"), "prompt"),
        "ability": row.get("ability"),
        "env_class": "aime",
        "reward_model": {"style": "rule", "ground_truth": _given_truth(row)},
        "extra_info": _info(index, split),
    }


def aime(row: Row, index: int, split: str) -> Row | None:
    """Convert a row of the American Invitational Mathematics Examination; None for the other split.

    Its columns are `Question`, `Answer` and `Year`.
    """
    question, answer, year = (_text(row, name) for name in ("Question", "Answer", "Year"))
    if not year.isdecimal():
        raise BadRow(f"the Year is not a number: {year!r}")
    if (int(year) >= _LAST_YEAR) != (split == "test"):
        return None
    answer = answer.strip()
    return {
        "data_source": "aime" if split == "train" else f"aime_{year}",
        "prompt": _user(_DAPO.replace("{question}", question)),
        "env_class": "aime",
        "reward_model": {
            "style": "rule",
            "ground_truth": str(int(answer)) if answer.isdecimal() else answer,  # 073
        },
        "extra_info": _info(index, split) | {"year": int(year), "question": question},
    }


def text2sql(row: Row, index: int, split: str) -> Row:
    """Convert a conversation of SkyRL-SQL with its `db_id`; the databases are apart.

    Liu et al. 2025.
    """
    return {
        "data_source": row.get("data_source") or "synsql",
        "prompt": messages_of(row.get("prompt"), "prompt"),
        "env_class": "text2sql",
        "reward_spec": _rule(_given_truth(row)),
        "db_id": _text(row, "db_id"),
        "data": row.get("data"),
        "extra_info": _info(index, split),
    }


def searchr1(row: Row, index: int, split: str) -> Row:
    """Convert a question of NQ or HotpotQA, as Search-R1 asks it.

    Jin et al. 2025, https://arxiv.org/abs/2503.09516.

    The retrieved documents in `metadata`, nearly all of a file, are left out.
    """
    question = _text(row, "question")
    answers = row.get("golden_answers")
    texts = isinstance(answers, list) and all(isinstance(text, str) and text for text in answers)
    if not texts or not answers:
        raise BadRow(f"golden_answers is not a list of answers but {answers!r:.200}")
    return {
        "data_source": f"searchR1_{row.get('data_source') or ''}",
        "prompt": [{"role": "system", "content": _ASSISTANT}, *_user(_SEARCH_R1 + question)],
        "ability": row.get("ability"),
        "env_class": "search",
        "reward_spec": {"method": "rule", "ground_truth": {"target": answers}},
        "extra_info": _info(index, split) | {"question": question},
    }


def last_boxed(text: str) -> str | None:
    r"""Return what is in the last \boxed{..}, \fbox{..} or "\boxed 5" of a LaTeX text, or None."""
    found = list(_MATH_ANSWER.finditer(text))
    if not found:
        return None
    if found[-1]["plain"]:
        return found[-1]["plain"]
    start, depth = found[-1].end(), 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return text[start:end].strip()
    return None  # its bracket is never closed


_AIME = Split("di-zhang-fdu/AIME_1983_2024", ("AIME_Dataset_1983_2024.csv", "*.csv"))
_SQL, _SEARCH = "NovaSky-AI/SkyRL-SQL-653-data-newfmt", "PeterJinGo/nq_hotpotqa_train"
BENCHMARKS: Mapping[str, Benchmark] = {
    "gsm8k": Benchmark(
        Split("openai/gsm8k", ("main/train-*.parquet", "train-*.parquet", "train.jsonl")),
        Split("openai/gsm8k", ("main/test-*.parquet", "test-*.parquet", "test.jsonl")),
        gsm8k,
    ),
    "math": Benchmark(
        Split(
            "DigitalLearningGmbH/MATH-lighteval",
            ("data/train-*.parquet", "default/train-*.parquet", "*/train-*.parquet", "train.jsonl"),
        ),
        Split(
            "DigitalLearningGmbH/MATH-lighteval",
            ("data/test-*.parquet", "default/test-*.parquet", "*/test-*.parquet", "test.jsonl"),
        ),
        math,
    ),
    "dapo": Benchmark(
        Split(
            "BytedTsinghua-SIA/DAPO-Math-17k",
            ("data/dapo-math-17k.parquet", "dapo-math-17k.parquet"),
        ),
        Split("BytedTsinghua-SIA/AIME-2024", ("data/aime-2024.parquet", "aime-2024.parquet")),
        dapo,
        distinct=True,
    ),
    "aime": Benchmark(_AIME, _AIME, aime),
    "text2sql": Benchmark(
        Split(_SQL, ("train.parquet", "data/train-*.parquet")),
        Split(_SQL, ("validation.parquet", "data/validation-*.parquet")),
        text2sql,
    ),
    "searchr1": Benchmark(
        Split(_SEARCH, ("train.parquet", "data/train-*.parquet")),
        Split(_SEARCH, ("test.parquet", "data/test-*.parquet")),
        searchr1,
    ),
}


def _text(row: Row, column: str) -> str:
    """Return a column as text.

    Raises:
        BadRow: it is not there, or empty, or neither a text nor a whole number.
    """
    if row.get(column) is None or row[column] == "":
        raise BadRow(f"no {column!r}; the columns are {sorted(map(str, row))}")
    return _as_text(row[column], column)


def _given_truth(row: Row) -> str:
    """Return the answer of a row that is in SkyRL's or verl's columns."""
    for column in ("reward_spec", "reward_model"):
        found = row.get(column)
        if isinstance(found, Mapping) and found.get("ground_truth") not in (None, ""):
            return _as_text(found["ground_truth"], f"{column}['ground_truth']")
    raise BadRow(
        "no ground_truth in 'reward_spec' or 'reward_model'; the columns are "
        f"{sorted(map(str, row))}"
    )


def _as_text(value: Any, name: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadRow(f"{name} is neither a text nor a whole number but {value!r:.200}")
    return str(value)


def _user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def _rule(answer: str) -> Row:
    return {"method": "rule", "ground_truth": answer}


def _info(index: int, split: str) -> Row:
    return {"split": split, "index": index}
