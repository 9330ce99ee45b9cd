"""Questions to SQLite databases: the protocol, the rewards, and SQL that means harm."""

import hashlib
import sqlite3
import subprocess
import sys

import pytest

from jaxrl import envs
from jaxrl.config.dataclass_config import get_config_as_dict
from jaxrl.config.environment import SkyRLGymConfig
from jaxrl.envs.tasks.sqlite_query import QueryResult, query
from jaxrl.envs.tasks.text2sql import find_solution

ROWS = [("Ada", 36, 1.5, b"\x00"), ("Bob", 25, None, b"x"), ("Cem", 25, -0.0, None)]


@pytest.fixture(scope="module")
def databases(tmp_path_factory):
    """Folder of the databases `shop` and, under SkyRL's layout, spider's `shop`."""
    folder = tmp_path_factory.mktemp("databases")
    for file in (folder / "shop/shop.sqlite", folder / "spider/database/shop/shop.sqlite"):
        file.parent.mkdir(parents=True)
        connection = sqlite3.connect(file)
        connection.execute("CREATE TABLE people (name TEXT PRIMARY KEY, age INT, x REAL, y BLOB)")
        connection.executemany("INSERT INTO people VALUES (?, ?, ?, ?)", ROWS)
        connection.commit()
        connection.close()
    return folder


@pytest.fixture
def ask(databases):
    file = databases / "shop/shop.sqlite"
    before = hashlib.sha256(file.read_bytes()).hexdigest()
    yield lambda sql, seconds=20.0, max_rows=1000: query(file, sql, seconds, max_rows)
    assert hashlib.sha256(file.read_bytes()).hexdigest() == before
    assert [path.name for path in file.parent.iterdir()] == ["shop.sqlite"]


# ---- queries -------------------------------------------------------------------------------------


TERMINAL = """
import os, signal, sys, threading
from pathlib import Path
from jaxrl.envs.tasks.sqlite_query import query
signal.signal(signal.SIGINT, lambda *_: None)
threading.Timer(0.3, os.killpg, (0, signal.SIGINT)).start()
count = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 4000000)"
print(query(Path(sys.argv[1]), f"{count} SELECT MAX(i) FROM n", 60.0, 1).rows)
"""


def test_ctrl_c_at_a_terminal_is_the_runs_alone(databases):
    """It goes to a whole group of processes, and the run finishes the step that it is doing."""
    command = [sys.executable, "-c", TERMINAL, str(databases / "shop/shop.sqlite")]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, start_new_session=True
    )
    assert done.stdout == "((4000000,),)\n", done.stderr


def test_rows_come_back_as_they_are(ask):
    answer = ask("SELECT * FROM people ORDER BY name")
    assert answer == QueryResult(("name", "age", "x", "y"), tuple(ROWS))
    assert str(ask("SELECT age, COUNT(*) FROM people GROUP BY age")) == (
        "age | COUNT(*)\n25 | 2\n36 | 1"
    )
    assert ask("SELECT 9e999, -9223372036854775808").rows == ((float("inf"), -(2**63)),)


def test_rows_are_compared_as_sets(ask):
    ages = ask("SELECT age FROM people")
    assert ages.same_rows(ask("SELECT DISTINCT age FROM people ORDER BY age DESC"))
    assert ages.same_rows(ask("SELECT age + 0.0 FROM people"))  # 25 == 25.0
    assert not ages.same_rows(ask("SELECT age FROM people WHERE age > 30"))
    assert not ages.same_rows(ask("SELECT CAST(age AS TEXT) FROM people"))
    failed = ask("SELECT nothing")
    assert not failed.same_rows(failed)


