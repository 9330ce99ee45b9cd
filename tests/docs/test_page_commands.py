"""What pages show works: every command is run, or marked with why not, and every name exists.

CONTRIBUTING.md says how to write and mark a block; shorten.py what is cut.
"""

import ast
import functools
import importlib
import re
import sys
import tomllib
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest

from jaxrl import config as cfg
from jaxrl.config.supervised import validate_sft as check_supervised
from tests.docs import scratch
from tests.docs.pages import (
    COMMAND,
    MARK,
    ROOT,
    blocks,
    commands,
    in_prose,
    pages,
    scripts,
    spelt_out,
)
from tests.docs.shorten import CUT, shortened

pytestmark = pytest.mark.check
PAGES = pages()
_INDENTED = re.compile(rf"^ +{COMMAND.pattern}", re.M)  # only such a script may show a command
SCRIPTS = [
    page
    for page in scripts("configs", "benchmarks", "jaxrl")
    if _INDENTED.search(page.read_text(encoding="utf-8"))
]
BLOCKS = {page: blocks(page) for page in PAGES + SCRIPTS}
READ = PAGES + [page for page in SCRIPTS if BLOCKS[page]]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
HOLDER = re.compile(
    r"\.\.\.|\$\w+|[A-Z]+\d?|value|(.*/)?(my_\w+|mine)(\.py)?"
)  # stands for what a user has
LANGUAGES = {"", "bash", "console", "python", "text", "yaml", "json", "toml"}


def label(page):
    return str(page.relative_to(ROOT))


def test_what_is_a_command_says_so():
    """In a block that is not of commands nothing is one; a mark is known and true."""
    wrong = []
    for page in PAGES:
        try:
            check_blocks(page)
        except Exception as error:
            wrong.append(f"{label(page)}: {error!r}")
    assert not wrong, "\n".join(wrong)


def check_blocks(page):
    """Raise AssertionError where a page shows a command that does not say so."""
    for block in BLOCKS[page]:
        assert block.language in LANGUAGES, f"{block}: ```{block.language}"
        assert bool(block.shell) == (block.language in ("bash", "console")), f"{block}: no `$ `"
        lines = [] if block.shell or block.language == "python" else block.text.splitlines()
        shown = [line for line in lines if COMMAND.match(line)]
        assert not shown, f"{block}: {shown}; write ```bash, or ```console with its output"
        if tested := block.marks.get("run by"):
            test = (ROOT / tested).read_text(encoding="utf-8")
            assert page.name in test or page.parent.name in test, f"{block}: {tested} of {page}"
    if page.suffix == ".md":
        text = page.read_text(encoding="utf-8")
        prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.S | re.M)
        indented = [
            row for row in prose.splitlines() if row[:4] == "    " and COMMAND.match(row[4:])
        ]
        assert not indented, f"{page}: {indented}: not indented, but in a block of ```bash"
        marks = [line for line in re.findall(r"(<!-- .*-->)\n+ *```", text) if not MARK.match(line)]
        assert not marks, f"{page}: {marks} above a block is no mark"


def test_what_commands_name_exists(monkeypatch, tmp_path):
    """Modules, files, flags, extras, targets of make, and every field of the config."""
    monkeypatch.chdir(ROOT)
    wrong = []
    for page in READ:
        with place_of(page, monkeypatch, tmp_path) as place:
            for block in BLOCKS[page]:
                place(block)
            try:
                wrong += wrong_commands(page)
            except Exception as error:
                wrong.append(f"{label(page)}: {error!r}")
    assert not wrong, "\n".join(wrong)


@contextmanager
def place_of(page, monkeypatch, tmp_path):
    """Yield what puts the module that a block is where only this page finds it."""
    folder = tmp_path / label(page)
    folder.mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder)

        def place(block):
            if block.file:
                (folder / block.file).write_text(block.text)
                patch.delitem(sys.modules, block.file.removesuffix(".py"), raising=False)

        yield place


