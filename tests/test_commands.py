"""`jaxrl COMMAND`: the list, each command's help, names that are misspelt, what runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl import __version__, recipes
from jaxrl.__main__ import MODULES, listing, main, usage
from jaxrl.config.recipe import recipe_files

ROOT = Path(__file__).parents[1]
HEAVY = "flax jax matplotlib optax orbax pyarrow tokenizers torch transformers"  # 0.1 to 2 s each


def jaxrl(*words, cwd=ROOT):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "jaxrl", *words]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_the_list_fits_a_screen_and_begins_with_an_example(capsys):
    for words in ([], ["--help"]):
        assert main(words) == 0
        assert capsys.readouterr().out == listing() + "\n"
    lines = listing().splitlines()
    assert lines[0].startswith("jaxrl train quickstart ")
    assert len(lines) <= 40 and max(map(len, lines)) <= 80


def test_every_module_that_shows_its_command_line_is_in_the_list():
    """The usage is a paragraph that is indented; elsewhere a command may be named in passing."""
    for path in (ROOT / "jaxrl").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        shown = f"\n    python -m {module} " in path.read_text(encoding="utf-8")
        assert (module in MODULES.values()) == shown or module == "jaxrl.completion", module


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxrl {__version__}\n"


def test_a_misspelt_command_is_one_line(capsys):
    assert main(["trian", "--help"]) == 2
    told = "error: unknown command 'trian': did you mean 'train'? `jaxrl` lists all commands\n"
    assert capsys.readouterr() == ("", told)


NO_WORK = [
    (["train"], "Start a run"),
    (["train", "quikstart"], "error: recipe quikstart: no recipe of this name "),
    (["train", "quickstart", "--config.trainer.sed=1"], "Did you mean 'trainer.seed'?"),
    (["sft", "sft_addition", "trainer.seed=1"], "write --config.trainer.seed=1"),
    (["plan", "--estimate", "quickstart", "--config.trainer.epochs=a"], "expected int"),
    (["doctor", "--only", "masks", "quickstart", "twice"], "recipe is quickstart already"),
    (["recipes", "sort"], "quickstart"),
    (["recipes", "nowhere"], "error: no recipe has nowhere in its name or purpose"),
]
ASK = f"""
import contextlib, io, json, sys
from jaxrl.__main__ import main
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try: status = main(words)
        except SystemExit as ended: status = ended.code or 0
    heavy = sorted(set('{HEAVY}'.split()) & set(sys.modules))
    print(json.dumps([words, status, out.getvalue(), err.getvalue(), heavy]))
"""


@pytest.fixture(scope="module")
def answered():
    """What a process that has imported nothing answers to all words, one after another.

    What one of them imports is there when the next are asked, too.
    """
    asked = [[word, "--help"] for word in MODULES] + [words for words, _ in NO_WORK]
    command = [sys.executable, "-c", ASK, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return {tuple(words): answer for words, *answer in answers}


@pytest.mark.parametrize("word", MODULES)
def test_help_fits_a_screen_has_an_example_first_and_comes_at_once(answered, word):
    """What it is, then how it is called; without what takes seconds to import."""
    status, out, err, heavy = answered[word, "--help"]
    assert status == 0, err
    lines = out.splitlines()
    while not lines[-1]:
        lines.pop()
    assert "\n".join(lines) == usage(MODULES[word])
    assert heavy == []
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    assert lines[0].endswith((".", "?")) and lines[1] == ""
    assert lines[2].startswith((f"    python -m {MODULES[word]} ", "    source <(jaxrl completion"))


@pytest.mark.parametrize(("words", "told"), NO_WORK)
def test_what_needs_no_work_is_said_before_jax_is_imported(answered, words, told):
    status, out, err, heavy = answered[tuple(words)]
    said = out + err
    assert told in said and "Traceback" not in said
    assert status == (2 if "error: " in said else 0)
    assert "jax" not in heavy


@pytest.mark.slow
def test_what_the_environment_of_a_job_says_reaches_the_run():
    """`joined_main` reads it: a process of a job does not answer before it has joined."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl", "train", "quikstart"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "JAX_COORDINATOR_ADDRESS=127.0.0.1:1 without JAXRL_NUM_PROCESSES" in done.stderr


def test_a_command_runs_as_its_module_does(tmp_path):
    """Words, exit status, and modules of the working directory: as of `python -m`."""
    done = jaxrl("audit", "nowhere", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "nowhere" in done.stderr


def test_recipes_are_listed_with_their_purpose(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert recipes.main([]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert [line.split()[0] for line in lines] == sorted(recipe_files())
    assert max(map(len, lines)) > 100  # a pipe has no width
    assert "..." not in text
    assert "  A 126k-parameter model learns to sort three digits" in text


def test_recipes_fit_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert recipes.main([]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_files_of_configs_that_are_no_recipes_do_not_spoil_the_list(tmp_path, capsys, monkeypatch):
    configs = tmp_path / "configs"
    configs.mkdir()
    (configs / "zbroken.py").write_text("def get_config(:\n")
    (configs / "zbinary.py").write_bytes(b"\xff\x00")
    (configs / "ztables.py").write_text("'Tables of the others.'\n")
    (configs / "zalias.py").write_text("'Another name.'\nfrom ztables import get_config\n")
    monkeypatch.chdir(tmp_path)
    assert recipes.main(["z"]) == 0
    text, error = capsys.readouterr()
    assert not error
    shown = [line.split(maxsplit=1) for line in text.splitlines() if line.startswith("z")]
    assert [name for name, _ in shown] == ["zalias", "zbinary", "zbroken"]
    assert shown[0][1] == "Another name."
    assert all(what.startswith("cannot be read: ") for _, what in shown[1:])


REGISTERS = """
from pathlib import Path

from jaxrl import config as cfg, envs

class Mine(envs.Env):
    pass

envs.register("mine_of_a_recipe", Mine)
with open("runs.txt", "a") as file:
    file.write("ran\\n")
print("said by the recipe")

def get_config():
    Path("made").mkdir()
    return {"trainer": {"epochs": 0}}
"""


@pytest.mark.some(1)
@pytest.mark.parametrize("words", [["train"], ["sft"], ["plan", "--estimate"], ["evaluate"]])
def test_a_recipe_runs_once(tmp_path, words):
    (tmp_path / "recipe.py").write_text(REGISTERS)
    done = jaxrl(*words, "recipe.py", cwd=tmp_path)
    assert (tmp_path / "runs.txt").read_text() == "ran\n"
    assert done.stdout.count("said by the recipe") == 1
    assert done.returncode == 2  # the config is wrong: after all imports `main` says so
    assert "recipe.py" not in done.stderr and "Traceback" not in done.stderr
