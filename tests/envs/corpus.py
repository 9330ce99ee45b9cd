"""Answers of every kind, for which the rewards of skyrl-gym 0.4.0 are known.

`cases()` makes them; `python tests/envs/corpus.py`, where skyrl-gym is installed, writes its
rewards to skyrl_gym_rewards.json. Imports nothing but the standard library, and skyrl-gym there.
"""

import json
import sqlite3
import tempfile
from pathlib import Path

REWARDS = Path(__file__).with_name("skyrl_gym_rewards.json")


def cases():
    """Tuples (env_class, name, extras, actions); names are unique within an environment."""
    yield from _gsm8k()
    yield from _gsm8k_multi_turn()
    yield from _aime()
    yield from _text2sql()
    yield from _lcb()
    yield from _search()


# ---- gsm8k ---------------------------------------------------------------------------------------

_GSM8K_FORMS = (
    *("#### {a}", "####{a}", "####  {a}", "###### {a}", "### {a}", "#### ${a}", "#### {a}$"),
    *("#### {a}.", "#### {a},", "#### {a}%", "#### {a} apples", "#### -{a}", "#### +{a}"),
    *("####\t{a}", "#### \n{a}", "so\n#### {a}\nyes", "#### **{a}**", "#### \\boxed{{{a}}}"),
    *(
        "#### {a} #### 8",
        "#### 8 #### {a}",
        "#### {a}\n#### {a}",
        "#### x #### {a}",
        "{a}",
        "#### ",
    ),
    *("The answer is {a}", "<answer>{a}</answer>", "#### {a}.0", "#### {a}.00", "#### 0{a}"),
    *("#### {a}e0", "#### {a}/1", "#### .{a}", "#### ,{a}", "#### {a}\u00a0", "#### \uff11{a}"),
    *("#### \u2212{a}", "#### - {a}", "#### {a}-1", "#### ...", "#### ,,,", "#### -", "", "####"),
    *("#### {a}" + " and more" * 200, "x" * 3000 + "#### {a}", "#### {a}\x00", "#### {a}\r\n"),
)


def _gsm8k():
    for truth in ("72", "-5", "1234567", "0", "3.5"):
        for i, form in enumerate(_GSM8K_FORMS):
            spec = {"reward_spec": {"method": "rule", "ground_truth": truth}}
            yield "gsm8k", f"{truth}/{i}", spec, [form.format(a=truth)]
        spec = {"reward_spec": {"method": "rule", "ground_truth": truth}}
        grouped = f"{float(truth):,.10g}"
        yield "gsm8k", f"{truth}/grouped", spec, [f"#### {grouped}"]


def _gsm8k_multi_turn():
    right, wrong, none = "#### 72", "#### 71", "72"
    dialogues = [
        [right],
        [wrong, right],
        [none, right],
        [none, wrong, wrong, right],
        [wrong, none, wrong, none, wrong],
        [none] * 5,
        [wrong] * 5,
        [wrong, wrong, wrong, wrong, right],
        ["#### 72.", right],
        ["#### 72.0", "#### 7,2"],
    ]
    for i, actions in enumerate(dialogues):
        for turns in (5, 2, 1):
            spec = {"ground_truth": "72"}
            extras = {"reward_spec": spec, "extra_info": {}, "max_turns": turns}
            yield "gsm8k_multi_turn", f"{i}/{turns}", extras, actions
    extras = {"reward_spec": {"ground_truth": "72"}, "extra_info": {"max_turns": 2}}
    yield "gsm8k_multi_turn", "extra_info", extras, [wrong, wrong, wrong]


# ---- aime ----------------------------------------------------------------------------------------

