"""What docs/security.md promises and no other test keeps."""

import ast
import contextlib
import json
import re
from pathlib import Path

import pytest

import jaxrl
from jaxrl.config import TrainConfig
from jaxrl.data.tokenizer import character_tokenizer, load_tokenizer

ROOT = Path(jaxrl.__file__).parent
PAGE = (ROOT.parent / "docs" / "security.md").read_text(encoding="utf-8")
UNPICKLED = {  # what reads a pickle: "loads", or `recv` of a multiprocessing connection
    "parallel/processes.py",
    "parallel/streams.py",
    "rollout/native/followed.py",
    "rollout/weights/share.py",
    "registry/__init__.py",
    "registry/pickling.py",
    "cluster/experiment.py",
    "rollout/conversations/across_processes.py",
}
READERS = re.compile(
    r"(cloud)?pickle\.loads?|\w+\._?stream\.recv|stream\.recv|torch\.load|joblib\.load"
)


def calls(path):
    """(function, call) of every call in a file, the function as it is written."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.check
def test_nothing_is_unpickled_but_what_the_page_names():
    found, unsafe = set(), []
    for path in ROOT.rglob("*.py"):
        name = str(path.relative_to(ROOT))
        for function, call in calls(path):
            if READERS.fullmatch(function):
                found.add(name)
            true = {word.arg for word in call.keywords if ast.unparse(word.value) == "True"}
            if true & {"allow_pickle", "trust_remote_code"} or function in ("eval", "yaml.load"):
                unsafe.append((name, function))
    assert found == UNPICKLED
    assert not unsafe
    for name in UNPICKLED:
        assert f"`{name}`" in PAGE or f"`{name.partition('/')[0]}/`" in PAGE


@pytest.mark.check
def test_every_promise_names_a_test_that_is_there():
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))
    assert len(named) > 10
    assert not [path for path in named if not (ROOT.parent / path).exists()]


@pytest.mark.check
def test_servers_listen_on_loopback_unless_asked():
    engine = TrainConfig().generator.inference_engine
    assert engine.http_endpoint_host == "127.0.0.1"
    assert TrainConfig().serve.weights_root is None and not TrainConfig().serve.receive_weights


@pytest.mark.parametrize("tokenizer_json", [True, False])
def test_code_in_a_model_folder_never_runs(tmp_path, monkeypatch, tokenizer_json):
    """Not for a tokenizer that is nothing but code either, whatever stands on standard input."""
    tokenizer = character_tokenizer("0123456789> ")
    tokenizer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "Evil"
    settings["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "evil.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "class Evil(PreTrainedTokenizerFast): pass\n"
    )
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    if tokenizer_json:
        with contextlib.suppress(ValueError):
            load_tokenizer(tmp_path)
    else:
        (tmp_path / "tokenizer.json").rename(tmp_path / "vocab.json")
        with pytest.raises(ValueError, match="is code in that folder, which jaxrl does not run"):
            load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()
