"""The commands and programs that pages show, and the marks above them (CONTRIBUTING.md)."""

import ast
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxrl.__main__ import MODULES, usage

ROOT = Path(__file__).parents[2]
# Scripts whose commands are not run, and why.
NOT_RUN = {
    "examples/smollm2_to_hf.py": "downloads 145 MB; the folder is there already",
    **dict.fromkeys(
        (f"examples/tinker/{name}.py" for name in ("rl", "sft", "distillation")),
        "tests/tools/tinker/test_examples.py runs it against a server",
    ),
}
# What begins a command, so that one in a block of another kind is found.
COMMAND = re.compile(
    r"(\$ )?([A-Z_]+=\S+ )*((\.venv/bin/)?(python3?|pip|pytest|make|jaxrl|tpu/\S+\.sh) [^=\s])"
)
_FENCE = re.compile(r" *```(\w*)")
MARK = re.compile(r" *<!-- (not run|run by|run after|exit status):? (.*\S) -->")


def pages() -> list[Path]:
    """Every page whose commands a reader may try, and the scripts that begin with theirs."""
    named = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tpu/README.md")]
    return named + sorted((ROOT / "docs").rglob("*.md")) + scripts("examples")


def scripts(*folders: str) -> list[Path]:
    """The Python files of some folders."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@dataclass(frozen=True)
class Block:
    """A fenced block: what is in it, where it is, and the marks above it."""

    page: Path
    line: int  # of the first line within
    language: str
    text: str
    marks: dict[str, str]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether the test of its page runs it."""
        shown = bool(self.shell) or self.language == "python" and not self.sets_fields
        return shown and not {"not run", "run by"} & self.marks.keys()

    @property
    def sets_fields(self) -> bool:
        """Whether it only sets fields of `config`: its test runs such on every page at once."""
        if self.language != "python" or "config" not in self.text or self.file:
            return False
        return all(isinstance(node, ast.Assign) for node in ast.parse(self.text).body)

    @property
    def shell(self) -> str:
        """Its commands, as a shell reads them; "" where it has none."""
        if self.language == "console":
            lines = self.text.splitlines(keepends=True)
            return "".join(line[2:] for line in lines if line.startswith("$ "))
        return self.text if self.language == "bash" else ""

    @property
    def file(self) -> str | None:
        """The file that it is, if its first line names one: `# my_losses.py`."""
        named = re.match(r"# (\w+\.py)\n", self.text) if self.language == "python" else None
        return named and named[1]


def blocks(page: Path) -> list[Block]:
    """The blocks of a page; of a script, the commands in its docstring."""
    text = page.read_text(encoding="utf-8")
    return list(_of_script(page, text) if page.suffix == ".py" else _of_page(page, text))


def _of_page(page: Path, text: str) -> Iterator[Block]:
    marks: dict[str, str] = {}
    lines = iter(enumerate(text.splitlines(keepends=True), 1))
    for number, line in lines:
        mark, fence = MARK.match(line), _FENCE.match(line)
        if mark:
            marks[mark[1]] = mark[2]
        elif fence:
            inside = []
            for _, within in lines:
                if within.strip() == "```":
                    break
                inside.append(within)
            yield Block(page, number + 1, fence[1], textwrap.dedent("".join(inside)), marks)
            marks = {}
        else:
            assert not marks, f"{page}:{number}: a mark stands directly above its block"


def _of_script(page: Path, text: str) -> Iterator[Block]:
    docstring = ast.get_docstring(ast.parse(text)) or ""
    for paragraph in docstring.split("\n\n"):
        if paragraph.startswith("    ") and COMMAND.match(paragraph.strip()):
            line = 1 + text[: text.index(paragraph.splitlines()[0].strip())].count("\n")
            # A line that is indented goes on with the command above it.
            shown = textwrap.dedent(paragraph).replace("\\\n", "\n").replace("\n ", " ") + "\n"
            why = NOT_RUN.get(str(page.relative_to(ROOT)))
            yield Block(page, line, "bash", shown, {"not run": why} if why else {})


def commands(shell: str, variables: dict[str, str] | None = None) -> list[list[str]]:
    """The simple commands of a text, in words, with their assignments (`A=b`) before them.

    Args:
        variables: stand in place of `$NAME`; what the text sets is added.
    """
    found: list[list[str]] = []
    variables = {} if variables is None else variables
    for line in shell.replace("\\\n", " ").splitlines():
        filled = re.sub(r"\$(\w+)", lambda name: variables.get(name[1], name[0]), line)
        lexer = shlex.shlex(filled, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|"):
                if words:
                    found.append(words)
                words = []
            else:
                words.append(word)
        if found and all("=" in word for word in found[-1]):
            variables.update(word.split("=", 1) for word in found[-1])
    return found


def spelt_out(words: list[str]) -> list[str]:
    """What `jaxrl WORDS` is as arguments of `python`: `train quickstart`, say, as
    `-m jaxrl.train --config=quickstart`; the recipe follows the command."""
    if not words or words[0] not in MODULES:
        return ["-m", "jaxrl", *words]
    module, rest = MODULES[words[0]], words[1:]
    if "--config=" in usage(module) and rest and rest[0][0] != "-":
        rest = [f"--config={rest[0]}", *rest[1:]]
    return ["-m", module, *rest]


def in_prose(page: Path) -> list[tuple[int, str]]:
    """Commands between single backticks: line and text."""
    text = page.read_text(encoding="utf-8")
    fenced = r"^ *```.*?^ *```$"
    prose = re.sub(fenced, lambda block: "\n" * block[0].count("\n"), text, flags=re.S | re.M)
    spans = re.finditer(r"`([^`\n]+)`", prose)
    return [(1 + prose[: s.start()].count("\n"), s[1]) for s in spans if COMMAND.match(s[1])]