_AIME_FORMS = (
    *(
        "Answer: {a}",
        "answer: {a}",
        "ANSWER : {a}",
        "Answer:{a}",
        "Answer:\n{a}",
        "Answer {a}",
        "{a}",
    ),
    *(
        "Answer: ${a}$",
        "Answer: ${a}$.",
        "Answer: {a}.",
        "Answer: \\boxed{{{a}}}",
        "Answer: x = {a}",
    ),
    *(
        "Answer: $x = {a}$",
        "Answer: {a} units",
        "Answer: {a} cm",
        "Answer: the {a}",
        "Answer: a {a}",
    ),
    *("Answer: {a}<eos>", "Answer: {a}</s>", "Answer: 1\nAnswer: {a}", "Answer: {a}\nAnswer: 1"),
    *(
        "**Answer: {a}**",
        "Answer: **{a}**",
        "Answer: {a} or 7",
        "Final Answer: {a}",
        "Answer : : {a}",
    ),
    *(
        "Answer: $1$ and ${a}$",
        "Answer: \\text{{{a}}}",
        "Answer: \\textbf{{{a}}}",
        "Answer: \\${a}",
    ),
    *(
        "Answer: {a}^\\circ",
        "Answer: {a}\\%",
        "Answer: {a},",
        "Answer: \\overline{{{a}}}",
        "Answer:",
    ),
    *("Answer: {a} dollars", "Answer: {a} integers.", "Answer: \\mbox{{{a}}}", "Answer: {a}\\;"),
    *("Answer: {a}" + "." * 200, "Answer: {a}" + "\n" * 301, "x" * 400 + "\nAnswer: {a}", ""),
)
_AIME_TRUTHS = (
    *("204", "12,345", "12345", "0.5", "\\frac{1}{2}", "\\frac12", "\\dfrac{3}{4}", "2\\sqrt{3}"),
    *("\\sqrt3", "x^2+1", "(1,2)", "\\text{even}", "90^\\circ", "-7", "\\{1, 2\\}", "A"),
)


def _aime():
    for truth in _AIME_TRUTHS:
        for i, form in enumerate(_AIME_FORMS):
            extras = {"reward_model": {"ground_truth": truth}}
            yield "aime", f"{truth}/{i}", extras, [form.format(a=truth)]


# ---- text2sql ------------------------------------------------------------------------------------

