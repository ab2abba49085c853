"""Accelerators: peak rates of data sheets, and measured rates.

Rates are of dense products, without sparsity. Bandwidths are bytes per second; that of
the link counts one direction, half of the figure that data sheets print for NVLink.
Sizes are in bytes; a GB is 1e9 bytes. Memory has two sizes, since drivers report more
or less than the data sheet's round number: 81,559 MiB for an H100 of 80 GB.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

type Precision = Literal["float32", "bfloat16", "float8", "float4"]

BYTES_PER_NUMBER: Mapping[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8": 1,
}
"""Bytes of one number."""


class Device(NamedTuple):
    """One accelerator.

    Attributes:
      name: name in tables.
      memory_bytes: size of its memory as drivers and frameworks report it.
      bandwidth: memory bandwidth in bytes per second.
      bfloat16: dense 16-bit products, operations per second; float16 on devices without
        bfloat16.
      float8: dense 8-bit products, operations per second; 0 if not supported.
      float32: float32 products without tensor cores, operations per second.
      link: bytes per second to a neighbour, one direction.
      source: the data sheet.
      measured_products: highest measured rate of 16-bit products; 0 if unknown.
      measured_bandwidth: highest measured memory bandwidth; 0 if unknown.
      measured_source: source of the measurements.
      sheet_bytes: memory of the data sheet, in decimal GB as papers count it.
      float4: dense 4-bit products, operations per second; 0 if not supported.
      board_watts: largest configurable power of the data sheet; 0 if unknown.
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
    sheet_bytes: float = 0.0
    float4: float = 0.0
    board_watts: float = 0.0

    def rate(self, precision: Precision) -> float:
        """Returns the operations per second at a precision.

        Raises:
          ValueError: the device does not support the precision.
        """
        if not (rate := getattr(self, precision)):
            raise ValueError(f"{self.name} has no units for {precision}")
        return rate

    def ridge(self, precision: Precision = "bfloat16") -> float:
        """Returns the ridge point: operations per byte from which products limit.

        An A100 of 40 GB: 312e12 / 1555e9 = 200.6.

        Source: Williams et al. 2009, "Roofline", doi:10.1145/1498765.1498785.
        """
        return self.rate(precision) / self.bandwidth


_DEVICE_TABLE = """
v100         32   900    125    0      15.7  150
t4           16   320    65     0      8.1   16
a10          24   600    125    0      31.2  32
a100-40gb    40   1555   312    0      19.5  300
a100-80gb    80   2039   312    0      19.5  300
l4           24   300    121    242    30.3  32
l40s         48   864    362    733    91.6  32
h100         80   3350   989.4  1978.9 66.9  450
h100-pcie    80   2000   756    1513   51.2  300
h800         80   3350   989.4  1978.9 66.9  200
h200         141  4800   989.4  1978.9 66.9  450
b200         180  7700   2250   4500   75    900
b300         288  8000   2250   4500   75    900
gb200        186  8000   2500   5000   80    900
gb300        288  8000   2500   5000   80    900
rtx-4090     24   1008   165.2  330.3  82.6  32
rtx-pro-6000 96   1597   480    960    120    64
mi300x       192  5300   1307.4 2614.9 163.4 64
tpu-v5e      16   819    197    0      0     50
tpu-v5p      95   2765   459    0      0     100
"""
"""GB, GB/s, TFLOP/s of 16 bits, 8 bits and float32, GB/s of the link one way."""

_SOURCES = {
    "v100": "NVIDIA V100 SXM2 data sheet, 2020; half precision only",
    "t4": "NVIDIA T4 product brief, 2019; half precision only; PCIe 3 x16",
    "a10": "NVIDIA A10 data sheet, 2021; PCIe 4 x16",
    "a100-40gb": "NVIDIA A100 SXM 40 GB data sheet, 2020",
    "a100-80gb": "NVIDIA A100 SXM 80 GB data sheet, 2022",
    "l4": "NVIDIA L4 data sheet, 2023, without sparsity; PCIe 4 x16",
    "l40s": "NVIDIA L40S data sheet, 2023, without sparsity; PCIe 4 x16",
    "h100": "NVIDIA H100 SXM data sheet, 2023, without sparsity",
    "h100-pcie": "NVIDIA H100 PCIe data sheet, 2023, without sparsity; NVLink bridge",
    "h800": "as H100 with NVLink of 400 GB/s in both directions together",
    "h200": "NVIDIA H200 SXM data sheet, 2024, without sparsity",
    "b200": "NVIDIA HGX B200 data sheet, 2025, without sparsity",
    "b300": "NVIDIA HGX B300 data sheet, 2025, without sparsity",
    "gb200": "NVIDIA GB200 NVL72 data sheet, 2024, a GPU of 72, without sparsity",
    "gb300": "NVIDIA GB300 NVL72 data sheet, 2025, a GPU of 72, without sparsity",
    "rtx-4090": "NVIDIA Ada GPU Architecture, 2023, appendix A, without sparsity, sums "
    "in float32; PCIe 4 x16",
    # The data sheet has no dense rates of tensor cores. They are 4 and 8 times that of
    # float32, as in the architecture paper for the Workstation Edition (503.8, 1007.6
    # and 126 TFLOP/s).
    "rtx-pro-6000": "NVIDIA RTX PRO 6000 Blackwell Server Edition data sheet, 2025; "
    "16 and 8 bits as in NVIDIA RTX PRO Blackwell GPU Architecture, table 4, without "
    "sparsity; PCIe 5 x16",
    "mi300x": "AMD MI300X data sheet, 2023, without sparsity; one of 7 links",
    "tpu-v5e": "Google Cloud TPU v5e documentation; one of 4 links",
    "tpu-v5p": "Google Cloud TPU v5p documentation; one of 6 links",
}