def wrong_commands(page):
    """The commands of a page that name what is not there, and what that is."""
    shown = BLOCKS[page]
    found = [(str(block), block.shell) for block in shown if block.shell]
    found += [(str(b), b.marks["run after"]) for b in shown if "run after" in b.marks]
    found += [(f"{page}:{line}", text) for line, text in in_prose(page)] if page in PAGES else []
    variables, wrong = {}, []
    for where, text in found:
        for words in commands(text, variables):
            try:
                check(words)
            except Exception as error:
                wrong.append(f"{where}: {' '.join(words)}: {error!r}")
    return wrong


def check(words):
    """Raise AssertionError or ValueError where a command names what is not there."""
    words = [optional(word) for word in words if not re.match(r"[A-Z_]+=", word)]
    if not words:
        return
    program, rest = Path(words[0]).name, words[1:]
    if program.startswith("python"):
        check_program(rest)
    elif program == "jaxrl":
        check_program(spelt_out(rest))
    elif program == "pip":
        named = re.findall(r"(?:jaxrl|\.)\[([\w,-]+)\]", " ".join(rest))
        assert set(",".join(named).split(",")) - {""} <= EXTRAS.keys(), "no such extra"
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        asked = {word for word in rest if "=" not in word}
        assert asked <= set(targets), "no such target of the Makefile"
    elif words[0].endswith(".sh"):
        own, _, modules = (list(x) for x in partition(rest, "--"))
        named = [word.partition("=")[2] for word in own if word.startswith("--module=")]
        if modules:
            check_program(["-m", *(named or ["jaxrl.train"]), *modules])
        check_flags(own, (ROOT / words[0]).read_text() + (ROOT / "tpu/arguments.sh").read_text())


def partition(words, at):
    """As str.partition."""
    place = words.index(at) if at in words else len(words)
    return words[:place], words[place : place + 1], words[place + 1 :]


def optional(word):
    """[--flag=value] without its brackets."""
    is_so = word.startswith("[-") or word.count("[") != word.count("]")
    return word.strip("[]") if is_so else word


def check_program(words):
    """`python WORDS`."""
    if words[0] == "-m":
        module, words = words[1], words[2:]
        path = Path(*module.split("."))
        if path.parts[0] not in ("jaxrl", "benchmarks", "tests", "examples"):
            return
        file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    else:
        written = Path(sys.path[0], words[0])  # by the page itself
        file = written if written.exists() else Path(words[0])
        module, words = "", words[1:]
    assert file.exists(), f"{file} does not exist"
    source = file.read_text(encoding="utf-8")
    flags = [word for word in words if re.match(r"--config($|[=.])", word)]
    check_flags([word for word in words if word not in flags], source)
    if any(flag.startswith("--config=") for flag in flags):
        check_config(flags, supervised=module == "jaxrl.sft" or "--sft" in words)


def check_flags(words, source):
    """Every --flag stands in the program that reads it."""
    for word in words:
        flag = word.partition("=")[0]
        known = re.match(r"--($|config\.|help$)", flag) or flag in source
        assert not flag.startswith("--") or known, f"no flag {flag}"


recipe = functools.cache(cfg.load_config_file)


def check_config(flags, supervised):
    """The recipe exists, its fields and values are legal, for one device or a slice."""
    path, overrides = cfg.parse_command_line(flags)
    overrides = {k: v for k, v in overrides.items() if not HOLDER.fullmatch(v)}
    if HOLDER.fullmatch(path):
        path = "configs/sft_addition.py" if supervised else "configs/quickstart.py"
    config = cfg.apply_overrides(recipe(path), overrides)
    errors = []
    for sizes in ((1,), (8,), (64,), (64, 16), (128, 32)):  # devices; processes
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of fields without effect
                (check_supervised if supervised else cfg.validate)(config, *sizes)
            return
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def test_python_of_pages_is_whole(monkeypatch, tmp_path):
    """It compiles, its imports are there, and the fields that it sets exist."""
    wrong = []
    for page in PAGES:
        if page.suffix != ".md":
            continue
        with place_of(page, monkeypatch, tmp_path) as place:
            for block in BLOCKS[page]:
                place(block)  # which the blocks after it may import
                try:
                    check_python(block)
                except Exception as error:
                    wrong.append(f"{block}: {error!r}")
    assert not wrong, "\n".join(wrong)