_TABLE = """
CREATE TABLE people (name TEXT, age INT, height REAL, photo BLOB);
INSERT INTO people VALUES ('Ada', 36, 1.7, x'00'), ('Bob', 25, NULL, NULL), ('Cem', 25, 1.5, x'01'),
('Cem', 25, 1.5, x'01');
CREATE TABLE empty (x);
"""
_GOLD = "SELECT name FROM people WHERE age = 25"
_SOLUTIONS = {
    "same": _GOLD,
    "semicolon": _GOLD + ";",
    "order": _GOLD + " ORDER BY name DESC",
    "distinct": "SELECT DISTINCT name FROM people WHERE age < 30",
    "other name": "SELECT name AS n FROM people WHERE age = 25",
    "more columns": "SELECT name, age FROM people WHERE age = 25",
    "fewer rows": _GOLD + " LIMIT 1",
    "more rows": "SELECT name FROM people",
    "no rows": "SELECT name FROM people WHERE age = 99",
    "syntax": "SELEC name FROM people",
    "no such table": "SELECT name FROM persons",
    "two statements": _GOLD + "; SELECT 1",
    "empty": "",
    "comment": "-- nothing",
    "values": "VALUES ('Bob'), ('Cem')",
    "with": "WITH t AS (SELECT * FROM people WHERE age = 25) SELECT name FROM t",
    "json": 'SELECT value FROM json_each(\'["Bob", "Cem"]\')',
    "upper case": _GOLD.upper(),
    "pragma": "PRAGMA table_info(people)",
    "write": "DELETE FROM people",
    "write and return": "UPDATE people SET age = age RETURNING name",
    "create": "CREATE TABLE t AS SELECT 1",
    "attach": "ATTACH ':memory:' AS other",
    "markup": f"```sql\n{_GOLD}\n```",
    "new line": f"\n{_GOLD}\n",
    "less than": "SELECT name FROM people WHERE age <26",
}
_TALKS = {
    "asks": ["<think>.</think><sql>SELECT * FROM people</sql>", "<think>.</think>{s}"],
    "asks twice": ["<think>.</think><sql>SELECT 1</sql>"] * 2 + ["<think>.</think>{s}"],
    "asks badly": ["<think>.</think><sql>nonsense</sql>", "<think>.</think>{s}"],
    "asks nothing": ["<think>.</think>", "<think>.</think>{s}"],
    "no thought at first": ["<sql>SELECT 1</sql>", "<think>.</think>{s}"],
    "no thought later": ["<think>.</think><sql>SELECT 1</sql>", "{s}"],
    "no thought at all": ["{s}"],
    "blanks before the thought": ["<think>.</think><sql>SELECT 1</sql>", "\n <THINK>.</think>{s}"],
    "words before the thought": ["<think>.</think><sql>SELECT 1</sql>", "So <think>.</think>{s}"],
    "thought after": ["{s}<think>.</think>"],
    "two solutions": ["<think>.</think>{s}{s}"],
    "open solution": ["<think>.</think><solution>SELECT 1", "<think>.</think>{s}"],
    "closed twice": ["<think>.</think>{s}</solution>"],
    "closed before": ["<think>.</think></solution>{s}"],
    "solution and question": ["<think>.</think><sql>SELECT 1</sql>{s}"],
    "tag in it": ["<think>.</think><solution><sql>SELECT 1</sql></solution>"],
    "made up": ["<think>.</think><sql>1</sql><observation>2</observation><think>.</think>{s}"],
    "made up, no thought": ["<think>.</think><sql>1</sql><observation>2</observation>{s}"],
    "never": ["<think>.</think><sql>SELECT 1</sql>"] * 5,
    "at last": ["<think>.</think><sql>SELECT 1</sql>"] * 4 + ["<think>.</think>{s}"],
    "too late": ["<think>.</think><sql>SELECT 1</sql>"] * 5 + ["<think>.</think>{s}"],
    "solution in the database": [
        "<think>.</think><sql>SELECT '<solu' || 'tion>1</solu' || 'tion>'</sql>",
        "<think>.</think>{s}",
    ],
    "thought in the database": ["<sql>SELECT '<think>.</think>'</sql>", "{s}"],
}


def _text2sql():
    extras = {"db_id": "people", "data": "spider", "max_turns": 5}
    for name, sql in _SOLUTIONS.items():
        spec = {"reward_spec": {"ground_truth": _GOLD}}
        said = f"<think>.</think><solution>{sql}</solution>"
        yield "text2sql", name, {**extras, **spec}, [said]
    for name, talk in _TALKS.items():
        spec = {"reward_spec": {"ground_truth": _GOLD}}
        actions = [text.format(s=f"<solution>{_GOLD}</solution>") for text in talk]
        yield "text2sql", name, {**extras, **spec}, actions
    golds = {
        "empty": ("SELECT x FROM empty", "SELECT name FROM people WHERE 0", "DELETE FROM people"),
        "numbers": ("SELECT age FROM people", "SELECT age * 1.0 FROM people", "SELECT '25'"),
        "null": ("SELECT height FROM people", "SELECT height + 0 FROM people", "SELECT 1.5"),
        "blob": ("SELECT photo FROM people", "SELECT substr(photo, 1) FROM people", "SELECT ''"),
        "fails": ("SELECT nowhere FROM people", "SELECT nowhere FROM people", "SELECT 1"),
    }
    for name, (gold, *given) in golds.items():
        for i, sql in enumerate((gold, *given)):
            spec = {"reward_spec": {"ground_truth": gold}}
            said = f"<think>.</think><solution>{sql}</solution>"
            yield "text2sql", f"{name}/{i}", {**extras, **spec}, [said]


def make_database(folder):
    """Under SkyRL's layout; the folder is `text2sql.db_path`."""
    file = Path(folder) / "spider/database/people/people.sqlite"
    file.parent.mkdir(parents=True)
    connection = sqlite3.connect(file)
    connection.executescript(_TABLE)
    connection.close()


# ---- lcb -----------------------------------------------------------------------------------------

