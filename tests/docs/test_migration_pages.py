"""The migration pages: what they name exists, what they show runs, what is generated is current."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from docs.generate.migration import PAGE, page, with_tables
from jaxrl.config import TrainConfig, load_config_file, resolve, validate
from jaxrl.config.dataclass_config import config_class, field_types
from jaxrl.config.from_skyrl import main
from tests.config.test_schema import SEED

pytestmark = pytest.mark.check
TEXT = PAGE.read_text()
VERL_AND_TRL = (PAGE.parent / "migrating_from_verl_and_trl.md").read_text()


def rows(text, heading):
    """The cells of the table rows under a heading, up to the next one."""
    part = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.split(" | ")] for line in lines]


def is_field(key):
    kind = TrainConfig
    for name in key.split("."):
        types = field_types(kind) if kind is not None else {}
        if name not in types:
            return False
        kind = config_class(types[name])
    return True


def test_the_tables_are_what_the_schema_generates():
    assert page() == TEXT, "run python -m docs.generate"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("| `trainer.strategy` |", "| `trainer.stratgy` |", r"`trainer.stratgy`: .* found set\(\)"),
        ("`data.train_data`, `val_data`", "`data.train_data`", r"write \['data.val_data'\] into"),
        ("`trainer.strategy`", "`trainer.strategy`, `seed`", "the fields differ"),
    ],
)
def test_a_row_of_other_fields_is_named(old, new, message):
    assert old in TEXT
    with pytest.raises(ValueError, match=message):
        with_tables(TEXT.replace(old, new))


def test_every_documented_field_is_on_the_page():
    fields = TEXT.partition("## Fields")[2].partition("## Calls")[0]
    missing = [
        key
        for key in SEED
        if f"`{key.rpartition('.')[2]}`" not in fields
        and f".{key.rpartition('.')[2]}`" not in fields
        and not re.search(r"`trainer\.\*?[\w.*]*(moe_|ddp_config|profiler_config|token_mask_)", key)
    ]
    wildcards = ("moe_", "ddp_config", "profiler_config", "off_policy_correction", "kl_ctrl")
    wildcards += ("sapo", "clip_cov", "kl_cov", "dynamic_sampling", "text2sql", "search", "judge")
    assert [k for k in missing if not any(w in k for w in wildcards)] == []


@pytest.mark.parametrize("heading", ["verl", "TRL"])
def test_every_field_that_verl_and_trl_map_to_exists(heading):
    table = rows(VERL_AND_TRL, heading)
    assert len(table) > 30
    for _, ours, note in table:
        names = re.findall(r"`([\w.]+)`", ours)
        assert names, ours
        names += [n for n in re.findall(r"`([\w.]+)", note) if n.startswith("trainer.")]
        assert [name for name in names if not is_field(name)] == []


def test_every_call_imports():
    table = rows(TEXT, "Calls")
    assert len(table) > 15
    for _, ours, _ in table:
        for name in re.findall(r"`(jaxrl[\w.]*)`", ours):
            module, _, attribute = name.rpartition(".")
            found = importlib.import_module(module)
            if not hasattr(found, attribute):
                importlib.import_module(name)


def test_the_commands_run(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "run_gsm8k.sh").write_text("uv run -m skyrl.train.entrypoints.main_base $@\n")
    (tmp_path / "config.yaml").write_text("trainer: {seed: 2}\n")
    monkeypatch.chdir(tmp_path)
    block = TEXT.partition("```bash\n")[2].partition("```")[0]
    commands = [shlex.split(line) for line in block.splitlines()]
    assert [c[2] for c in commands] == 3 * ["jaxrl.config.from_skyrl"] + ["jaxrl.train"]
    for command in commands[:3]:
        assert main(command[3:]) == 0
        config = load_config_file("configs/mine.py")
        assert config.trainer.flash_attn is True
    assert commands[3][3] == "--config=configs/mine.py"  # trained in test_from_skyrl


def test_the_tutorials_recipe_for_a_cpu_has_the_scripts_algorithm(tmp_path, monkeypatch):
    page = (PAGE.parent / "tutorials" / "from_skyrl.md").read_text()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    words = ["trainer.algorithm.policy_loss_type=dual_clip", "trainer.algorithm.use_kl_loss=true"]
    words += ["generator.n_samples_per_prompt=8", "trainer.placement.policy_num_gpus_per_node=8"]
    assert main(["--output", "configs/mine.py", *words]) == 0
    (tmp_path / "configs/my_cpu.py").write_text(
        page.partition("```python\n")[2].partition("```")[0]
    )
    config = load_config_file("configs/my_cpu.py")
    validate(resolve(config), num_devices=1)
    assert config.trainer.algorithm.policy_loss_type == "dual_clip"
    assert config.generator.n_samples_per_prompt == 8
    assert config.environment.env_class == "sort_digits"


def test_the_pages_are_linked():
    assert "tutorials/from_skyrl.md" in TEXT
    assert "migrating_from_skyrl.md" in VERL_AND_TRL
    assert "migrating_from_verl_and_trl.md" in TEXT
    for text in (TEXT, VERL_AND_TRL):
        for link in re.findall(r"\]\(([\w_]+\.md)", text):
            assert (Path(PAGE).parent / link).is_file(), link