@pytest.mark.parametrize(
    "sql",
    [
        "WITH t(x) AS (VALUES (1), (2)) SELECT sum(x) FROM t",
        "EXPLAIN QUERY PLAN SELECT * FROM people",
        "PRAGMA table_info(people)",
        "SELECT name FROM pragma_table_info('people')",
        "SELECT sql FROM sqlite_master",
        "SELECT value FROM json_each('[1]')",
        "SELECT json_extract('[1]', '$[0]'), upper('x'), date('2020-01-01')",
    ],
)
def test_reading_is_allowed(ask, sql):
    answer = ask(sql)
    assert answer.error == ""
    assert answer.rows


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO people VALUES ('Eve', 1, 1, NULL)",
        "UPDATE people SET age = 0",
        "UPDATE sqlite_master SET sql = ''",
        "DELETE FROM people",
        "DROP TABLE people",
        "CREATE TABLE t (x)",
        "CREATE TEMP TABLE t (x)",
        "CREATE TEMP VIEW v AS SELECT 1",
        "ATTACH DATABASE '/tmp/stolen.sqlite' AS other",
        "ATTACH DATABASE ':memory:' AS other",
        "DETACH DATABASE main",
        "VACUUM INTO '/tmp/stolen.sqlite'",
        "VACUUM",
        "REINDEX",
        "ANALYZE",
        "BEGIN IMMEDIATE",
        "COMMIT",
        "SAVEPOINT s",
        "PRAGMA writable_schema = ON",
        "PRAGMA journal_mode = WAL",
        "PRAGMA temp_store_directory = '/tmp'",
        "PRAGMA database_list",
        "SELECT load_extension('/tmp/x.so')",
        "SELECT writefile('/tmp/x', 'y')",
        "SELECT readfile('/etc/passwd')",
        "SELECT edit('x')",
        "CREATE VIRTUAL TABLE t USING fts5(x)",
        "SELECT 1; DROP TABLE people",
        "",
        "SELECT '\x00'",
        "nonsense",
    ],
)
def test_everything_else_is_refused(ask, sql):
    answer = ask(sql)
    assert answer.error or not answer.columns
    assert answer.rows == ()


ENDLESS = "WITH RECURSIVE t(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM t) "


@pytest.mark.parametrize(
    ("sql", "error"),
    [
        (ENDLESS + "SELECT count(*) FROM t", "no answer within 0.5 s"),
        # One call in C that looks at no clock: 10^6 x 10^6 comparisons.
        (
            "SELECT instr(zeroblob(5000000), zeroblob(2500000) || x'01')",
            "no answer within 0.5 s",
        ),
        (ENDLESS + "SELECT x FROM t", "more than 1000 rows"),
        (
            ENDLESS + "SELECT zeroblob(5000000) FROM t",
            "more than 10000000 bytes of rows",
        ),
        ("SELECT zeroblob(1000000000)", "string or blob too big"),
    ],
)
def test_without_end_or_without_measure(ask, sql, error):
    assert ask(sql, seconds=0.5 if "no answer" in error else 20.0).error == error


def test_memory_is_bounded(ask):
    """All rows must be kept before the first can be returned."""
    sql = ENDLESS + "SELECT x, zeroblob(9000000) AS y FROM t ORDER BY y LIMIT 200"
    assert (
        ask(
            "SELECT group_concat(z, '') FROM (SELECT printf('%.*c', 9000000, 'x') AS z FROM people)"
        ).error
        == "string or blob too big"
    )
    assert ask(sql, seconds=1.0).error in ("the query took too much memory", "no answer within 1 s")


def test_a_shown_result_is_cut(ask):
    numbers = ENDLESS + "SELECT x FROM t LIMIT 60"
    shown = str(ask(numbers)).splitlines()
    assert shown == ["x", *map(str, range(1, 51)), "... (cut: 60 rows in all)"]
    assert len(str(ask("SELECT printf('%.*c', 20000, 'x')"))) < 9100


# ---- the protocol --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "solution"),
    [
        ("<think>a</think><solution> SELECT 1 </solution>", "SELECT 1"),
        ("<solution>SELECT 1</solution><think>late</think>", "SELECT 1"),
        ("<solution>SELECT 1</solution>", None),  # no thought
        ("<think>a</think><solution>1</solution><solution>2</solution>", None),
        ("<think>a</think><solution>1</solution></solution>", None),
        ("<think>a</think></solution><solution>1</solution>", "1"),
        ("<think>a</think><solution>1", None),
        ("<think>a</think>", None),
        ("<think>a</think><solution><sql>1</sql></solution>", None),
        ("<think>a</think><solution><THINK>1</solution>", None),
        ("<think>a</think><solution>a < b and thinking</solution>", "a < b and thinking"),
        ("<think>a</think><observation></observation> <think>b</think><solution>1</solution>", "1"),
        ("<think>a</think><observation></observation>b<solution>1</solution>", None),
        ("<think>a</think></Observation>b<solution>1</solution>", None),
        ("<think>a</think><solution>1</solution></observation>b", "1"),
    ],
)
def test_find_solution(said, solution):
    assert find_solution(said) == solution


