"""What accelerators can do: memory, rate, bandwidths, as their makers give them; one table.

Sources. TPUs: the "key specifications" of docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x},
of v3 Jouppi et al., 2020, https://doi.org/10.1145/3360307; the memory from v4 on is what the
compiler says a program may use (libtpu 0.0.42, "available HBM"), less than the nominal size; that
of a host is of the VM types there (v5e: 192 GB for 4 chips, v5p: 448). GPUs: the maker's data
sheets (dense bfloat16 without sparsity, nominal memory).
"""

from dataclasses import dataclass
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """Describe one device as JAX counts them; a core where a chip is two of them.

    Attributes:
        name: as in `--topology`.
        kind: part of `device_kind`.
        hbm: bytes that programs may use.
        flops: dense bfloat16 FLOP/s.
        bandwidth: bytes/s of its memory.
        network: bytes/s that it sends over all its links to its neighbours (ICI, NVLink or PCIe).
        links: to its neighbours in a torus; 2 where a switch gives all of `network` to any two.
        host: bytes of a host's memory for each of its chips; None = not looked up, or not fixed.
    """

    name: str
    kind: str
    hbm: float
    flops: float
    bandwidth: float
    network: float
    links: int = 2
    host: float | None = None

    @property
    def ring(self) -> float:
        """Return the bytes/s that it sends in a ring, which goes through each chip by two links."""
        return self.network * 2 / self.links


CHIPS = (  # the first whose kind is part of a device's
    Chip("tpu7x", "TPU7x", 94.75 * GIB, 1153.5e12, 3690e9, 300e9, 6),  # one of two cores
    Chip("v6e", "TPU v6", 31.25 * GIB, 918e12, 1638e9, 400e9, 4),
    Chip("v5e", "TPU v5 lite", 15.75 * GIB, 197e12, 819e9, 200e9, 4, 48e9),
    Chip("v5e", "TPU v5e", 15.75 * GIB, 197e12, 819e9, 200e9, 4, 48e9),
    Chip("v5p", "TPU v5", 95.74 * GIB, 459e12, 2765e9, 600e9, 6, 112e9),
    Chip("v4", "TPU v4", 30.75 * GIB, 275e12, 1200e9, 300e9, 6),
    Chip("v3", "TPU v3", 16 * GIB, 61.5e12, 450e9, 164e9, 4),  # one of two cores
    Chip("b200", "B200", 180e9, 2250e12, 8000e9, 900e9),
    Chip("h200", "H200", 141e9, 989e12, 4800e9, 450e9),
    Chip("h100-pcie", "H100 PCIe", 80e9, 756e12, 2000e9, 64e9),
    Chip("h100", "H100", 80e9, 989e12, 3350e9, 450e9),
    Chip("a100-40gb", "A100-SXM4-40GB", 40e9, 312e12, 1555e9, 300e9),
    Chip("a100-40gb", "A100-PCIE-40GB", 40e9, 312e12, 1555e9, 32e9),
    Chip("a100", "A100", 80e9, 312e12, 2039e9, 300e9),
    Chip("l40s", "L40S", 48e9, 362e12, 864e9, 32e9),
    Chip("l4", "L4", 24e9, 121e12, 300e9, 32e9),
    Chip("t4", "T4", 16e9, 8.1e12, 320e9, 16e9),  # of float32: it has no bfloat16
)


def chip_of(device: Any) -> Chip | None:
    """Return the kind of a device; None for one that is not in the table, such as a CPU."""
    return next((chip for chip in CHIPS if chip.kind in device.device_kind), None)


def chip_named(name: str) -> Chip | None:
    """Return the kind that a topology names, "v5e" of "v5e:2x4"; None if it is not in the table."""
    return next((chip for chip in CHIPS if chip.name == name.lower()), None)
