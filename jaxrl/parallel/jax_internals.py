"""All that jaxrl takes of JAX's private modules, which any version of JAX may move.

Nothing public says: who coordinates the processes of a job, and what its table holds; whether
devices were asked for already; how a process other than the first writes compiled programs; cuDNN's
attention over pages. tests/parallel/test_jax_internals.py says what of them is relied upon.
"""

import os
from typing import Any

from jax._src import compilation_cache, compiler
from jax._src.distributed import global_state
from jax._src.xla_bridge import backends_are_initialized

COMPILER_FILE = os.path.join("jax", "_src", "compiler.py")  # in the stack of what compiles
COMPILE_LOGGER = "jax._src.interpreters.pxla"  # tells what is compiled, and for which shapes

__all__ = [
    "COMPILER_FILE",
    "COMPILE_LOGGER",
    "backends_are_initialized",
    "compilation_cache",
    "compiler",
    "fused_attention",
    "global_state",
]


def fused_attention() -> Any:
    """Return the module of cuDNN's attention, which is imported where a GPU asks for it."""
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo
