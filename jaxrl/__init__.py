"""jaxrl: reinforcement-learning post-training of language models in JAX."""

import os

# transformers warns whoever has no PyTorch that it cannot run models; here JAX runs them.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

__version__ = "0.1.0"
