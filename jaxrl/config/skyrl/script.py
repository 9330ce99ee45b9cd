"""Read the run that a script would start from its text; nothing of the script is executed.

Assignments, arrays, `$X`, `${X:-default}` and the like, sums, the script's arguments, the
environment, and `if` where strings or numbers are compared are read. What else could set a
variable, such as `$(program)` or a loop, makes its value unknown, and a setting with an unknown
value is named, not guessed.
"""

import ast
import operator
import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from itertools import dropwhile
from typing import NamedTuple

from jaxrl.config.skyrl.shell_words import Command, part_end, split_commands

_CONFIG_KEY = re.compile(r"\+{0,2}(data|trainer|generator|environment)\.[\w.]+=")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=(.*)", re.DOTALL)
_PARAMETER = re.compile(
    r"([A-Za-z_]\w*|\d+|[@*#?$!-])(\[[^]]*\])?(?:(:?[-=?+]|##?|%%?)(.*))?", re.DOTALL
)
_SUM = re.compile(r"\(\(.*?\)\)|\$\[.*?\]", re.DOTALL)
_SET_BY_SUM = re.compile(
    r"(?:\+\+|--)\s*([A-Za-z_]\w*)"
    r"|([A-Za-z_]\w*)(?:\[[^]]*\])?\s*(?:(?:<<|>>|[-+*/%&|^])?=(?!=)|\+\+|--)"
)
_SET_BY_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*)(?:\[[^]]*\])?:?=")
# Bash sets these itself, whatever the environment says, and those where it says nothing.
_OF_BASH = re.compile(
    "_|E?UID|PPID|SHLVL|S?RANDOM|SECONDS|LINENO|GROUPS|DIRSTACK|FUNCNAME|PIPESTATUS|REPLY|COPROC"
    "|EPOCH(SECONDS|REALTIME)|(BASH|SHELL)OPTS|BASH(PID|_COMMAND|_LINENO|_SUBSHELL|_VERSION|"
    "_VERSINFO)|OPT(IND|ARG|ERR)|MAPFILE"
)
_OF_BASH_IF_UNSET = re.compile(
    "(HOST|OS|MACH)TYPE|HOSTNAME|BASH|PATH|SHELL|TERM|(OLD)?PWD|IFS|PS4|COLUMNS|LINES"
)
_READERS = ("read", "mapfile", "readarray", "getopts", "let", "unset")
_PIPES = ("|", "|&")
_DECLARATIONS = ("export", "readonly", "local", "declare", "typeset")
_SUMS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
# Within a value these characters of no script enclose why a part of it is not known, and are its
# spaces, so that it stays one word.
_BEGIN, _END, _SPACE = "\ue000\ue001\ue002"
_UNKNOWN = re.compile(f"{_BEGIN}([^{_END}]*){_END}")


class ScriptRun(NamedTuple):
    """Hold the run that a script starts.

    Attributes:
        command: words of its command, ["uv", "run", "-m", "skyrl...", "trainer.seed=1"].
        unknown: "setting: why its value is not known"; these are not among the words.
        notes: what else of the script was not read, or counts for less than it seems.
    """

    command: list[str]
    unknown: list[str]
    notes: list[str]


def read_script(text: str, args: Sequence[str], path: str = "script") -> ScriptRun:
    """Return the first command with settings that a script starts.

    Args:
        text: of the script.
        args: its own arguments, its `$@`; settings among them count last, wherever it puts them.
        path: its `$0`.

    Raises:
        ValueError: it starts no such command, or its quotes do not close.
    """
    try:
        commands = list(split_commands(text))
        scan = _Script(args, path)
        for command in commands:
            scan.scan(command)
        script = _Script(args, path)
        script.last_set, script.set_in_function = scan.last_set, scan.set_in_function
        for command in commands:
            script.read(command)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    settings = [word for word in args if _CONFIG_KEY.match(word)]
    if not script.runs:
        if "main_sft" in text:
            raise ValueError(
                f"{path}: starts main_sft, supervised fine-tuning: write a recipe for it, "
                "docs/sft.md"
            )
        called = ", ".join(dict.fromkeys(script.called)) or "nothing"
        ended = f"; it ends at `{script.ended}`" if script.ended else ""
        raise ValueError(
            f"{path}: starts no command with arguments like trainer.seed=1 (it calls {called}"
            f"{ended}); give them as key=value"
        )
    words = [*script.runs[0], *settings]
    reasons = {}
    for word in words:  # the last one of a setting counts
        reasons[word.partition("=")[0]] = _UNKNOWN.findall(word)
    unknown = [
        f"{_shown(key)}: not known without running the script: {_shown(', '.join(found))}; give "
        "key=value after the script"
        for key, found in reasons.items()
        if found and key != words[0]  # which program starts it does not matter
    ]
    return ScriptRun(
        [_shown(word) for word in words if not reasons[word.partition("=")[0]]],
        unknown,
        script.notes(unknown),
    )