_FLOAT4_TFLOPS = {
    "b200": 9000,
    "b300": 13500,
    "gb200": 10000,
    "gb300": 15000,
    "rtx-pro-6000": 2000,
}
"""Dense TFLOP/s of 4-bit products, from the data sheets of `_SOURCES`."""

_BOARD_WATTS = {
    "v100": 300,
    "t4": 70,
    "a10": 150,
    "a100-40gb": 400,
    "a100-80gb": 400,
    "l4": 72,
    "l40s": 350,
    "h100": 700,
    "h100-pcie": 350,
    "h200": 700,
    "b200": 1000,
    "gb200": 1200,
    "gb300": 1400,
    "rtx-4090": 450,
    "rtx-pro-6000": 600,
    "mi300x": 750,
}
"""Power in W, from the data sheets of `_SOURCES`."""

_BEKMAN = "Bekman, Machine Learning Engineering, table of achievable products (2025)"

_MEASURED = {
    "v100": (0.0, 750e9, "Jia et al. 2018, arXiv:1804.06826, table 3.1"),
    "t4": (0.0, 220e9, "Jia et al. 2019, arXiv:1903.07486, table 3.1"),
    "a100-40gb": (267.9e12, 0.0, _BEKMAN),
    "a100-80gb": (267.9e12, 0.0, _BEKMAN),
    "h100": (794.5e12, 0.0, _BEKMAN),
    "b200": (1745e12, 0.0, _BEKMAN),
}
"""Measured rates of 16-bit products and of memory in bytes/s, and their sources."""

_REPORTED_MIB = {
    "v100": 32768,
    "t4": 15360,
    "a10": 23028,
    "a100-40gb": 40960,
    "a100-80gb": 81920,
    "l4": 23034,
    "l40s": 46068,
    "h100": 81559,
    "h100-pcie": 81559,
    "h800": 81559,
    "h200": 143771,
    "b200": 183359,
    "b300": 275040,
    "gb200": 189471,
    "gb300": 284208,
    "rtx-4090": 24564,
    "rtx-pro-6000": 97887,
    "mi300x": 196592,
}
"""Total memory in MiB that nvidia-smi and rocm-smi report. TPUs have the data sheet's.

Sources: modal-labs/modal-client, pull request 2797 (H100, A100, A10, L40S, L4, T4);
outputs of `nvidia-smi --query-gpu=name,memory.total` and `rocm-smi --showmeminfo vram`
in public repositories (V100 of 32 GB, H100 PCIe, H800, H200, B200, RTX PRO 6000 Server
Edition, MI300X, B300 SXM6, GB200, GB300, GeForce RTX 4090).
"""


def _device(name: str, *sizes: str) -> Device:
    powers = ("e9", "e9", "e12", "e12", "e12", "e9")
    read = [float(x + power) for x, power in zip(sizes, powers, strict=True)]
    measured = _MEASURED.get(name, (0.0, 0.0, ""))
    device = Device(name, *read, _SOURCES[name], *measured, sheet_bytes=read[0])
    device = device._replace(
        float4=_FLOAT4_TFLOPS.get(name, 0) * 1e12,
        board_watts=float(_BOARD_WATTS.get(name, 0)),
    )
    if name in _REPORTED_MIB:
        device = device._replace(memory_bytes=_REPORTED_MIB[name] * 2.0**20)
    return device


DEVICES: Mapping[str, Device] = {
    line.split()[0]: _device(*line.split()) for line in _DEVICE_TABLE.split("\n")[1:-1]
}
"""Known devices by name."""

_OTHER_NAMES = {
    "a100": "a100-80gb",
    "a100-40": "a100-40gb",
    "a100-80": "a100-80gb",
    "h100-80gb": "h100",
    "h100-sxm": "h100",
    "h200-sxm": "h200",
    "b200-sxm": "b200",
    "b300-sxm": "b300",
    "gb200-sxm": "gb200",
    "gb300-sxm": "gb300",
    "gb200-nvl72": "gb200",
    "gb300-nvl72": "gb300",
    "rtx-pro-6000-blackwell-server-edition": "rtx-pro-6000",
    "rtx-pro-6000-server": "rtx-pro-6000",
}


def find_device(name: str) -> Device:
    """Finds a device; case is ignored, and `a100` is the A100 of 80 GB.

    Raises:
      ValueError: the device is unknown; the message lists the known ones.
    """
    key = name.lower().replace("_", "-").replace(" ", "-")
    key = _OTHER_NAMES.get(key, key)
    if key not in DEVICES:
        raise ValueError(f"unknown device {name!r}; one of: {', '.join(DEVICES)}")
    return DEVICES[key]
