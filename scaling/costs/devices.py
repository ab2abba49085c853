"""Accelerators: what their data sheets promise, and what was measured of it.

Rates are of dense products (the larger figures of some sheets suppose that half of the
numbers are zero). Bandwidths are bytes per second; that of the link counts one
direction, half of what sheets print for NVLink. Sizes are in bytes, a GB being 1e9.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

type Precision = Literal["float32", "bfloat16", "float8"]

BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
"""Of one number."""


class Device(NamedTuple):
    """One accelerator.

    Attributes:
      name: as the tables call it.
      memory_bytes: of its own memory.
      bandwidth: of that memory, bytes per second.
      bfloat16: dense products of 16-bit numbers, operations per second; float16 on
        those that know no bfloat16.
      float8: the same of 8-bit ones, 0 where there are none.
      float32: the same in float32 without tensor cores.
      link: bytes per second to a neighbour, one direction.
      source: the data sheet.
      measured_products: the best 16-bit products that somebody measured, 0: unknown.
      measured_bandwidth: the same of memory.
      measured_source: who.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    bfloat16: float
    float8: float
    float32: float
    link: float
    source: str
    measured_products: float = 0.0
    measured_bandwidth: float = 0.0
    measured_source: str = ""

    def rate(self, precision: Precision) -> float:
        """Operations per second at a precision.

        Raises:
          ValueError: the device has no units for it.
        """
        rates = {
            "bfloat16": self.bfloat16,
            "float8": self.float8,
            "float32": self.float32,
        }
        if not (rate := rates[precision]):
            raise ValueError(f"{self.name} has no units for {precision}")
        return rate

    def ridge(self, precision: Precision = "bfloat16") -> float:
        """Operations per byte from which on products, not memory, take the time.

        An A100 of 40 GB: 312e12 / 1555e9 = 200.6.

        Source: Williams et al. 2009, "Roofline", doi:10.1145/1498765.1498785.
        """
        return self.rate(precision) / self.bandwidth


_BEKMAN = "Bekman, Machine Learning Engineering, table of achievable products (2025)"

_ALL = (
    Device(
        *("v100", 32e9, 900e9, 125e12, 0.0, 15.7e12, 150e9),
        source="NVIDIA V100 SXM2 data sheet, 2020; half precision only",
        measured_bandwidth=750e9,
        measured_source="Jia et al. 2018, arXiv:1804.06826, table 3.1",
    ),
    Device(
        *("t4", 16e9, 320e9, 65e12, 0.0, 8.1e12, 16e9),
        source="NVIDIA T4 product brief, 2019; half precision only; PCIe 3 x16",
        measured_bandwidth=220e9,
        measured_source="Jia et al. 2019, arXiv:1903.07486, table 3.1",
    ),
    Device(
        *("a10", 24e9, 600e9, 125e12, 0.0, 31.2e12, 32e9),
        source="NVIDIA A10 data sheet, 2021; PCIe 4 x16",
    ),
    Device(
        *("a100-40gb", 40e9, 1555e9, 312e12, 0.0, 19.5e12, 300e9),
        source="NVIDIA A100 SXM 40 GB data sheet, 2020",
        measured_products=267.9e12,
        measured_source=_BEKMAN,
    ),
    Device(
        *("a100-80gb", 80e9, 2039e9, 312e12, 0.0, 19.5e12, 300e9),
        source="NVIDIA A100 SXM 80 GB data sheet, 2022",
        measured_products=267.9e12,
        measured_source=_BEKMAN,
    ),
    Device(
        *("l4", 24e9, 300e9, 121e12, 242e12, 30.3e12, 32e9),
        source="NVIDIA L4 data sheet, 2023, without sparsity; PCIe 4 x16",
    ),
    Device(
        *("l40s", 48e9, 864e9, 362e12, 733e12, 91.6e12, 32e9),
        source="NVIDIA L40S data sheet, 2023, without sparsity; PCIe 4 x16",
    ),
    Device(
        *("h100", 80e9, 3350e9, 989.4e12, 1978.9e12, 66.9e12, 450e9),
        source="NVIDIA H100 SXM data sheet, 2023, without sparsity",
        measured_products=794.5e12,
        measured_source=_BEKMAN,
    ),
    Device(
        *("h100-pcie", 80e9, 2000e9, 756e12, 1513e12, 51.2e12, 300e9),
        source="NVIDIA H100 PCIe data sheet, 2023, without sparsity; NVLink bridge",
    ),
    Device(
        *("h800", 80e9, 3350e9, 989.4e12, 1978.9e12, 66.9e12, 200e9),
        source="as H100 with NVLink of 400 GB/s in both directions together",
    ),
    Device(
        *("h200", 141e9, 4800e9, 989.4e12, 1978.9e12, 66.9e12, 450e9),
        source="NVIDIA H200 SXM data sheet, 2024, without sparsity",
    ),
    Device(
        *("b200", 180e9, 7700e9, 2250e12, 4500e12, 75e12, 900e9),
        source="NVIDIA HGX B200 data sheet, 2025, without sparsity",
        measured_products=1745e12,
        measured_source=_BEKMAN,
    ),
    Device(
        *("mi300x", 192e9, 5300e9, 1307.4e12, 2614.9e12, 163.4e12, 64e9),
        source="AMD MI300X data sheet, 2023, without sparsity; one of 7 links",
    ),
    Device(
        *("tpu-v5e", 16e9, 819e9, 197e12, 0.0, 0.0, 50e9),
        source="Google Cloud TPU v5e documentation; one of 4 links",
    ),
    Device(
        *("tpu-v5p", 95e9, 2765e9, 459e12, 0.0, 0.0, 100e9),
        source="Google Cloud TPU v5p documentation; one of 6 links",
    ),
)

DEVICES: Mapping[str, Device] = {device.name: device for device in _ALL}
"""All that are known, by name."""

_OTHER_NAMES = {
    "a100": "a100-80gb",
    "a100-40": "a100-40gb",
    "a100-80": "a100-80gb",
    "h100-sxm": "h100",
    "h200-sxm": "h200",
}


def find(name: str) -> Device:
    """Finds a device; case does not matter, and `a100` is the one of 80 GB.

    Raises:
      ValueError: it is not known; the line lists those that are.
    """
    key = name.lower().replace("_", "-")
    key = _OTHER_NAMES.get(key, key)
    if key not in DEVICES:
        raise ValueError(f"unknown device {name!r}; one of: {', '.join(DEVICES)}")
    return DEVICES[key]
