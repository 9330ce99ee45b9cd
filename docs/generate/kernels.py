"""Generate docs/kernels.md from the tables of operations."""

from pathlib import Path

from jaxrl.models.kernels import OPERATIONS
from jaxrl.models.kernels.choice import REFERENCE, Operation

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
PLATFORMS = {"tpu": "TPU", "gpu": "GPU", "cpu": "CPU"}

_INTRODUCTION = """# Kernels

<!-- Written by `python -m docs.generate` from jaxrl/models/kernels/. -->

After this page you know which kernels a run has, why, and how you name others.

Each operation below has a reference in plain XLA, `xla`, which runs everywhere. The other
implementations are tested against it, value and gradient, on CPUs: Pallas kernels in interpret
mode, cuDNN's call in the form that XLA gives it; tokamax's is lowered for CUDA, where it is
installed. On a platform the first implementation of
its list is taken that can run the model; it says in words what it misses otherwise. The objective
card of a run has a line for each operation of its model. Of a run on a GPU whose engine computes in
float32, with the faster ones and what they miss:

```text
platform     kernel: packed_attention chunked (cudnn needs trainer.use_sample_packing=False;
             tokamax needs the package tokamax)
             kernel: head_log_probs tiles
             kernel: paged_attention xla (cudnn needs an engine in bfloat16)
```

`trainer.kernels` names another one of the platform's, `--config.trainer.kernels` on the command
line takes a dict: `{"packed_attention": "chunked"}`. One that cannot run the model ends the run
before it starts, with what it misses; so does one of an operation that no program of the run has:
`grouped_product` as long as no model has experts, `delta_rule` as long as none has gated DeltaNet
layers, `paged_attention` where the engine is not jaxrl's. `trainer.flash_attn=False` asks for the
reference of `packed_attention`, where `trainer.kernels` names nothing else. Reference and critic
have a line on the card for each kernel in which they differ from the policy, as they may compute in
another dtype.

On GPUs the package tokamax is worth installing: 0.0.17 or later, for Python 3.12 or newer; 0.0.12
for Python 3.11, which is not for JAX 0.11.2 or newer.

On an H100 (jax 0.11.2, tokamax 0.0.17, `python -m jaxrl.prove --quick --again=kernels`) all of a
GPU's hold their bounds in bfloat16, at 8e-5 to 2e-3 of the value and 3e-3 to 4e-3 of the gradient.
One did not: the gradient of tokamax's grouped product by its matrices, off by 0.038, for which
plain XLA stands in since. No TPU has run any: they are compiled by the TPU's compiler.
"""


def _table(operation: Operation) -> str:
    rows = []
    for name, implementation in operation.implementations.items():
        where = [
            f"{shown} {names.index(name) + 1}"
            for platform, shown in PLATFORMS.items()
            if name in (names := operation.order.get(platform, (REFERENCE,)))
        ]
        rows.append(f"| `{name}` | {', '.join(where)} | {implementation.conditions or 'nothing'} |")
    head = "| implementation | platform and place in its list | needs |\n|---|---|---|"
    return f"\n## {operation.name}\n\n{operation.does}.\n\n{head}\n" + "\n".join(rows) + "\n"


def page() -> str:
    """Return the text of the page."""
    return _INTRODUCTION + "".join(_table(operation) for operation in OPERATIONS.values())
