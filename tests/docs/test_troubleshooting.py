"""What docs/troubleshooting.md names exists: metrics, fields, alarms, messages, commands."""

import importlib.util
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from jaxrl.advantages import ESTIMATORS
from jaxrl.config import TrainConfig
from jaxrl.losses import LOSSES
from jaxrl.records.alarms import RULES

pytestmark = pytest.mark.check
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
NAMED = sorted(set(re.findall(r"(?<!`)`([^`\n]+)`(?!`)", PAGE)))
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "jaxrl").rglob("*.py")))
# messages are written as neighbouring literals: '"... not "\n f"one row"' is one text
PROSE = re.sub(r'"\s*\n\s*f?"', "", SOURCE)
GROUPS = "reward|policy|loss|generate|trainer|async|compile|timing|eval|environment"
PARTS = "trainer|generator|environment|data|serve|sft"


def config_fields(node, prefix=""):
    for field in fields(node):
        value = getattr(node, field.name)
        yield prefix + field.name
        if is_dataclass(value):
            yield from config_fields(value, f"{prefix}{field.name}.")


FIELDS = set(config_fields(TrainConfig()))


def is_metric(name):
    """Whether the sources say it; or its last part, where a prefix or a suffix is added to it."""
    leaf = name.rpartition("/")[2]
    made = re.sub(r"_(p\d\d|mean|max|low|high)$", "", leaf)  # of quantiles, sides, statistics
    ending = r'(_|_p?\{[^"]*)?"'
    said = (rf'["/}}]{re.escape(x)}{ending}' for x in (name, leaf, made))
    return any(re.search(pattern, SOURCE) for pattern in said)


def named(pattern):
    """What the page names of a kind: at least something."""
    found = [name for name in NAMED if re.fullmatch(pattern, name)]
    assert found, pattern
    return found


def test_the_sources_write_every_metric():
    wrong = [name for name in named(rf"({GROUPS})/[\w/]+") if not is_metric(name)]
    assert not wrong, "\n".join(wrong)


def test_every_field_is_one_of_the_config():
    wrong = [name for name in named(rf"({PARTS})\.[\w.]+") if name not in FIELDS]
    assert not wrong, "\n".join(wrong)


def test_every_alarm_is_on_the_page():
    assert set(RULES) <= set(NAMED)


def test_words_are_alarms_losses_or_values_of_the_code():
    known = {*RULES, *LOSSES, *ESTIMATORS, *(f.rpartition(".")[2] for f in FIELDS)}
    unknown = [word for word in named(r"[a-z]+(_[a-z]+)+") if word not in known]
    wrong = [word for word in unknown if f'"{word}"' not in SOURCE]
    assert not wrong, "\n".join(wrong)


def is_message(words):
    head, _, what = words.rpartition(" ")  # "is of another {what}"
    return words in PROSE or f"{head} {{what}}" in PROSE and f'("{what}", ' in PROSE


def test_the_sources_say_every_message():
    wrong = [words for words in named(r"[a-z][\w ;,]* [\w ;,]*\w") if not is_message(words)]
    assert not wrong, "\n".join(wrong)


def check_command(command):
    module, *words = command.removeprefix("python -m ").split()
    assert importlib.util.find_spec(module)
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    flags = [w.partition("=")[0] for w in words if w.startswith("--")]
    assert [flag for flag in flags if flag not in source and flag != "--config"] == []
    only = [c for w in words if w.startswith("--only=") for c in w[7:].split(",")]
    if only:
        from jaxrl.tools.doctor.examination import chosen

        assert chosen(only)  # raises where there is no such check


def test_every_command_and_its_flags_are_there():
    wrong = []
    for command in named("python -m .*"):
        try:
            check_command(command)
        except Exception as error:
            wrong.append(f"{command}: {error!r}")
    assert not wrong, "\n".join(wrong)


def test_something_of_each_kind_was_found():
    """The patterns above still match the page."""
    for pattern, least in ((rf"({GROUPS})/", 25), (rf"({PARTS})\.", 40), ("python -m ", 8)):
        assert sum(bool(re.match(pattern, name)) for name in NAMED) >= least