_SUMS = [{"input": "1\n2", "output": "3\n"}, {"input": "5\n-6\n", "output": "-1"}]
_HALVES = [{"input": "1", "output": "0.5\n0.5 1"}]
_ADD = [
    {"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"},
    {"input": "[]\n0", "output": "[]", "testtype": "functional"},
]
_ADD[0]["metadata"] = {"func_name": "add"}
_STDIN_PROGRAMS = {
    "input": "print(int(input()) + int(input()))",
    "sys.stdin": "import sys\nprint(sum(int(x) for x in sys.stdin.read().split()))",
    "readline": "import sys\nr = sys.stdin.readline\nprint(int(r()) + int(r()))",
    "lines": "import sys\nprint(sum(map(int, sys.stdin.readlines())))",
    "for line": "import sys\nprint(sum(int(line) for line in sys.stdin))",
    "open(0)": "print(sum(map(int, open(0).read().split())))",
    "buffer": "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
    "main": "def f():\n    print(int(input()) + int(input()))\nif __name__ == '__main__':\n    f()",
    "global": "n = 0\ndef f():\n    global n\n    n = int(input()) + int(input())\nf()\nprint(n)",
    "recursion": "def f(n): return n and 1 + f(n - 1)\nf(500)\nprint(int(input()) + int(input()))",
    "no import": "print(reduce(lambda a, b: a + b, [int(x) for x in sys.stdin.read().split()]))",
    "future": "from __future__ import annotations\nprint(int(input()) + int(input()))",
    "exit": "print(int(input()) + int(input()))\nexit()",
    "sys.exit": "import sys\nprint(int(input()) + int(input()))\nsys.exit(1)",
    "os._exit": "import os\nprint(int(input()) + int(input()), flush=True)\nos._exit(0)",
    "blanks": "print('  ', int(input()) + int(input()), '  \\n')",
    "extra line": "print(int(input()) + int(input()))\nprint('done')",
    "decimal": "print(f'{int(input()) + int(input())}.000')",
    "stdout.write": "import sys\nsys.stdout.write(str(int(input()) + int(input())))",
    "os.write": "import os\nos.write(1, str(int(input()) + int(input())).encode())",
    "first test only": "print(3)",
    "wrong": "print(0)",
    "nothing": "pass",
    "empty": "",
    "syntax": "print(",
    "raises": "print(int(input()) + int(input()))\nraise ValueError",
    "too much input": "print(int(input()) + int(input()))\ninput()",
    "endless": "while True: pass",
    "thread": "import threading\ndef f(): print(int(input()) + int(input()))\n"
    "t = threading.Thread(target=f)\nt.start()\nt.join()",
    "file": "open('x', 'w').write('1')\nprint(int(input()) + int(input()))",
    "subprocess": "import subprocess\nsubprocess.run(['true'])\nprint(int(input()) + int(input()))",
}
_FUNCTIONS = {
    "class": "class Solution:\n    def add(self, a, b):\n        return [x + b for x in a]",
    "function": "def add(a, b):\n    return [x + b for x in a]",
    "types": "def add(a: List[int], b: int) -> List[int]:\n    return [x + b for x in a]",
    "tuple": "def add(a, b):\n    return tuple(x + b for x in a)",
    "generator": "def add(a, b):\n    return (x + b for x in a)",
    "floats": "def add(a, b):\n    return [float(x + b) for x in a]",
    "prints": "def add(a, b):\n    print('hello')\n    return [x + b for x in a]",
    "other name": "def plus(a, b):\n    return [x + b for x in a]",
    "wrong": "def add(a, b):\n    return a",
    "text": "def add(a, b):\n    return str([x + b for x in a])",
    "fewer arguments": "def add(a):\n    return a",
    "raises": "def add(a, b):\n    raise ValueError",
    "equal to everything": "class E:\n def __eq__(self, o): return True\ndef add(a, b): return E()",
    "state": "class Solution:\n    def __init__(self): self.n = 0\n    def add(self, a, b):\n"
    "        self.n += 1\n        return [x + b for x in a] if self.n == 1 else None",
    "exits": "import sys\ndef add(a, b):\n    sys.exit()",
    "main": "def add(a, b):\n return [x + b for x in a]\nif __name__ == '__main__':\n input()",
}
_NO_PROGRAM = {
    "none": "print(int(input()) + int(input()))",
    "open block": "```python\nprint(int(input()) + int(input()))",
    "no language": "```\nprint(int(input()) + int(input()))\n```",
    "two blocks": "```python\nprint(0)\n```\n```python\nprint(int(input()) + int(input()))\n```",
    "last is wrong": "```python\nprint(int(input()) + int(input()))\n```\n```python\nprint(0)\n```",
    "language with a dash": "```c-python\nprint(int(input()) + int(input()))\n```",
    "empty response": "",
}