def check_python(block):
    """Raise what is wrong in a block of Python."""
    if block.language != "python":
        return
    for node in ast.walk(ast.parse(block.text, str(block))):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            missing = [a.name for a in node.names if not hasattr(module, a.name)]
            assert not missing, f"{node.module} has no {missing}"
    if block.sets_fields and block.marks.keys().isdisjoint({"not run", "run by"}):
        config = cfg.default_config()
        exec(block.text, {"config": config, "trainer": config.trainer})


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if any(b.runs for b in BLOCKS[p])], ids=label)
def test_a_page_runs(page, tmp_path):
    scratch.clone(tmp_path)
    wrong = scratch.play(tmp_path, page)
    assert not wrong, wrong


# ---- the collector and the rule ------------------------------------------------------------------

PAGE = """
Text.

<!-- run after: python -m jaxrl.train --config=configs/quickstart.py -->
<!-- exit status: 1 -->
```console
$ python -m jaxrl.audit runs/quickstart
history  FAILED
```

- in a list

  ```bash
  A=1 python -m jaxrl.plan \\
      --config=FILE   # a plan
  make test && make lint
  ```

```python
# my_losses.py
x = 1
```
"""


def test_blocks_and_commands_of_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    console, bash, python = blocks(page)
    assert (console.line, console.language) == (7, "console")
    before = "python -m jaxrl.train --config=configs/quickstart.py"
    assert console.marks == {"run after": before, "exit status": "1"}
    assert console.shell == "python -m jaxrl.audit runs/quickstart\n"
    assert commands(bash.shell) == [
        ["A=1", "python", "-m", "jaxrl.plan", "--config=FILE"],
        ["make", "test"],
        ["make", "lint"],
    ]
    assert (bash.marks, bash.file, python.file, python.shell) == ({}, None, "my_losses.py", "")


def test_variables_of_a_block_are_filled_in():
    text = 'FLAGS="--a=1 \\\n    --b=2"\npython x.py $FLAGS --c=$HOME'
    words = ["python", "x.py", "--a=1", "--b=2", "--c=$HOME"]
    assert commands(text) == [["FLAGS=--a=1      --b=2"], words]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("python -m jaxrl.audit RUN --jsn=x", "no flag --jsn"),
        ("python -m jaxrl.train --config=configs/nothing.py", "no such file"),
        ("python -m jaxrl.train --config=FILE --config.trainer.sed=1", "sed"),
        ("python -m jaxrl.train --config=FILE --config.trainer.train_batch_size=7", "7"),
        ("python examples/nothing.py", "does not exist"),
        ("pip install 'jaxrl[everything]'", "no such extra"),
        ("make tests", "no such target"),
    ],
)
def test_a_wrong_command_is_found(command, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    (words,) = commands(command)
    with pytest.raises((AssertionError, ValueError), match=message):
        check(words)


def test_only_long_runs_are_cut(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    train = ["-m", "jaxrl.train", "--config=configs/quickstart.py"]
    assert shortened(train) == [*train, f"--config.trainer.max_training_steps={CUT}"]
    short = [*train, "--config.trainer.max_training_steps=3"]
    assert shortened(short) == short
    plan = ["-m", "jaxrl.plan", "--config=configs/quickstart.py"]
    assert shortened(plan) == plan


def test_a_step_that_a_cut_run_did_not_reach(monkeypatch, tmp_path):
    """Of a command line, and of a recipe: 250 in configs/addition_grpo.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for step in (1, 2):
        (tmp_path / f"runs/sft_addition/exports/global_step_{step}/policy").mkdir(parents=True)
    words = shortened(["-m", "jaxrl.train", "--config=configs/addition_grpo.py"])
    path = "runs/sft_addition/exports/global_step_2/policy"
    assert words[-1] == f"--config.trainer.policy.model.path={path}"
    subject = "--subject=runs/sft_addition/exports/global_step_250"
    assert shortened(["-m", "jaxrl.evaluate", subject])[-1] == subject[:-3] + "2"
    assert shortened(["x.py", "other/global_step_7"])[-1] == "other/global_step_7"
