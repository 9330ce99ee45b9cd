"""A folder in which the commands of a page run as in a clone, without what would take long."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jaxrl.models.export import save_pretrained
from jaxrl.models.transformer import TransformerConfig, init_params
from tests import quick_compile
from tests.docs.pages import ROOT, Block, blocks

CLONED = ("configs", "examples", "benchmarks", "docs", "tpu", "Makefile", "pyproject.toml")
SECONDS = 600  # of one page
MODEL = TransformerConfig(
    vocab_size=2048,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
# `config` and `trainer` are there, as on the pages; runs are short (shorten.py).
PREAMBLE = """
import sys
import jaxrl.config
from tests.docs.shorten import short_loader
jaxrl.config.load_config_file = short_loader()
config = jaxrl.config.default_config()
trainer = config.trainer
"""


def clone(folder: Path) -> None:
    """The files of the repository, a `.venv` whose python is shorten.py, and one small model."""
    for name in CLONED:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, folder / name)
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, line in (
        ("python", f'exec {sys.executable} {ROOT}/tests/docs/shorten.py "$@"'),
        ("jaxrl", f'exec {sys.executable} {ROOT}/tests/docs/shorten.py -m jaxrl "$@"'),
        ("pip", "exit 0"),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    (programs / "activate").touch()
    (folder / ".venv" / ".installed").touch()  # what the Makefile looks for
    save_model(folder / "models" / "smollm2-135m-instruct")


def save_model(folder: Path) -> None:
    """A Hugging Face folder in place of a pretrained one: random weights, and a tokenizer that
    knows the words of the documentation."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MODEL.vocab_size,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train([str(path) for path in sorted((ROOT / "docs").glob("*.md"))], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        chat_template=(
            "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>{% endif %}"
        ),
    )
    save_pretrained(folder, MODEL, init_params(MODEL, 0), tokenizer)


def play(folder: Path, page: Path) -> str:
    """Run what a page shows, from top to bottom, then its Python; what went wrong."""
    told = [block for block in blocks(page) if block.runs]
    for block in told:
        if block.file:
            (folder / block.file).write_text(block.text)
    for block in told:
        if block.shell and (wrong := run_shell(folder, block)):
            return wrong
    program = [block.text for block in told if block.language == "python" and not block.file]
    if not program:
        return ""
    (folder / "page.py").write_text("\n".join([PREAMBLE, *program]))
    return run(folder, ".venv/bin/python page.py", f"{page}: its Python")


def run_shell(folder: Path, block: Block) -> str:
    """What must have run before, and then the block; what went wrong."""
    before = block.marks.get("run after")
    if before and (wrong := run(folder, before, f"{block}, before it")):
        return wrong
    return run(folder, block.shell, str(block), int(block.marks.get("exit status", 0)))


def run(folder: Path, shell: str, what: str, status: int = 0) -> str:
    """Empty if the commands end with `status`, the first that fails ending them."""
    programs = f"{folder}/.venv/bin{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {
        "PATH": programs,
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": quick_compile.FLAGS,  # one device: as a reader has
    }
    command = ["bash", "-e", "-o", "pipefail", "-c", shell]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said = process.communicate()[0] + f"\nnot finished within {SECONDS} s"
    if process.returncode == status:
        return ""
    return f"{what}: exit status {process.returncode}, not {status}\n{shell}\n{said[-4000:]}"
