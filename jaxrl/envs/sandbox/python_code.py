"""Python as a tool: a model runs code in a sandbox, sees what it prints, and answers."""

from collections.abc import Mapping
from typing import Any

from jaxrl.envs.answers import same_answer
from jaxrl.envs.protocol import Env, StepOutput, read_ground_truth
from jaxrl.envs.sandbox import sandbox
from jaxrl.envs.tags import first_tagged
from jaxrl.envs.tools import ToolGroup, tool

_MAX_TURNS = 5
_MAX_CHARACTERS = 4000
# What comes first counts: code that is written counts before an answer that was guessed for it.


class PythonToolGroup(ToolGroup):
    """Offer the tool `python`: run a program in a sandbox.

    Args:
        limits: what one program may use.
    """

    def __init__(self, limits: sandbox.Limits) -> None:
        super().__init__("python")
        self.limits = limits
        self.last: sandbox.Result | None = None

    @tool
    def python(self, code: str) -> str:
        """Return the program's output, shortened in the middle; what went wrong, if anything."""
        self.last = result = sandbox.run(code, limits=self.limits)
        printed = _shorten(result.stdout.strip())
        if result.ok:
            return printed or "(no output)"
        # An exception explains itself in the last lines.
        wrong = _shorten(result.stderr.strip()) if result.reason == "error" else ""
        ended = {
            "timeout": f"no end within {self.limits.seconds:g} s, or "
            f"{self.limits.cpu_seconds:g} s of CPU",
            "memory": f"more than {self.limits.memory_mb} MB of memory",
            "output": "too much output",
            "killed": f"ended by signal {-result.exit_code}",
        }.get(result.reason, f"exit code {result.exit_code}")
        return "\n".join(part for part in (printed, wrong, f"Error: {ended}") if part)


class PythonCodeEnv(Env):
    """Give reward 1 in the turn that ends with the right `<answer>..</answer>`, 0 otherwise.

    `<python>..</python>` runs code; the next message is what it printed, in `<output>..</output>`.
    What a response says after `</python>` is cut: it would be made up. The conversation ends with
    an answer, or after `max_turns` turns (a column of the row, or `generator.max_turns`). Each
    program starts anew, with no variable or file of the ones before. Answers are compared as
    numbers where both are, else as text without regard to case and blanks.

    Settings: `env_config["sandbox"]`, see `sandbox.Limits`.

    Raises:
        SandboxError: this machine cannot hold the code.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(env_config, extras)
        self.ground_truth = read_ground_truth(self.extras, "python_code")
        self.max_turns = int(self.extras.get("max_turns", _MAX_TURNS))
        sandbox.require()
        limits = sandbox.Limits(**self.env_config.get("sandbox", {}))
        self.tools = PythonToolGroup(limits)
        self.init_tool_groups([self.tools])
        self._metrics = {"correct": 0.0, "answered": 0.0, "programs": 0, "program_errors": 0}

    def step(self, action: str) -> StepOutput:
        """Run the code, or compare the answer."""
        self.turns += 1
        called = first_tagged(action, "python", "answer")
        if called is not None and called.tag == "answer":
            correct = float(same_answer(called.content, self.ground_truth))
            self._metrics |= {"correct": correct, "answered": 1.0}
            return StepOutput(observations=[], reward=correct, done=True, metadata={})
        done = self.turns >= self.max_turns
        if called is None:
            message = "Write code in <python>..</python>, or the answer in <answer>..</answer>."
            return StepOutput(
                observations=[] if done else [{"role": "user", "content": message}],
                reward=0.0,
                done=done,
                metadata={"reason": "neither code nor an answer"},
            )
        output = StepOutput(observations=[], reward=0.0, done=done, metadata={})
        if not done:
            output["postprocessed_action"] = action[: called.end]
            code = [called.content]
            printed = self._execute_tool(self.tool_to_toolgroup["python"], "python", code)
            assert self.tools.last is not None
            self._metrics["programs"] += 1
            self._metrics["program_errors"] += not self.tools.last.ok
            content = f"<output>\n{printed}\n</output>"
            output["observations"] = [{"role": "user", "content": content}]
            output["metadata"] = {"reason": self.tools.last.reason}
        return output

    def get_metrics(self) -> dict[str, Any]:
        """Return `correct`, `answered`, `programs` that ran and `program_errors` among them."""
        return self._metrics


def _shorten(text: str) -> str:
    if len(text) <= _MAX_CHARACTERS:
        return text
    half = _MAX_CHARACTERS // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"