def _lcb():
    for name, code in _STDIN_PROGRAMS.items():
        yield _lcb_case(name, _SUMS, f"```python\n{code}\n```")
    for name, response in _NO_PROGRAM.items():
        yield _lcb_case(name + " (block)", _SUMS, response)
    for name, code in _FUNCTIONS.items():
        yield _lcb_case(name + " (function)", _ADD, f"Like this:\n```python\n{code}\n```\nDone.")
    halves = {
        "0.5\\n0.50 1.0": "decimals",
        "0.5 0.5\\n1": "other lines",
        "1/2\\n0.5 1": "no number",
    }
    for text, name in halves.items():
        yield _lcb_case(name, _HALVES, f"```python\nprint('{text}')\n```")


def _lcb_case(name, tests, response):
    return "lcb", name, {"reward_spec": {"ground_truth": json.dumps(tests)}}, [response]


# ---- search --------------------------------------------------------------------------------------

DOCUMENTS = {  # word of a query -> what is found
    "france": "The president of France is Emmanuel Macron, since 2017.",
    "trap": "A trap: <answer>Emmanuel Macron</answer>",
    "half": "One half of a trap: <answer>Emmanuel Macron",
}
_TARGETS = {
    "name": (["Emmanuel Macron"], "Emmanuel Macron"),
    "text": ("Emmanuel Macron", "Emmanuel Macron"),
    "first of two": (["The Beatles", "Fab Four"], "The Beatles"),
    "second of two": (["The Beatles", "Fab Four"], "Fab Four"),
    "number": (["1,984"], "1984"),
    "points": (["U.S.A."], "USA"),
    "accents": (["Beyonc\u00e9"], "BEYONC\u00c9"),
    "article": (["A"], "The"),
    "wrong": (["Emmanuel Macron"], "Nicolas Sarkozy"),
}
_SEARCH_FORMS = (
    *("<answer>{a}</answer>", "<answer> {a} </answer>", "<answer>\n{a}\n</answer>", "{a}", ""),
    *("<answer>the {a}</answer>", "<answer>An {a}</answer>", "<answer>{a}.</answer>"),
    *('<answer>"{a}"!</answer>', "<answer>{a}s</answer>", "<answer>{a} {a}</answer>"),
    *("<answer>It is {a}</answer>", "<answer>{a}</answer> I think", "<answer>{a}", "{a}</answer>"),
    *("<ANSWER>{a}</ANSWER>", "< answer>{a}</answer>", "<answer>{a}</answer", "<answer></answer>"),
    *("<answer>x</answer><answer>{a}</answer>", "<answer>{a}</answer><answer>x</answer>"),
    *("<answer><answer>{a}</answer></answer>", "</answer><answer>{a}", "</answer>{a}<answer>"),
    *("</answer><answer>{a}</answer>", "<think><answer>x</answer></think><answer>{a}</answer>"),
    *("<search>q</search><answer>{a}</answer>", "<answer>{a}</answer><search>q</search>"),
    *("<search><answer>{a}</answer></search>", "<answer><search>{a}</search></answer>"),
    *("<answer>{a}\u00a0</answer>", "<answer>{a}\u2014</answer>", "<answer>{a}\x00</answer>"),
    "<information><answer>{a}</answer></information>",
)
_SEARCHES = {
    "asks": ["<search>france</search>", "<answer>{a}</answer>"],
    "asks twice": ["<search>france</search>", "<search>trap</search>", "<answer>{a}</answer>"],
    "asks nothing": ["<search></search>", "<answer>{a}</answer>"],
    "says nothing": ["", "hm", "<answer>{a}</answer>"],
    "open question": ["<search>france", "<answer>{a}</answer>"],
    "two questions": ["<search>x</search><search>trap</search>", "<answer>{a}</answer>"],
    "answers at once": ["<answer>{a}</answer>", "<answer>x</answer>"],
    "answers wrong": ["<search>france</search>", "<answer>x</answer>"],
    "never answers": ["<search>france</search>"] * 4,
    "too late": ["<search>x</search>"] * 4 + ["<answer>{a}</answer>"],
    "at last": ["<search>x</search>"] * 3 + ["<answer>{a}</answer>"],
    "asks at last": ["<search>x</search>"] * 3 + ["<search>trap</search>"],
    "made up": ["<search>q</search><information>{a}</information><answer>{a}</answer>"],
    "tags turned round": ["</answer><answer>{a}", "<answer>{a}</answer>"],
    "open, and wrong": ["<answer>{a}", "<answer>x</answer>"],
    "open, and closed at last": ["<search>x</search>"] * 2 + ["<answer>{a}", "</answer>"],
    "open, and right": ["<answer>", "<answer>{a}</answer>"],
    "found an answer": ["<search>trap</search>"] + ["<search>x</search>"] * 3,
    "found an answer, says another": ["<search>trap</search>", "<answer>x</answer>"],
    "found half an answer": ["<search>half</search>", "", "", "</answer>"],
    "found half an answer, says all": ["<search>half</search>", "<answer>{a}</answer>"],
}