def _unknown(reason: str) -> str:
    """Return a value, or a part of one, that is not known."""
    reason = textwrap.shorten(reason, 80, placeholder=" ...")
    return f"{_BEGIN}{reason}{_END}".replace(" ", _SPACE)


def _shown(text: str) -> str:
    return re.sub(f"[{_BEGIN}{_END}]", "", text).replace(_SPACE, " ")


def _all(*states: bool | None) -> bool | None:
    """Return the conjunction of three-valued states; None is not known."""
    return False if False in states else None if None in states else True


def _not(state: bool | None) -> bool | None:
    return None if state is None else not state


@dataclass
class _Block:
    """Hold a part of a script between `if` and `fi`, `for` and `done`, `{` and `}`.

    Attributes:
        outer: whether the block as a whole is reached.
        reached: whether the branch is that is being read.
        rest: whether the branches after it may still be.
        reason: what decides it.
        function: whether it is the body of one, where `$1` is not the script's.
        subshell: whether `(` opens it.
        repeats_from: the command that opens it, if it may run later or again; else -1.
        piped: whether `|` stands before it.
        before: what was set before it.
        before_list: what was set before the list of `&&` and `||` that is being read in it.
    """

    outer: bool | None
    reached: bool | None
    reason: str
    rest: bool | None = True
    function: bool = False
    subshell: bool = False
    repeats_from: int = -1
    piped: bool = False
    before: "_State | None" = None
    before_list: "_State | None" = None


class _State(NamedTuple):
    """Hold what a subshell does not change for the script around it."""

    variables: dict[str, str | list[str]]
    args: list[str]
    ended: str


