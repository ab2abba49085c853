"""Models, GPUs and lengths of the paged-attention paper's serving experiments.

Source: Kwon et al. 2023, arXiv:2309.06180, table 1 and section 6.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from experiments.serving.latency_vs_rate import drawings
from jaxkv.simulation import Cost
from jaxkv.workloads import ALPACA, SHAREGPT, Pair
from scaling import shapes
from scaling.calibration import make_calibrated_cost
from scaling.costs import (
    DISTSERVE,
    LinearCost,
    count_parameters,
    figure_12_cost,
    find_device,
    kv_bytes_per_token,
    linear_cost,
)
from scaling.costs import PAGE_SIZE as PAGE_SIZE
from scaling.shapes import ModelShape

type System = Literal[
    "FasterTransformer", "Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "paged"
]
SYSTEMS: tuple[System, ...] = get_args(System.__value__)
"""In ascending order of memory utilisation."""
ORCAS = SYSTEMS[1:4]

MAX_LENGTH = 2048
"""Longest sequence of OPT in tokens."""

DATASETS: Mapping[str, Pair] = {
    "ShareGPT": SHAREGPT,
    "Alpaca": ALPACA,
}


class Machine(NamedTuple):
    """One column of table 1.

    Attributes:
      name: size of the model.
      model: name of the model in `scaling.shapes`.
      device: kind of GPU.
      num_devices: number of GPUs.
      kv_gib: KV cache of the paper in GiB.
      hours: hours of simulated load.
      clock: source of the step times: `fit` for those published for these GPUs,
        `calibrated` for those of vLLM servers on H100s, transferred to this GPU by its
        data sheet, `drawn` for those that the latencies of figure 12 imply.
    """

    name: str
    model: str
    device: str
    num_devices: int
    kv_gib: int
    hours: float
    clock: Literal["fit", "calibrated", "drawn"] = "fit"

    @property
    def description(self) -> ModelShape:
        """Shape of the model."""
        return shapes.describe(self.model)

    @property
    def num_places(self) -> int:
        """KV cache size in tokens.

        OPT-13B: 12 GiB / 800 KiB = 15,728.
        """
        token_bytes = kv_bytes_per_token(self.description)
        return int(self.kv_gib * 2**30 // token_bytes)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in half precision."""
        return 2 * count_parameters(self.description).total


SERVERS: Mapping[str, Machine] = {
    "13B": Machine("13B", "opt-13b", "a100-40gb", 1, 12, 1.0),
    "66B": Machine("66B", "opt-66b", "a100-40gb", 4, 21, 1.0),
    "175B": Machine("175B", "opt-175b", "a100-80gb", 8, 264, 0.25),
}
_ALPACA_PANELS = {"13B": "12d", "66B": "12e", "175B": "12f"}
CALIBRATED = "13B (calibrated)"
MACHINES = {**SERVERS, CALIBRATED: SERVERS["13B"]._replace(clock="calibrated")}
"""The servers of the paper, and one with the calibrated clock."""


def server_cost(server: Machine) -> Cost:
    """Returns the cost model of a step with the server's clock."""
    if server.clock == "fit":
        return step_time(server)
    if server.clock == "drawn":
        law = drawings.drawn_law("Alpaca", ALPACA)
        load = drawings.low_load(_ALPACA_PANELS[server.name], law)
        return drawings.fit_steps(load, step_time(server))
    device = find_device(server.device)
    return make_calibrated_cost(
        server.description, device, num_devices=server.num_devices
    ).cost


def step_time(server: Machine) -> LinearCost:
    """Returns the cost model of a step; the paper prints no step times.

    OPT-13B uses `cost_models.figure_12`, and OPT-66B DistServe's fit for 4 GPUs in the
    same way. No times of OPT-175B are published. Its cost is the fit of OPT-66B, with
    the same bytes of keys and values per token and GPU; other coefficients are scaled
    by the ratio of weight bytes per GPU, 43.7 / 32.9 = 1.33.
    """
    if server.name == "13B":
        return figure_12_cost().cost
    prefill, small, large = DISTSERVE["distserve:opt-66b:4"]
    fit_device = find_device("a100-80gb")
    device = find_device(server.device)
    device_bytes, other = (
        x.weight_bytes / x.num_devices for x in (server, SERVERS["66B"])
    )
    ratio = device_bytes / other
    heavier = [
        (step * ratio, token, sequence * ratio)
        for step, token, sequence in (small, large)
    ]
    return linear_cost(
        # Prefill uses only the slope of the fit, as for OPT-13B.
        (small[0] * ratio, prefill[1] * ratio, 0.0),
        *heavier,
        scale=1e-3 * fit_device.bandwidth / device.bandwidth,
    )
