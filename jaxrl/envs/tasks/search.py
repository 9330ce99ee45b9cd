"""Questions with a search engine as a tool, in the protocol of Search-R1.

Jin et al. 2025, https://arxiv.org/abs/2503.09516.
"""

import logging
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.envs.json_request import RequestError
from jaxrl.envs.protocol import Env, StepOutput
from jaxrl.envs.retrieval.retriever import Hit, Retriever, retriever_of
from jaxrl.envs.tags import first_tagged, last_tagged
from jaxrl.envs.tools import ToolGroup, tool

_log = logging.getLogger(__name__)
_MAX_TURNS = 2
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class SearchToolGroup(ToolGroup):
    """Offer the tool `search`.

    Args:
        retriever: what is asked.
        topk: passages for a query.
    """

    def __init__(self, retriever: Retriever, topk: int) -> None:
        super().__init__("search")
        self.retriever, self.topk = retriever, topk

    @tool
    def search(self, query: str) -> list[Hit]:
        """Return the best passages.

        Raises:
            RequestError: the retriever does not answer.
        """
        return self.retriever.search(query, self.topk)


class SearchEnv(Env):
    """Give reward 1 in the turn with the right `<answer>..</answer>`, 0 otherwise.

    `<search>..</search>` asks for passages; the next message has them in
    `<information>..</information>`. What a response says after its first `</search>` is cut, unless
    it answers: it would be made up. The conversation ends with an answer, or after `max_turns`
    turns (a column of the row, or `generator.max_turns`). The last answer of that turn is right if
    it equals one of the right ones but for case, punctuation, articles and blanks.

    A retriever that does not answer costs the turn, not the conversation: the message says so, the
    metric `search_errors` counts it, and the log has the reason.

    Columns: `reward_spec["ground_truth"]`, the right answers as `{"target": [..]}`, a list, or a
    text. Settings: `env_config["search"]`.

    Raises:
        ValueError: the row has no right answer, or there is no such corpus.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(env_config, extras)
        self.targets = [normalize_answer(target) for target in _read_targets(self.extras)]
        self.max_turns = int(self.extras.get("max_turns", _MAX_TURNS))
        settings = self.env_config.get("search", {})
        self.retriever = retriever_of(settings)
        self.init_tool_groups([SearchToolGroup(self.retriever, settings.get("topk", 3))])
        self._metrics = {"correct": 0.0, "answered": 0.0, "searches": 0, "search_errors": 0}

    def ready(self) -> None:
        """Search once.

        Raises:
            RequestError: the retriever does not answer.
        """
        self.retriever.search("Where is Paris?", 1)

    def step(self, action: str) -> StepOutput:
        """Compare the answer, or search."""
        self.turns += 1
        if self.turns >= self.max_turns or ("<answer>" in action and "</answer>" in action):
            answer = last_tagged(action, "answer")
            answered = answer is not None
            correct = float(answered and normalize_answer(answer) in self.targets)
            self._metrics |= {"correct": correct, "answered": float(answered)}
            metadata = {"answer": answer.strip() if answered else None}
            return StepOutput(observations=[], reward=correct, done=True, metadata=metadata)
        called = first_tagged(action, "search")
        query = called.content.strip() if called else ""
        if not query:
            information = (
                "Nothing to search for: write <search>query</search> or <answer>answer</answer>."
            )
        else:
            information = self._search(query)
        content = f"\n<information>{information}</information>\n"
        return StepOutput(
            observations=[{"role": "user", "content": content}],
            reward=0.0,
            done=False,
            metadata={"query": query},
            postprocessed_action=action[: called.end] if called else action,
        )

    def _search(self, query: str) -> str:
        self._metrics["searches"] += 1
        try:
            hits = self._execute_tool(self.tool_to_toolgroup["search"], "search", [query])
        except RequestError as error:
            self._metrics["search_errors"] += 1
            _log.warning("the search for %.300r failed: %s", query, error)
            return "The search failed: the search engine does not answer."
        found = [f"Doc {i}: {hit.passage.contents.strip()}\n" for i, hit in enumerate(hits, 1)]
        return "".join(found) or "No results."

    def get_metrics(self) -> dict[str, Any]:
        """Return `correct`, `answered`, `searches` that were made, `search_errors` among them."""
        return self._metrics


def normalize_answer(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and needless blanks.

    As of SQuAD: Rajpurkar et al. 2016, https://arxiv.org/abs/1606.05250, section 6.1.
    """
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def _read_targets(extras: Mapping[str, Any]) -> Sequence[str]:
    reward_spec = extras.get("reward_spec")
    ground_truth = reward_spec.get("ground_truth") if isinstance(reward_spec, Mapping) else None
    targets = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    targets = [targets] if isinstance(targets, str) else targets
    if (
        not isinstance(targets, list | tuple)
        or not targets
        or not all(isinstance(target, str) for target in targets)
    ):
        raise ValueError(
            "environment 'search' needs a column reward_spec = {'ground_truth': {'target': "
            f"[answer, ..]}}}}, with texts; reward_spec is {reward_spec!r} and the row's other "
            f"columns are {sorted(set(extras) - {'reward_spec'})}"
        )
    return targets
