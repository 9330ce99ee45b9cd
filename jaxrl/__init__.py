"""jaxrl: reinforcement-learning post-training of language models in JAX."""

import importlib
import os
import sys
from typing import Any

# transformers warns whoever has no PyTorch that it cannot run models; here JAX runs them.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

__version__ = "0.1.0"

__all__ = ["__version__", "fit"]


def __getattr__(name: str) -> Any:
    if name == "fit":  # not above: `import jaxrl` is light
        try:
            return importlib.import_module("jaxrl.tools.fit").fit
        except ModuleNotFoundError as error:
            if str(error.name).startswith("jaxrl"):
                raise
            fix = "source .venv/bin/activate, or pip install -e . in jaxrl's folder"
            raise ModuleNotFoundError(
                f"no module named {error.name!r}: jaxrl's packages are not installed in this "
                f"Python ({sys.executable}): {fix}",
                name=error.name,
            ) from None
    raise AttributeError(f"module 'jaxrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), "fit"]  # a notebook completes it
