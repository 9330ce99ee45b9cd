"""Measure how far every family is from transformers, and the engine from the forward.

    JAX_PLATFORMS=cpu python -m benchmarks.families [NAME ...]

Tiny random models of `tests/models/tiny.py`, in float32 on the CPU; the numbers go to
docs/families.json, which `docs.generate` makes docs/models.md of. NAME limits it to some models,
whose numbers replace those in the file.
"""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxrl.models import load_config, load_params
from tests.models import tiny

RESULTS = Path(__file__).parents[1] / "docs" / "families.json"


def measure(name: str) -> dict[str, float | str]:
    """Return the greatest differences of a model, by what was checked."""
    model_type, fields = tiny.MODELS[name]
    model = tiny.random_hf_model(model_type, **fields)
    with tempfile.TemporaryDirectory() as folder:
        theirs = Path(folder, "theirs")
        model.save_pretrained(theirs)
        config = load_config(theirs)
        params = load_params(theirs, config)
        return {
            "family": model_type,
            "logits": tiny.logits_apart(model, config, params),
            "export": tiny.export_apart(config, params, model, Path(folder, "ours")),
            "packing": tiny.packing_apart(config, params),
            "decoding": tiny.decoding_apart(config, params),
            "adapters": tiny.lora_apart(config, params, Path(folder, "adapter")),
            # last: it overwrites the model's parameters
            "gradients": tiny.gradients_apart(model, config, params, Path(folder, "gradients")),
        }


def main(names: list[str]) -> None:
    """Measure the named models, or all."""
    if unknown := set(names) - set(tiny.MODELS):
        sys.exit(f"there is no model {', '.join(sorted(unknown))}; known: {', '.join(tiny.MODELS)}")
    held: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"models": {}}
    for name in names or tiny.MODELS:
        found = measure(name)
        held["models"][name] = found
        print(name, json.dumps(found), flush=True)
        held["transformers"] = version("transformers")
        held["models"] = {k: held["models"][k] for k in tiny.MODELS if k in held["models"]}
        RESULTS.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
