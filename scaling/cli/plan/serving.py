"""Servers of a ladder of designs: their largest loads, and the cost of a load."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxkv import validation
from jaxkv.workloads import read_recording
from scaling.calibration import (
    ENERGY_DISCREPANCY,
    PUBLISHED_POWER,
    Goodput,
    LatencyLimits,
    LoopCalibration,
    MeasuredServer,
    find_goodput,
    make_replica,
    predict_request_joules,
)
from scaling.costs import Layout, check_layout, find_device
from scaling.plan import HOUR_S, Design, Offer, ServingLadder
from scaling.shapes import ModelShape

DEGREES = (1, 2, 4, 8)
"""Devices of a server: degrees of tensor parallelism in one node."""
type CostUnit = Literal["usd", "joules"]


class ServedLoad(NamedTuple):
    """Requests that a model answers in its life."""

    prompt_tokens: float
    """Mean length of the prompts."""
    answer_tokens: float
    """Mean length of the answers."""
    rate_per_s: float
    """Requests per second; 0 for no load."""
    duration_s: float
    """Time for which the model serves, in s."""

    @property
    def num_requests(self) -> float:
        """Requests in all."""
        return self.rate_per_s * self.duration_s

    @property
    def num_tokens(self) -> float:
        """Tokens of all prompts and answers."""
        return self.num_requests * (self.prompt_tokens + self.answer_tokens)


def parse_served_load(text: str, duration_s: float) -> ServedLoad:
    """Parses `PROMPT:ANSWER:RATE`, or reads a file of recorded requests.

    Raises:
      ValueError: the text has neither form, a number is out of range, or the file
        cannot be read or has no rate.
    """
    words = text.split(":")
    if len(words) != 3:
        if not Path(text).exists():
            raise ValueError(
                f"--serve {text}: must be PROMPT:ANSWER:RATE, such as 1024:256:20 for "
                "20 requests per second, or a file of recorded requests"
            )
        recording = read_recording(text, skip_empty=True)
        if not math.isfinite(recording.rate):
            raise ValueError(f"--serve {text}: its requests arrive at one time")
        means = (float(x.mean()) for x in (recording.prompt, recording.output))
        return ServedLoad(*means, recording.rate, duration_s)
    numbers = []
    for word, low, high, name in zip(
        words, (1, 1, 0), (2**29, 2**29, 1e9), ("PROMPT", "ANSWER", "RATE"), strict=True
    ):
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise ValueError(f"--serve {text}: {name} must be in [{low}, {high:g}]")
        numbers.append(value)
    return ServedLoad(*numbers, duration_s)


class ReplicaKind(NamedTuple):
    """A kind of server: an offered device, and the number of them."""

    offer: Offer
    num_devices: int


class ServedSizes(NamedTuple):
    """Servers of designs: `kinds` for each size, at the mode of a fit, then draws."""

    designs: tuple[Design, ...]
    kinds: tuple[ReplicaKind, ...]
    goodput: Goodput
    """Largest loads; leaves have the axes `1+draws sizes kinds`."""
    request_joules: Float[np.ndarray, "1+draws sizes kinds"]
    """Energy of a request at that load in J; NaN if it is unknown."""

    @property
    def num_params(self) -> Float[np.ndarray, " sizes"]:
        """Parameters by the convention of the law."""
        return np.array([x.num_params for x in self.designs], float)

    def num_replicas(
        self, load: ServedLoad, *, is_whole: bool
    ) -> Float[np.ndarray, "1+draws sizes kinds"]:
        """Returns the servers that are paid; infinity if they cannot take a request."""
        rate = self.goodput.requests_per_s
        if load.rate_per_s == 0:
            return np.zeros(rate.shape)
        has_load = rate > 0
        num = load.rate_per_s / np.where(has_load, rate, 1.0)
        return np.where(has_load, np.ceil(num) if is_whole else num, np.inf)

    def costs(
        self, load: ServedLoad, unit: CostUnit, *, is_whole: bool = False
    ) -> Float[np.ndarray, "1+draws sizes kinds"]:
        """Returns the cost of a load on servers of each kind, in USD or J.

        Args:
          load: the load.
          unit: "usd" or "joules".
          is_whole: True to pay for whole servers all the time, else for the share of
            their time that the load takes.

        Returns:
          The costs; infinite where a server does not take the load, or has no price or
          no known power.
        """
        num = self.num_replicas(load, is_whole=is_whole)
        if load.rate_per_s == 0:
            return num
        devices = np.array([x.num_devices for x in self.kinds])
        if unit == "usd":
            prices = [x.offer.usd_per_hour or np.inf for x in self.kinds]
            return num * devices * np.array(prices) * load.duration_s / HOUR_S
        joules = load.num_requests * np.nan_to_num(self.request_joules, nan=np.inf)
        if not is_whole:
            return joules
        # A server without requests has idle power.
        busy = self.num_replicas(load, is_whole=False)
        idle = np.where(np.isfinite(num), num, 0.0) - np.where(
            np.isfinite(busy), busy, 0.0
        )
        watts = [find_device(x.offer.name).board_watts for x in self.kinds]
        idle_watts = PUBLISHED_POWER.idle * devices * np.array(watts)
        return joules + idle * idle_watts * load.duration_s

    def ladders(
        self, load: ServedLoad, unit: CostUnit, *, is_whole: bool = False
    ) -> list[ServingLadder]:
        """Returns the cost of the cheapest kind for each size: the mode, then draws."""
        costs = self.costs(load, unit, is_whole=is_whole)
        kinds = np.asarray(costs.argmin(axis=2))
        if is_whole:
            # A size with another number of servers is another kind.
            num = self.num_replicas(load, is_whole=True)
            chosen = np.take_along_axis(num, kinds[..., None], 2)[..., 0]
            kinds = kinds + len(self.kinds) * np.nan_to_num(chosen, posinf=0).astype(
                int
            )
        least_cost = costs.min(axis=2)
        num_params = self.num_params
        return [
            ServingLadder(num_params, least_cost[i], kinds[i])
            for i in range(len(least_cost))
        ]


@validation.checks_numbers(num_draws=0)
def serve_designs(
    designs: Sequence[Design],
    offers: Sequence[Offer],
    lengths: tuple[float, float],
    limits: LatencyLimits,
    calibration: LoopCalibration,
    *,
    num_draws: int = 0,
) -> ServedSizes:
    """Finds the largest load of servers of each design on each offered device.

    Args:
      designs: designs, ascending in parameters.
      offers: offers of known devices.
      lengths: mean tokens of prompts and of answers.
      limits: largest means of the latencies.
      calibration: the fit of servers.
      num_draws: draws after the mode.

    Raises:
      ValueError: a device is unknown.
    """
    kinds = tuple(ReplicaKind(offer, x) for offer in offers for x in DEGREES)
    prompt, answer = lengths
    servers: list[MeasuredServer] = [
        make_replica(
            design.model,
            find_device(kind.offer.name),
            kind.num_devices,
            prompt_tokens=prompt,
            answer_tokens=answer,
        )
        for design in designs
        for kind in kinds
    ]
    goodput = find_goodput(servers, limits, calibration, num_draws=num_draws)
    has_layout = [_can_divide(x.model, x.num_devices) for x in servers]
    rates = np.where(has_layout, goodput.requests_per_s, 0.0)
    goodput = goodput._replace(requests_per_s=rates)
    joules = predict_request_joules(servers, goodput, calibration)
    errors = np.random.default_rng(0).normal(size=num_draws + 1)
    errors[0] = 0.0
    factors = np.exp(ENERGY_DISCREPANCY * errors)
    shape = (num_draws + 1, len(designs), len(kinds))
    return ServedSizes(
        designs=tuple(designs),
        kinds=kinds,
        goodput=Goodput(*(x.reshape(shape) for x in goodput)),
        request_joules=factors[:, None, None] * joules.reshape(shape[1:]),
    )


def _can_divide(model: ModelShape, num_devices: int) -> bool:
    """Returns True if tensor parallelism divides the heads and the FFN of a model."""
    try:
        check_layout(model, Layout(tensor=num_devices))
    except ValueError:
        return False
    return True