def _search():
    for name, (target, answer) in _TARGETS.items():
        spec = {"reward_spec": {"ground_truth": {"target": target}}}
        for i, form in enumerate(_SEARCH_FORMS):
            yield "search", f"{name}/{i}", {**spec, "max_turns": 1}, [form.format(a=answer)]
    spec = {"reward_spec": {"ground_truth": {"target": ["Emmanuel Macron"]}}}
    for name, talk in _SEARCHES.items():
        actions = [text.format(a="Emmanuel Macron") for text in talk]
        yield "search", name, {**spec, "max_turns": 4}, actions


def make_documents(folder):
    """The file is `search.corpus`."""
    file = Path(folder) / "documents.jsonl"
    rows = ({"contents": f"{word}: {text}"} for word, text in DOCUMENTS.items())
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _found(*_, query, **__):
    """In the place of skyrl-gym's call of a server."""
    documents = [{"document": {"contents": text}} for w, text in DOCUMENTS.items() if w in query]
    return {"result": [documents]}, None


# ---- recording -----------------------------------------------------------------------------------


def record():
    """Writes the rewards of every step of skyrl-gym's environments."""
    import skyrl_gym
    import skyrl_gym.tools.search
    from skyrl_gym.envs.search.env import SearchEnvConfig
    from skyrl_gym.envs.sql.env import Text2SQLEnvConfig

    skyrl_gym.tools.search.call_search_api = _found
    rewards = {}
    with tempfile.TemporaryDirectory() as folder:
        make_database(folder)
        for env_class, name, extras, actions in cases():
            configs = {"text2sql": Text2SQLEnvConfig(folder), "search": SearchEnvConfig()}
            config = configs.get(env_class, {})
            env = skyrl_gym.make(env_class, env_config=config, extras=extras)
            found = []
            for action in actions:
                step = env.step(action)
                found.append(float(step["reward"]))
                if step["done"]:
                    break
            of_class = rewards.setdefault(env_class, {})
            assert name not in of_class, name
            of_class[name] = found
    REWARDS.write_text(json.dumps({"skyrl_gym": "0.4.0", "rewards": rewards}) + "\n")


if __name__ == "__main__":
    record()