class _Script:
    """Hold what is known of a script's variables while its commands are read in order."""

    def __init__(self, args: Sequence[str], path: str):
        self.variables: dict[str, str | list[str]] = {**os.environ, "BASH_SOURCE": [path]}
        self.args = list(args)
        self.path = path
        self.runs: list[list[str]] = []
        self.called: list[str] = []
        self.ended = ""  # the command that ends it
        self.not_read: list[str] = []
        self.unset: list[str] = []
        self.undecided = ""  # what decides whether the first run is started
        self.may_set = ""  # the last `source` or the like, which may set any variable
        self.status: bool | None = True  # of the last command; None is not known
        self.last = ""  # that command
        self.guard: bool | None = True  # whether && and || before the command let it run
        self.defines_function = False
        self.blocks: list[_Block] = [_Block(True, True, "")]
        self.position = 0  # of the command that is being read
        self.last_set: dict[str, int] = {}  # where each name is set for the last time
        self.set_in_function: dict[str, int] = {}  # where its first function that sets it begins
        self.closed = self.blocks[0]  # the block that was left last
        self.of_kind: set[str] = set()  # declared as integers, references, ...

    @property
    def reached(self) -> bool | None:
        """Return whether the command that is being read would be run."""
        return _all(not self.ended, self.blocks[-1].reached, self.guard)

    @property
    def in_function(self) -> bool:
        """Return whether a function is read, which runs later and with arguments of its own."""
        return any(block.function for block in self.blocks)

    def notes(self, unknown: list[str]) -> list[str]:
        """Return what is to be said of the script besides its unknown settings."""
        named, lines = "".join(unknown), []
        if not_read := [part for part in dict.fromkeys(self.not_read) if part not in named]:
            lines.append(f"not run, in case it sets something: {', '.join(not_read)}")
        if self.unset:
            lines.append(f"not set, read as empty: {', '.join(dict.fromkeys(self.unset))}")
        if self.undecided:
            lines.append(f"starts its run where `{self.undecided}` decides, which is not known")
        if len(self.runs) > 1:
            lines.append(f"{len(self.runs) - 1} further runs; the first is converted")
        return [f"{self.path}: {line}" for line in lines]

    def read(self, command: Command) -> None:
        """Read one command: take what it sets, and remember it if it has settings."""
        if command.separator == "&&":
            self.guard = self.status
        elif command.separator == "||":
            self.guard = _not(self.status)
        elif command.separator != "|":
            self.guard = True
        self.position += 1
        before, depth = self._state(), len(self.blocks)
        if command.separator not in ("&&", "||", *_PIPES):
            self.blocks[-1].before_list = before
        words = self._after_keywords(command.words)
        if self.reached is not False:
            self._set_unknown(_set_by_sums(command.words), command.words)
        if words and self.reached is not False:
            self.not_read += command.here_documents
            certain = self.reached and "!" not in command.words[: -len(words)]
            self._read_simple(words)
            self.last = " ".join(words)
            if not certain:
                self.status = None
        if len(self.blocks) > depth:
            self.blocks[depth].piped = command.separator in _PIPES
            self.blocks[depth].before = before
        elif len(self.blocks) == depth and (command.separator in _PIPES or command.end in _PIPES):
            self._restore(before)
        elif command.end in _PIPES:
            self._restore(self.closed.before)
        if command.end == "&":
            self._restore(self.blocks[-1].before_list)

    def scan(self, command: Command) -> None:
        """Note which names a command sets; nothing is evaluated."""
        self.position += 1
        function = next((block for block in self.blocks if block.function), None)
        self._after_keywords(command.words)
        function = function or next((block for block in self.blocks if block.function), None)
        for name in _names_set(command.words):
            self.last_set[name] = self.position
            if function:
                self.set_in_function.setdefault(name, function.repeats_from)

    def _state(self) -> _State:
        return _State(dict(self.variables), list(self.args), self.ended)

    def _restore(self, state: _State | None) -> None:
        if state:
            self.variables, self.args, self.ended = dict(state[0]), list(state[1]), state[2]

    def _close(self) -> None:
        """Leave a block; a subshell and a part of a pipe leave nothing set."""
        self.status = None
        if len(self.blocks) > 1:
            self.closed = self.blocks.pop()
            if self.closed.subshell or self.closed.piped:
                self._restore(self.closed.before)

    def _after_keywords(self, words: list[str]) -> list[str]:  # noqa: PLR0912
        """Open and close blocks; return the words of the simple command that is left."""
        while words:
            block = self.blocks[-1]
            match words[0]:
                case "if":
                    self._open(True, words)
                case "then" | "elif" | "else" as keyword:
                    chosen = self.status if keyword == "then" else True
                    block.reached = _all(block.outer, block.rest, chosen)
                    block.rest = block.rest if keyword != "then" else _all(block.rest, _not(chosen))
                case "while" | "until" | "for" | "select" | "case":
                    self._open(None, words)
                    self.blocks[-1].repeats_from = self.position
                    if words[0] in ("for", "select"):
                        self._set_unknown(words[1:2], words)
                    if words[0] not in ("while", "until"):
                        return []
                case "{" | "(":
                    self._open(True, words)
                    self.blocks[-1].subshell = words[0] == "("
                case "fi" | "done" | "esac" | "}":
                    self._close()
                    return []
                case ")":  # of a pattern of `case` otherwise
                    if block.subshell:
                        self._close()
                case "function":
                    self.defines_function = True
                    words = words[2:] if words[2:3] == ["()"] else words[1:]
                case "coproc" if "{" in words or "(" in words:
                    raise ValueError("`coproc` of several commands is not read")
                case "do" | "time" | "!":
                    pass
                case _ if words[1:2] == ["()"]:
                    self.defines_function = True
                    words = words[1:]
                case _:
                    return words
            words = words[1:]
        return []

    def _open(self, entered: bool | None, words: list[str]) -> None:
        function, self.defines_function = self.defines_function, False
        reached = _all(self.reached, None if function else entered)
        block = _Block(reached, reached, " ".join(words), function=function)
        block.repeats_from = self.position if function else -1
        self.blocks.append(block)

    def _read_simple(self, words: list[str]) -> None:  # noqa: PLR0912
        """Read a command that is no keyword."""
        self.status = True
        if words[0] in ("command", "builtin") and len(words) > 1 and words[1] in _DECLARATIONS:
            words = words[1:]
        if words[0] in _DECLARATIONS:
            self._declare(words)
            return
        command = list(dropwhile(_ASSIGNMENT.fullmatch, words))  # before it they are its own
        for word in () if command else words:
            self._assign(word)
        match command:
            case []:
                pass
            case ["[" | "[[" | "test", *_]:
                self.status = self._test(command)
            case ["true" | "false" as outcome]:
                self.status = outcome == "true"
            case ["exit" | "return", *_]:
                self.ended = " ".join(command) if self.reached else ""
            case ["shift" | "set", *_]:
                self._set_args(command)
            case ["read" | "mapfile" | "readarray" | "getopts" | "let" | "unset", *names]:
                self._set_unknown(names, command)
            case ["printf", "-v", name, *_]:
                self._set_unknown([name], command)
            case [text] if text.startswith("(("):
                self.status = None
            case ["eval" | "source" | ".", *_]:
                self._set_anything(command)
            case _:
                self._read_program(command)

    def _declare(self, words: list[str]) -> None:
        """Read `export` and the like: all values are expanded before the first is assigned."""
        old = dict(self.variables)
        values = {}
        for word in words[1:]:
            if match := _ASSIGNMENT.fullmatch(word):
                self.variables = dict(old)
                self._assign(word)
                values[match[1]] = self.variables[match[1]]
            elif not re.fullmatch(r"[-+]?\w+", word):
                self.variables = dict(old)
                self._set_anything(words)
                return
        self.variables = old | values
        kinds = re.findall(r"[Aiuln]", "".join(word for word in words if word[0] in "-+"))
        if words[0] != "export" and kinds:
            self.of_kind.update(_names_set(words))
            if "n" in kinds:
                self._set_anything(words)
        if self.in_function:
            self._set_unknown([word for word in words[1:] if word.isidentifier()], words)

    def _set_anything(self, words: list[str]) -> None:
        """Make every variable unknown, after `source` and the like."""
        self.may_set = f"`{textwrap.shorten(' '.join(words), 80)}`"
        self.not_read.append(self.may_set)
        self.status = None
        if re.search(r"bin/activate[\"']?$", words[-1]):
            return  # of a virtual environment: it sets PATH and names of its own
        for name in self.variables.keys() - {"BASH_SOURCE"}:
            self.variables[name] = _unknown(f"{name}, which {self.may_set} may set")
        if words[0] == "eval" and re.search(r"\bset\b|[$`]", " ".join(words)):
            self.args = [_unknown(f"the arguments, which {self.may_set} may set")]

    def _read_program(self, words: list[str]) -> None:
        called = self._expand_all(words)
        if called[:1] == ["exec"]:
            called = called[1:]
        if not called or called[0] in (":", "echo", "printf"):
            return
        # Whether a program succeeds is not known; a script that goes on without a folder is broken.
        self.status = True if called[0] in ("cd", "mkdir") else None
        if called[0] in ("cd", "pushd", "popd"):
            self._set_unknown(["PWD", "OLDPWD"], words)
        self.called.append(_shown(called[0]))
        if any(_CONFIG_KEY.match(word) for word in called):
            if self.reached is None and not self.runs:
                self.undecided = self._decides()
            self.runs.append(called)

    def _set_args(self, words: list[str]) -> None:
        options = r"-[a-z]*o|[-+][a-zA-Z]+|pipefail|errexit|nounset|xtrace|posix|verbose|noglob"
        if words[0] == "set" and "--" not in words:
            if not all(re.fullmatch(options, word) for word in words[1:]):
                self.args = [_unknown(f"the arguments, set by `{' '.join(words)}`")]
        elif not self.reached:
            self.args = [_unknown(f"the arguments, as `{self._decides()}` leaves them")]
        elif words[0] == "shift":
            count = words[1] if len(words) > 1 else "1"
            self.args = self.args[int(count) :] if count.isdigit() else [_unknown(f"shift {count}")]
        elif "--" in words:
            self.args = self._expand_all(words[words.index("--") + 1 :])

    def _set_unknown(self, names: Sequence[str], words: Sequence[str]) -> None:
        """Make variables unknown that a command sets in a way that is not read."""
        for name in names:
            if found := re.match(r"[A-Za-z_]\w*", name):
                self.variables[found[0]] = _unknown(f"{found[0]}, set by `{' '.join(words)}`")

    def _decides(self) -> str:
        """Return what decides whether the command that is being read is run."""
        unknown = [block.reason for block in self.blocks if block.reached is None]
        return unknown[-1] if unknown else self.last

    def _assign(self, word: str) -> None:
        match = _ASSIGNMENT.fullmatch(word)
        assert match is not None  # tried by the caller
        name, index, plus, raw = match.groups()
        value: str | list[str]
        if self.reached is None:
            value = _unknown(f"{name}, which `{self._decides()}` decides")
        elif index:
            value = _unknown(f"{name}{index}")
        elif raw.startswith("("):
            elements = [w for command in split_commands(raw[1:-1]) for w in command.words]
            value = self._expand_all(elements)
            if any(re.match(r"\[[^]]*\]=", element) for element in elements):
                value = _unknown(f"{name}=(...) with indices")
        else:
            value = " ".join(self._expand(raw, split=False))
        before = self._variable(name)
        if isinstance(value, str) and isinstance(before, list):
            if self.reached is None and raw.startswith("("):
                value = [*before, value] if plus else value
            elif self.reached:  # bash sets the first one of the array
                value = [f"{before[0] if plus and before else ''}{value}", *before[1:]]
        elif plus and isinstance(value, list):
            value = [*([before] if isinstance(before, str) else before or []), *value]
        elif plus and isinstance(before, str) and isinstance(value, str):
            value = before + value
        self.variables[name] = value
        if _UNKNOWN.search("".join(value)):
            self.status = None

    def _expand_all(self, words: Sequence[str]) -> list[str]:
        return [value for word in words for value in self._expand(word)]

    def _expand(self, text: str, quoted: bool = False, split: bool = True) -> list[str]:
        """Return the words that a raw word stands for.

        Args:
            text: of the word.
            quoted: whether it stands within double quotes.
            split: whether the value of `$X` is several words, as it is of an argument.
        """
        words: list[str] = []
        current: str | None = None
        i = 0
        if not quoted and re.match(r"~(/|$)", text):
            current, i = str(self.variables.get("HOME", "~")), 1
        literal = ""  # what stands in no quotes and is no expansion
        while i < len(text):
            end = part_end(text, i, quoted)
            part, i = text[i:end], end
            literal += part if len(part) == 1 or part[0] == "(" else " "
            values = self._part(part, quoted, split)
            if split and not quoted and part[0] == "$" and part != text:
                whole = " ".join(self._part(part, quoted, split=False))
                if whole != whole.strip():  # a word ends at its blanks
                    values = [_unknown(text)]
            if values:
                first, *others = values
                *done, current = [(current or "") + first, *others]
                words += done
        braces = split and re.search(r"\{[^{}]*(,|\.\.)[^{}]*\}", literal)
        if not quoted and (braces or ":~" in literal):
            key = re.match(r"[\w.+]+=|", text)
            return [f"{key[0] if key else ''}{_unknown(text)}"]
        return words if current is None else [*words, current]

    def _part(self, part: str, quoted: bool, split: bool) -> list[str]:
        """Return the words that a part of a raw word stands for; none for an unset variable."""
        if part.startswith("\\") and len(part) > 1:
            if part[1] == "\n":
                return []
            return [part if quoted and part[1] not in '$`"\\' else part[1]]
        if part.startswith("'") and not quoted:
            return [part[1:-1]]
        if part.startswith('"'):
            return [""] if part == '""' else self._expand(part[1:-1], quoted=True, split=False)
        if part.startswith(("$", "`")) and len(part) > 1:
            return self._expansion(part, quoted, split and not quoted)
        return [part]

    def _expansion(self, part: str, quoted: bool, split: bool) -> list[str]:
        if part.startswith("$((") and part.endswith("))"):
            return [self._sum(part)]
        if part.startswith(("$(", "`")):
            return [self._substitution(part)]
        if part.startswith(("$'", '$"', "$[")):
            return [_unknown(part)]
        text = part[2:-1] if part.startswith("${") else part[1:]
        return self._parameter(text, quoted, split)

    def _parameter(self, text: str, quoted: bool, split: bool) -> list[str]:
        """Return what `${text}` stands for."""
        match = _PARAMETER.fullmatch(text)
        if match is None:
            return [_unknown(f"${{{text}}}")]
        name, index, how, word = match.groups()
        values = self._values(name, index)
        missing = values is None or (how or "").startswith(":") and not any(values)
        if how in (":-", "-") and missing:
            return self._expand(word, quoted, split)
        if how in (":+", "+"):
            return [] if missing else self._expand(word, quoted, split)
        if how in (":=", "=") and missing:
            values = [" ".join(self._expand(word, quoted, split=False))]
            if self.reached is None:
                values = [_unknown(f"{name}, which `{self._decides()}` decides")]
            self.variables[name] = values[0]
        elif how in (":?", "?") and missing and self.reached:
            raise ValueError(f"{name}: {_shown(' '.join(self._expand(word))) or 'not set'}")
        elif values is None:
            self.unset.append(name)
            values = [""]
        if how and how[0] in "#%":
            pattern = " ".join(self._expand(word, quoted, split=False))
            literal = re.search("[\"'\\\\]", word) and re.search(r"[*?]", pattern)
            if literal or re.search(r"[\[(\\]", pattern):
                pattern = _unknown(word)
            values = [_trimmed(value, how, pattern) for value in values]
        joins = "*" in (name, (index or "")[1:-1])
        if (split or joins) and self._variable("IFS") not in (None, " \t\n", _unknown("$IFS")):
            return [_unknown(f"${{{text}}}, as IFS splits it")]
        if (name == "@" or index == "[@]") and (split or quoted):
            return [part for value in values for part in (value.split() if split else [value])]
        return " ".join(values).split() if split else [" ".join(values)]

    def _values(self, name: str, index: str | None) -> list[str] | None:
        """Return the values of a parameter, one but for arrays; None if it is not set."""
        if not name.isidentifier():
            return self._special_values(name)
        value = self._variable(name)
        if value is None:
            if not self.may_set and not self.in_function:
                return None
            return [_unknown(f"{name}, which {self.may_set or 'a later line'} may set")]
        values = value if isinstance(value, list) else [value]
        if index in ("[@]", "[*]") or (isinstance(value, str) and _UNKNOWN.search(value)):
            return values
        position = (index or "[0]")[1:-1]
        if not position.isdigit():
            return [_unknown(f"{name}{index}")]
        return _element(values, int(position))

    def _variable(self, name: str) -> str | list[str] | None:
        """Return the value of a variable, unknown where another line may set it before."""
        value = self.variables.get(name)
        if value is not None and _UNKNOWN.search("".join(value)):
            return value
        of_bash = _OF_BASH.fullmatch(name) or name in self.of_kind
        if of_bash or (value is None and _OF_BASH_IF_UNSET.fullmatch(name)):
            return _unknown(f"${name}")
        ends = [self.last_set.get(key, -1) for key in (name, "*")]
        starts = [block.repeats_from for block in self.blocks if block.repeats_from >= 0]
        if starts and max(ends) >= starts[0]:
            return _unknown(f"{name}, which a later line may set")
        functions = [self.set_in_function.get(key, self.position + 1) for key in (name, "*")]
        if min(functions) <= self.position:
            return _unknown(f"{name}, which a function may set")
        return value

    def _special_values(self, name: str) -> list[str] | None:
        if name in "?!-$":
            return [str(os.getpid()) if name == "$" else _unknown(f"${name}")]
        if name != "0" and self.in_function:
            return [_unknown(f"${name} of a function")]
        if name == "#":
            lost = _UNKNOWN.search("".join(self.args))
            return [_unknown("$#") if lost else str(len(self.args))]
        return self.args if name in "@*" else _element([self.path, *self.args], int(name)) or None

    def _sum(self, part: str) -> str:
        """Return the value of `$((...))`; only + - * / % of numbers from 0 are read."""
        try:
            text = "".join(self._expand(part[3:-2].strip(), quoted=True))
            return str(self._number(ast.parse(text, mode="eval").body))
        except (ArithmeticError, SyntaxError, ValueError):
            return _unknown(part)

    def _number(self, node: ast.expr) -> int:
        if isinstance(node, ast.Name):
            value = (self._values(node.id, None) or ["0"])[0]
            if value.isdigit() and (value == "0" or value[0] != "0"):  # 010 is 8
                return int(value)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _SUMS:
            left, right = self._number(node.left), self._number(node.right)
            if left >= 0 and right >= 0:  # below, bash rounds towards 0 and Python does not
                return _SUMS[type(node.op)](left, right)
        raise ValueError(f"not read: {ast.unparse(node)}")

    def _substitution(self, part: str) -> str:
        """Return what `$(...)` prints where that is known without running it."""
        inner = part[2:-1] if part.startswith("$(") else part[1:-1]
        words = [
            word
            for command in split_commands(inner)
            for word in (command.separator, *self._expand_all(command.words))
            if word != "--"
        ]
        match words:
            case [*_] if any(_UNKNOWN.search(word) for word in words):
                printed = None
            case ["", "date", layout] if layout.startswith("+"):
                printed = datetime.now().strftime(layout[1:])
            case ["", "date", "-u", layout] if layout.startswith("+"):
                printed = datetime.now(UTC).strftime(layout[1:])
            case ["", "dirname", path]:
                printed = os.path.dirname(path) or "."
            case ["", "basename", path]:
                printed = os.path.basename(path)
            case ["", "pwd"] if not {"cd", "pushd", "popd"} & {*self.called}:
                printed = os.getcwd()
            case ["", "cd", path, "&&", "pwd"] if not {"cd", "pushd", "popd"} & {*self.called}:
                printed = os.path.abspath(path)
            case _:
                printed = None
        if printed is None:
            self.not_read.append(_shown(_unknown(part)))
        return _unknown(part) if printed is None else printed

    def _test(self, words: list[str]) -> bool | None:
        """Return the outcome of `[ ... ]`; None if it is not known from the text."""
        raw = [word for word in words[1:] if word not in ("]", "]]")]
        if words[0] == "[[":
            values = [" ".join(self._expand(word, split=False)) for word in raw]
        else:
            values = self._expand_all(raw)
        negated = values[:1] == ["!"]
        outcome = None
        match values[negated:]:
            case [text] if not _UNKNOWN.search(text):
                outcome = bool(text)
            case ["-n" | "-z" as how, text] if not _UNKNOWN.search(text):
                outcome = bool(text) is (how == "-n")
            case [left, how, right] if not _UNKNOWN.search(left + right):
                pattern = words[0] == "[[" and re.search(r"[*?[(\\]", right)
                if how in ("=", "==", "!=") and not pattern:
                    outcome = (left == right) is (how != "!=")
                elif how in _COMPARISONS and re.fullmatch(
                    r"(0|[1-9]\d*) (0|[1-9]\d*)", f"{left} {right}"
                ):
                    outcome = _COMPARISONS[how](int(left), int(right))
        return _not(outcome) if negated else outcome


