"""What all command lines share: help, arguments, one line for an error, exit statuses."""

import subprocess
import sys

import pytest

from jaxrl import cli

pytestmark = pytest.mark.check


@cli.command("how to call it")
def double(argv):
    """Print twice a number, and what else there is."""
    arguments = cli.Arguments()
    arguments.add_argument("number", type=int)
    options, words = arguments.parse_known_args(argv)
    print(2 * options.number, words)
    return cli.DONE


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["3", "--help"], []])
def test_help_is_printed_and_exits_0(argv, capsys):
    assert double(argv) == 0
    assert capsys.readouterr().out == "how to call it\n"


def test_a_command_that_needs_arguments_is_refused_without(capsys):
    bare = cli.command("how to call it", bare=cli.REFUSED)(lambda argv: cli.DONE)
    assert (bare([]), bare(["--help"]), bare(["x"])) == (2, 0, 0)
    assert capsys.readouterr() == ("how to call it\n",) * 2  # what is refused is no output


def test_help_behind_the_arguments_of_another_program_is_not_meant(capsys):
    wraps = cli.command("how to call it", help_first=True)(len)
    assert (wraps(["--help", "x"]), wraps(["run.sh", "-h", "10.0.0.1"])) == (0, 3)


def test_arguments_are_those_of_the_process_where_none_are_given(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["double", "4", "--config=x.py"])
    assert double() == 0
    assert capsys.readouterr().out == "8 ['--config=x.py']\n"


def test_a_wrong_argument_is_one_line_on_stderr(capsys):
    assert double(["four"]) == 2
    error = "error: argument number: invalid int value: 'four'; --help shows the whole command\n"
    assert capsys.readouterr() == ("", error)


def test_a_shortened_flag_is_none():
    arguments = cli.Arguments()
    arguments.add_argument("--checkpoint")
    with pytest.raises(ValueError, match="unrecognized arguments: --check=x"):
        arguments.parse_args(["--check=x"])
    for word in ("-c", "--check=x", "--chekpoint"):
        with pytest.raises(ValueError, match=f"{word}; did you mean --checkpoint. --help shows"):
            arguments.parse_args([word])
    with pytest.raises(ValueError, match="unrecognized arguments: -x; --help shows"):
        arguments.parse_args(["-x"])


@pytest.mark.parametrize(
    ("error", "mended"),
    [(ValueError("seed"), True), (FileNotFoundError("file"), True), (KeyError("x"), False)],
)
def test_only_what_a_user_can_mend_loses_its_traceback(error, mended, capsys):
    def fail(argv):
        raise error

    main = cli.command("how to call it")(fail)
    if not mended:
        with pytest.raises(type(error)):
            main(["x"])
        return
    assert main(["x"]) == 2
    assert capsys.readouterr().err == f"error: {error}\n"


def test_the_launcher_reads_the_statuses_without_jax():
    code = "import sys, jaxrl.cli, jaxrl.cluster.supervise; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


PROGRAM = """
import logging, warnings
from jaxrl.cli import plain_warnings
with plain_warnings():
    for _ in range(2):
        warnings.warn("lr is large")
    logging.getLogger("jaxrl.rollout").warning("judge %d failed", 3)
    try:
        1 / 0
    except ZeroDivisionError:
        logging.getLogger("asyncio").exception("a task failed")
    logging.getLogger("jaxrl.rollout").info("not shown")
warnings.warn("outside")
"""


WITHIN = """
import logging
from jaxrl.cli import plain_warnings
logging.basicConfig(level=logging.INFO)  # as absl does on import
with plain_warnings():
    with plain_warnings():
        logging.getLogger("jaxrl.rollout").warning("judge %d failed", 3)
    logging.getLogger("jaxrl.rollout").warning("judge %d failed", 4)
    logging.info("of the user's")
logging.warning("outside")
"""


def test_a_block_in_a_block_and_a_handler_that_was_there_print_a_warning_once():
    done = subprocess.run(
        [sys.executable, "-c", WITHIN], check=True, capture_output=True, text=True
    )
    assert done.stderr.splitlines() == [
        "warning: judge 3 failed",
        "warning: judge 4 failed",
        "INFO:root:of the user's",
        "WARNING:root:outside",
    ]


def test_warnings_of_python_and_logging_look_the_same():
    """In a process of its own: pytest records what is warned of."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert lines[:3] == [
        "warning: lr is large",
        "warning: judge 3 failed",
        "warning: a task failed: ZeroDivisionError('division by zero')",
    ]
    assert lines[3] == "<string>:13: UserWarning: outside"
    assert all(line.startswith(" ") for line in lines[4:])  # its source, from Python 3.13 on
