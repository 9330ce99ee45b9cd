"""Generate docs/configuration.md: every field, from the schema and its status."""

import os
from pathlib import Path
from typing import Any

from jaxrl.config.dataclass_config import (
    BaseConfig,
    field_docs,
    field_values,
    is_config,
)
from jaxrl.config.field_status import SAME_DEFAULT, FieldStatus, status_of
from jaxrl.config.train_config import TrainConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"

_INTRODUCTION = """# Configuration

<!-- Written by `python -m docs.generate`; edit jaxrl/config/, not this page. -->

After this page you can set any field of a run, in a recipe, on the command line or in Python.

A run is described by one `TrainConfig` (`SkyRLTrainConfig` is the same class): nested dataclasses
with SkyRL's field names. There are three ways to set a value, all checked against the schema.

**In a recipe.** A Python file with a function `get_config()`:

```python
from jaxrl.config import default_config


def get_config():
    config = default_config()  # all fields, locked: a misspelt name is an error
    config.trainer.algorithm.policy_loss_type = "gspo"
    config.trainer.algorithm.loss_reduction = "sequence_mean"
    config.generator.eval_sampling_params = {"temperature": 0.6, "max_generate_length": 512}
    return config
```

**On the command line**, over the recipe: a name, such as quickstart, or a file. `jaxrl recipes`
lists the names; `--config=RECIPE` is the same as RECIPE alone. Values are read by the type of their
field; `None`, lists and dicts are written as in Python:

<!-- not run: recipe and data are yours -->
```bash
jaxrl train configs/my_recipe.py --config.trainer.seed=1 \\
    --config.data.train_data="['a.parquet', 'b.parquet']" \\
    --config.trainer.algorithm.advantage_kwargs.epsilon=1e-4
```

A dict given for a group of fields is merged into the group; a dict given for a dict-typed field
replaces it, and `field.key=value` sets one key of it.

**In Python**: `TrainConfig.from_cli_overrides(["trainer.seed=1"])`,
`TrainConfig.from_dict_config({"trainer": {"seed": 1}})`, or attributes of `TrainConfig()`.

**Your own fields.** Derive a class; functions that receive the `AlgorithmConfig` see the field:

```python
from dataclasses import dataclass

from jaxrl.config import AlgorithmConfig, make_config


@dataclass
class MyAlgorithmConfig(AlgorithmConfig):
    my_param: int = 42


MyConfig = make_config(algorithm_cls=MyAlgorithmConfig)
config = MyConfig.from_cli_overrides(["trainer.algorithm.my_param=7"])
```

A recipe returns such a config itself. Every config is hashable and a static pytree: it may be an
argument of a jitted function, which then compiles once per distinct value. Do not change a config
after the run has started.

Before a run, `resolve` fills the fields that follow from others, `validate` checks everything and
`objective_card` prints the resulting objective and batch arithmetic.

## All fields

Status: **implemented** as in SkyRL; **mapped** to its counterpart in JAX; **inert**: accepted with
a warning, it has no counterpart. "SkyRL default" is filled where ours differs.

| field | default | meaning here | status | difference from SkyRL | SkyRL default |
|---|---|---|---|---|---|
"""


def page() -> str:
    """Return the text of docs/configuration.md."""
    return _INTRODUCTION + "\n".join(_table_rows(TrainConfig(), "")) + "\n"


def _table_rows(config: BaseConfig, prefix: str) -> list[str]:
    docs, lines = field_docs(type(config)), []
    for name, value in field_values(config).items():
        key = prefix + name
        if is_config(value):
            lines += _table_rows(value, f"{key}.")
            continue
        row = status_of(key)
        assert row is not None, key
        skyrl = "" if row.skyrl_default is SAME_DEFAULT else shown(row.skyrl_default)
        cells = [f"`{key}`", shown(value), docs[name], row.status, _difference(row), skyrl]
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return lines


def _difference(row: FieldStatus) -> str:
    return "; ".join(p for p in (row.note, f"used with {row.only_with}" * bool(row.only_with)) if p)


def shown(value: Any) -> str:
    """Print a value as in Python, the same for every user."""
    return f"`{value!r}`".replace(os.path.expanduser("~") + "/", "~/")