def _element(values: Sequence[str], position: int) -> list[str]:
    """Return one value, or none; an unknown value before it may be several or none."""
    unknown = [value for value in values[:position] if _UNKNOWN.search(value)]
    return unknown[:1] or list(values[position : position + 1])


def _set_by_sums(words: Sequence[str]) -> list[str]:
    """Return the names that `$((X++))` and the like set."""
    text = "\n".join(words)
    sums = "\n".join(_SUM.findall(text))
    return [name for names in _SET_BY_SUM.findall(sums) for name in names if name]


def _names_set(words: Sequence[str]) -> list[str]:
    """Return the names that a command may set, "*" where that may be any."""
    found = _set_by_sums(words) + _SET_BY_DEFAULT.findall("\n".join(words))
    for i, word in enumerate(words):
        if match := re.match(r"[\"']?([A-Za-z_]\w*)(?:\[[^]]*\])?\+?=", word):
            found.append(match[1])
        elif word in (*_READERS, *_DECLARATIONS[2:], "for", "select", "printf"):
            found += [m[0] for rest in words[i + 1 :] if (m := re.match(r"[A-Za-z_]\w*", rest))]
        elif word in ("cd", "pushd", "popd"):
            found += ["PWD", "OLDPWD"]
        elif word in ("eval", "source", "."):
            found += [] if re.search(r"bin/activate[\"']?$", words[-1]) else ["*"]
    return found


def _trimmed(value: str, how: str, pattern: str) -> str:
    """Return a value without a prefix (`#`, longest `##`) or suffix (`%`, `%%`) of a pattern."""
    if _UNKNOWN.search(value + pattern):
        return _unknown(f"{value} without {pattern}")
    cuts = range(len(value) + 1)
    if how[0] == "#":
        found = [cut for cut in cuts if fnmatchcase(value[:cut], pattern)]
        return value[found[-1 if how == "##" else 0] :] if found else value
    found = [cut for cut in cuts if fnmatchcase(value[cut:], pattern)]
    return value[: found[0 if how == "%%" else -1]] if found else value
