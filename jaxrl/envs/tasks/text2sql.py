"""Text to SQL: a model queries a database, sees what comes back, and hands in one query.

The protocol of SkyRL-SQL: Liu et al. 2025, https://novasky-ai.notion.site/skyrl-sql.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.envs.protocol import Env, StepOutput, read_ground_truth
from jaxrl.envs.tags import first_tagged
from jaxrl.envs.tasks.sqlite_query import QueryResult, query
from jaxrl.envs.tools import ToolGroup, tool

_MAX_TURNS = 5
_FOLDERS = {  # data -> folder of its databases, as SkyRL's downloads have them
    "synsql": "SynSQL-2.5M/databases",
    "spider": "spider/database",
    "bird": "bird/train/train_databases",
}
_OTHER_TAG = re.compile(r"</?(think|sql|observation)\b", re.IGNORECASE)
_OBSERVED = "<observation></observation>"


class SQLToolGroup(ToolGroup):
    """Offer the tool `sql`: run one statement that only reads.

    Args:
        db_file: a SQLite database that nobody writes to.
        query_seconds: until a statement is stopped.
        max_rows: of a result.
    """

    def __init__(self, db_file: Path, query_seconds: float, max_rows: int) -> None:
        super().__init__("sql")
        self.db_file, self.query_seconds, self.max_rows = db_file, query_seconds, max_rows

    @tool
    def sql(self, statement: str) -> QueryResult:
        """Return the rows, or why there are none."""
        return query(self.db_file, statement, self.query_seconds, self.max_rows)


class Text2SQLEnv(Env):
    """Rewards the last turn: 1 for the right rows, 0 for others, -1 for a wrong format.

    `<sql>..</sql>` runs a query, and the next message shows its result. `<solution>..</solution>`
    hands in the query that counts: its rows are compared, as a set, with those of
    `reward_spec["ground_truth"]`. The format: exactly one solution, no other tag in it, a
    `<think>..</think>`, and one first thing after every observation. The conversation ends with a
    solution, or after `max_turns` turns (a column of the row, or `generator.max_turns`).

    Columns: `db_id`, and `data`: "synsql", "spider" or "bird"; without it the database is
    `<db_path>/<db_id>/<db_id>.sqlite`. Settings: `env_config["text2sql"]`.

    Raises:
        ValueError: a column is missing, or there is no such database.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(env_config, extras)
        self.ground_truth = read_ground_truth(self.extras, "text2sql")
        self.max_turns = int(self.extras.get("max_turns", _MAX_TURNS))
        settings = self.env_config.get("text2sql", {})
        self.db_file = _find_database(settings.get("db_path", "."), self.extras)
        self.solution_seconds = settings.get("solution_seconds", 30.0)
        self.max_rows = settings.get("max_rows", 100_000)
        seconds = settings.get("query_seconds", 5.0)
        self.init_tool_groups([SQLToolGroup(self.db_file, seconds, self.max_rows)])
        self._said = ""  # everything, with the observations left empty
        self._metrics = {"correct": 0.0, "well_formed": 0.0, "queries": 0, "query_errors": 0}

    def step(self, action: str) -> StepOutput:
        """Run a query, or judge the solution."""
        self.turns += 1
        self._said += action
        if ("<solution>" in action and "</solution>" in action) or self.turns >= self.max_turns:
            reward, reason = self._judge()
            self._metrics |= {"correct": float(reward == 1), "well_formed": float(reward >= 0)}
            metadata = {"reason": reason}
            return StepOutput(observations=[], reward=reward, done=True, metadata=metadata)
        called = first_tagged(action, "sql")
        if called is None:
            observation = (
                "No <sql>..</sql> in this turn. Think in <think>..</think>, then write a query."
            )
        else:
            answer = self._execute_tool(self.tool_to_toolgroup["sql"], "sql", [called.content])
            self._metrics["queries"] += 1
            self._metrics["query_errors"] += bool(answer.error)
            observation = str(answer)
        self._said += _OBSERVED
        left = f"<reminder>{self.max_turns - self.turns} turns left.</reminder>"
        content = f"\n\n<observation>{observation}\n{left}</observation>\n\n"
        return StepOutput(
            observations=[{"role": "user", "content": content}],
            reward=0.0,
            done=False,
            metadata={},
        )

    def get_metrics(self) -> dict[str, Any]:
        """Return `correct`, `well_formed`, `queries` that were run, `query_errors` among them."""
        return self._metrics

    def _judge(self) -> tuple[float, str]:
        solution = find_solution(self._said)
        if solution is None:
            return -1.0, "format"
        answered, right = (
            query(self.db_file, sql, self.solution_seconds, self.max_rows)
            for sql in (solution, self.ground_truth)
        )
        if right.error:
            return 0.0, f"the right query fails: {right.error}"
        if answered.error:
            return 0.0, answered.error
        same = answered.same_rows(right)
        return float(same), "ok" if same else "other rows"


def find_solution(text: str) -> str | None:
    """Return the query of a whole conversation, or None where its format is wrong."""
    before, tag, after = text.partition("<solution>")
    solution = after.partition("</solution>")[0]
    if not tag or "<solution>" in after or after.count("</solution>") != 1:
        return None
    if _OTHER_TAG.search(solution) or first_tagged(text, "think") is None:
        return None
    turns = re.split("</observation>", before, flags=re.IGNORECASE)[1:]
    if not all(turn.lstrip().lower().startswith("<think>") for turn in turns):
        return None
    return solution.strip()


def _find_database(db_path: str, extras: Mapping[str, Any]) -> Path:
    db_id, data = extras.get("db_id"), extras.get("data")
    if not isinstance(db_id, str) or not db_id or Path(db_id).name != db_id:
        raise ValueError(
            f"environment 'text2sql' needs a column db_id, the name of a database; it is {db_id!r}"
        )
    if data is not None and data not in _FOLDERS:
        raise ValueError(
            f"environment 'text2sql': column data must be one of {', '.join(_FOLDERS)} or absent, "
            f"got {data!r}"
        )
    file = Path(db_path).absolute() / _FOLDERS.get(data or "", "") / db_id / f"{db_id}.sqlite"
    if not file.is_file():
        raise ValueError(
            f"environment 'text2sql': there is no database {file}; set "
            "environment.skyrl_gym.text2sql.db_path to the folder of the databases"
        )
    return file
