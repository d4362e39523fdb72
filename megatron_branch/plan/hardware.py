"""What machines can do: published peaks, and stated assumptions about how much of them a program gets.

Always true:
- rates are per device: FLOP/s of dense bfloat16 products, bytes per second in one direction;
- a rate of the table is a published peak; what is assumed stands in `Assumptions` and can be changed there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device and its share of the host.

    Attributes:
        name: as in the table.
        memory_bytes: of the device.
        flops: peak of dense bfloat16 matrix products, FLOP/s.
        memory_rate: of device memory, bytes/s.
        link_rate: to the other devices of the machine, bytes/s in one direction.
        host_rate: to host memory, bytes/s in one direction.
        host_bytes: host memory per device; an assumption about the machine around it.
        disk_bytes, disk_rate: local disk per device; likewise.
        per_machine: devices that `link_rate` joins.
    """

    name: str
    memory_bytes: int
    flops: float
    memory_rate: float
    link_rate: float
    host_rate: float
    host_bytes: int = 256 * GIB
    disk_bytes: int = 3500 * GIB
    disk_rate: float = 5e9
    per_machine: int = 8


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Shares of the peaks that are reached; nothing here was measured on these devices.

    Attributes:
        gemm: of `flops`, by the products of linear layers and head.
        attention: of `flops`, by attention kernels.
        link: of `link_rate`, by collectives.
        host: of `host_rate` and `disk_rate`, by copies.
        pass_s: seconds that a layer of a pass takes beside its products (launches, norms), forward; a backward twice.
        memory: of `memory_bytes`, host and disk, that a run can have: the rest is the driver's, the collectives' and
            what the allocator wastes.
    """

    gemm: float = 0.70
    attention: float = 0.55
    link: float = 0.70
    host: float = 0.80
    pass_s: float = 3e-4
    memory: float = 0.92


# Data sheets of NVIDIA: "H100 Tensor Core GPU", "H200 Tensor Core GPU", "DGX B200" (an eighth of the system), "A100
# 80GB SXM"; H20 as its vendors publish it. FLOP/s without sparsity; NVLink and PCIe figures count both directions, so
# half of them. Memory in GiB, as the driver reports it nearly.
HARDWARE: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        Hardware("A100", 80 * GIB, 312e12, 2.04e12, 300e9, 32e9),
        Hardware("H100", 80 * GIB, 989e12, 3.35e12, 450e9, 64e9),
        Hardware("H200", 141 * GIB, 989e12, 4.8e12, 450e9, 64e9),
        Hardware("H20", 96 * GIB, 148e12, 4.0e12, 450e9, 64e9),
        Hardware("B200", 180 * GIB, 2250e12, 8.0e12, 900e9, 64e9),
    )
}
THIS_MACHINE = "this_machine"


def parse_hardware(text: str) -> tuple[int, str]:
    """`8xH20` as number and name; a name alone is one device.

    Raises:
        ValueError: it is not of this form, or the name is unknown.
    """
    found = re.fullmatch(r"(?:([1-9][0-9]*)x)?(\w+)", text)
    names = [*HARDWARE, THIS_MACHINE]
    if found is None or found[2] not in names:
        raise ValueError(f"--hardware {text}: must be NUMBERxNAME with a name of {', '.join(names)}; for example 8xH20")
    return int(found[1] or 1), found[2]
