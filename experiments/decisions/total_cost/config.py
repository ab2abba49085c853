"""Configs of the total cost: law, prices, load and objective."""

import math
from typing import Annotated, NamedTuple

from experiments import lab
from scaling.costs import find_device
from scaling.plan import parse_offer


class RequestTraffic(NamedTuple):
    """A kind of requests: tokens, and limits of mean latencies in s."""

    prompt_tokens: float
    answer_tokens: float
    first_token_s: float
    token_s: float


def parse_traffic(text: str) -> RequestTraffic:
    """Parses `PROMPT:ANSWER:FIRST_TOKEN_S:TOKEN_S`.

    Raises:
      ValueError: the text has another form, or a number is not above 0.
    """
    try:
        traffic = RequestTraffic(*map(float, text.split(":")))
    except (TypeError, ValueError):
        traffic = None
    if traffic is None or not all(0 < x < math.inf for x in traffic):
        raise ValueError(f"traffics={text!r} must be PROMPT:ANSWER:FIRST_S:TOKEN_S")
    return traffic


class Config(lab.ConfigRecord):
    """Law, prices, load and objective."""

    offer: str = "h100:2.5"
    """Device and USD per hour, for training and for serving."""
    mfu: lab.Share = 0.4
    """Share of the peak rate in training; also that of the closed form in serving."""
    target_loss: lab.PositiveFloat = 2.05
    """Loss to reach, in nats per token."""
    budget_usd: lab.PositiveFloat = 4e5
    """Budget of training and serving."""
    prompt_tokens: lab.PositiveFloat = 1024.0
    answer_tokens: lab.PositiveFloat = 256.0
    first_token_s: lab.PositiveFloat = 1.0
    """Largest mean time to the first token."""
    token_s: lab.PositiveFloat = 0.05
    """Largest mean time per token."""
    days: lab.PositiveFloat = 365.0
    """Time for which the model serves."""
    rates: lab.AscendingFloats = (*(0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0),)
    """Requests per second."""
    traffics: Annotated[tuple[str, ...], lab.Entries(1)] = (
        "8192:128:2:0.05",
        "1024:256:1:0.05",
        "256:2048:1:0.05",
        "256:2048:1:0.015",
    )
    """Kinds of requests: PROMPT:ANSWER tokens, and limits of the mean time to the first
    token and per token in s."""
    price_factors: lab.AscendingFloats = (
        *(0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0),
    )
    """Prices of serving, relative to the offer's."""
    kv_heads: lab.PositiveInt = 8
    """KV heads of the designs."""
    num_sizes: Annotated[int, lab.Range(8)] = 64
    """Sizes of the ladder."""
    num_runs: Annotated[int, lab.Range(20)] = 240
    """Simulated training runs, to which the law is fitted."""
    num_draws: Annotated[int, lab.Range(2)] = 400
    """Draws of law and servers."""
    simulated_sizes: lab.PositiveFloats = (*(7e9, 2e10, 6e10),)
    """Sizes whose servers are simulated, about."""
    num_simulated_draws: Annotated[int, lab.Range(2)] = 2
    """Draws of the servers in each simulation."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        offer = parse_offer(self.offer)
        if offer.usd_per_hour is None:
            raise ValueError(f"offer={self.offer!r} must have a price")
        find_device(offer.name)
        for text in self.traffics:
            parse_traffic(text)


CONFIGS = {
    "real": Config(),
    "smoke": Config(
        **{"num_sizes": 24, "num_runs": 60, "num_draws": 20, "simulated_sizes": ()},
        **{"rates": (0.1, 3.0, 100.0), "price_factors": (0.25, 1.0, 4.0)},
        traffics=("256:2048:1:0.015",),
    ),
}
