"""Run a command by its name, or list the commands.

    jaxrl COMMAND [...]

`jaxrl train ...` and `python -m jaxrl train ...` are `python -m jaxrl.train ...`. Only the module
of the command is imported.
"""

import ast
import difflib
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl import __version__, cli

# group -> word -> its module, and what it does
COMMANDS = {
    "Begin": {
        "new": ("jaxrl.new", "write a folder with a recipe, a reward, data and a test"),
        "recipes": ("jaxrl.recipes", "list the recipes that have a name"),
        "prepare": ("jaxrl.data.prepare", "write a known data set, such as gsm8k, as files"),
        "from-skyrl": ("jaxrl.config.from_skyrl", "make a recipe of a SkyRL command or script"),
    },
    "Train": {
        "train": ("jaxrl.train", "reinforcement learning: from a recipe to a trained policy"),
        "sft": ("jaxrl.sft", "supervised fine-tuning on conversations"),
        "sweep": ("jaxrl.sweep", "several losses and estimators with several seeds: one table"),
        "launch": ("jaxrl.cluster.launch", "train on the hosts of a cluster, or in processes here"),
    },
    "Before a run": {
        "plan": ("jaxrl.plan", "the memory and time that it will need of each device"),
        "doctor": ("jaxrl.doctor", "check gradients, masks, sampler and rewards on this machine"),
        "prove": ("jaxrl.prove", "does jaxrl work on this machine, and how fast? one HTML page"),
    },
    "After it": {
        "report": ("jaxrl.report", "an HTML page: curves, alarms, trajectories"),
        "audit": ("jaxrl.audit", "was every prompt and trajectory counted once?"),
        "replay": ("jaxrl.replay", "do recorded steps again and compare bits"),
        "compare": ("jaxrl.compare", "what other losses would do on a recorded batch"),
        "evaluate": ("jaxrl.evaluate", "score a checkpoint, a model folder or a server"),
        "serve": ("jaxrl.serve", "answer over HTTP, as OpenAI's API"),
    },
    "For others": {
        "tinker": ("jaxrl.tinker", "train and sample over Tinker's API, many adapters at once"),
    },
    "Beside": {
        "retriever": (
            "jaxrl.envs.retrieval.retriever_server",
            "serve a corpus to the environment search",
        ),
        "completion": ("jaxrl.completion", "let the shell complete all of this"),
    },
}
MODULES = {word: module for group in COMMANDS.values() for word, (module, _) in group.items()}


def usage(module: str) -> str:
    """Return what --help of a command prints, its docstring, without importing it."""
    path = Path(__file__).parent.parent.joinpath(*module.split(".")).with_suffix(".py")
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def listing() -> str:
    """Return all commands by group, an example first; it fits a screen."""
    width = max(map(len, MODULES)) + 2
    lines = ["jaxrl train quickstart --config.trainer.seed=1"]
    for group, words in COMMANDS.items():
        lines += ["", group]
        lines += [f"  {word:{width}}{what}" for word, (_, what) in words.items()]
    return "\n".join([*lines, "", "Each has --help, with an example; jaxrl --version."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run `jaxrl COMMAND [...]`; print the list without one."""
    words = sys.argv[1:] if argv is None else list(argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(listing())
        return cli.DONE
    if words[0] == "--version":
        print(f"jaxrl {__version__}")
        return cli.DONE
    if words[0] not in MODULES:
        near = difflib.get_close_matches(words[0], MODULES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return cli.refuse(
            ValueError(f"unknown command {words[0]!r}: {hint}`jaxrl` lists all commands")
        )
    if os.getcwd() not in sys.path:  # as of `python -m`: where my_rewards.py lies
        sys.path.insert(0, os.getcwd())
    sys.argv = [sys.argv[0], *words[1:]]
    try:
        runpy.run_module(MODULES[words[0]], run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:  # while it is imported: a run ends by itself
        return cli.INTERRUPTED
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