def make(databases, gold="SELECT name FROM people WHERE age = 25", **extras):
    spec = {"reward_spec": {"ground_truth": gold}, "db_id": "shop", **extras}
    gym = SkyRLGymConfig()
    gym.text2sql.db_path, gym.text2sql.max_rows = str(databases), 100
    gym.text2sql.query_seconds = 20.0
    return envs.make("text2sql", spec, get_config_as_dict(gym))


def test_a_conversation(databases):
    env = make(databases, data="spider")
    step = env.step("<think>look</think><sql>SELECT age FROM people WHERE name = 'Bob'</sql>")
    assert step == {
        "observations": [
            {
                "role": "user",
                "content": "\n\n<observation>age\n25\n<reminder>4 turns left.</reminder>"
                "</observation>\n\n",
            }
        ],
        "reward": 0.0,
        "done": False,
        "metadata": {},
    }
    assert (
        "Error: no such column"
        in env.step("<think>.</think><sql>SELECT z FROM people</sql>")["observations"][0]["content"]
    )
    assert "No <sql>" in env.step("<think>hm</think>")["observations"][0]["content"]
    solution = "<solution>SELECT name FROM people WHERE age < 30 ORDER BY 1 DESC</solution>"
    step = env.step(f"<think>done</think>{solution}")
    assert (step["reward"], step["done"], step["metadata"]) == (1.0, True, {"reason": "ok"})
    assert env.get_metrics() == {"correct": 1, "well_formed": 1, "queries": 2, "query_errors": 1}


@pytest.mark.parametrize(
    ("response", "reward", "reason"),
    [
        ("<think>.</think><solution>SELECT name FROM people</solution>", 0.0, "other rows"),
        ("<think>.</think><solution>DROP TABLE people</solution>", 0.0, "not authorized"),
        ("<solution>SELECT name FROM people WHERE age = 25</solution>", -1.0, "format"),
    ],
)
def test_rewards(databases, response, reward, reason):
    step = make(databases).step(response)
    assert (step["reward"], step["metadata"]["reason"], step["done"]) == (reward, reason, True)


def test_the_limits_of_the_config_hold(databases):
    env = make(databases)
    step = env.step(f"<think>.</think><sql>{ENDLESS} SELECT x FROM t LIMIT 101</sql>")
    assert "Error: more than 100 rows" in step["observations"][0]["content"]


def test_tags_in_a_database_change_nothing(databases):
    env = make(databases)
    env.step("<think>.</think><sql>SELECT '<' || 'solution>x</' || 'solution>'</sql>")
    response = "<think>.</think><solution>SELECT name FROM people WHERE age = 25</solution>"
    assert env.step(response)["reward"] == 1.0


def test_no_turn_left_is_a_wrong_format(databases):
    env = make(databases, max_turns=1)
    step = env.step("<think>.</think><sql>SELECT 1</sql>")
    assert (step["reward"], step["done"]) == (-1.0, True)


def test_a_right_query_that_fails_is_named(databases):
    env = make(databases, gold="SELECT nowhere FROM people")
    step = env.step("<think>.</think><solution>SELECT nothing</solution>")
    assert step["reward"] == 0.0
    assert step["metadata"]["reason"] == "the right query fails: no such column: nowhere"


@pytest.mark.parametrize(
    ("extras", "problem"),
    [
        ({"db_id": "market"}, r"no database .*market/market\.sqlite; set environment\.skyrl_gym"),
        ({"db_id": "../shop"}, "needs a column db_id, the name of a database; it is '../shop'"),
        ({"db_id": None}, "needs a column db_id, the name of a database; it is None"),
        ({"data": "wiki"}, "data must be one of synsql, spider, bird or absent, got 'wiki'"),
    ],
)
def test_bad_rows(databases, extras, problem):
    with pytest.raises(ValueError, match=problem):
        make(databases, **extras)
