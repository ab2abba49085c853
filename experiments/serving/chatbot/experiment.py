"""How much load does paged memory let a chat service serve that reads its history?

Figure 17 of the paged-attention paper, in simulated time: of a conversation the last
1,024 tokens are the prompt, an answer has 1,024 at most, and nothing is kept between
rounds. Conversations are our own law: rounds of ShareGPT's mean lengths.
"""

import dataclasses
from typing import Any

import numpy as np

from experiments.framework import Claim, Part, Sheet, judge, units
from experiments.plotting import style
from experiments.serving.latency_vs_rate import capacity, runs, settings
from jaxkv import validation
from jaxkv.progress import QUIET, Progress
from jaxkv.workloads import arrivals, lengths

PANELS = (1, 2)
PAPER = "Kwon et al. 2023, arXiv:2309.06180, section 6.5 and figure 17"
HISTORY = 1024
"""Tokens of a prompt, and of an answer, at most."""
AXIS = 0.8
"""Requests a second at which the published axis ends."""
SYSTEMS: tuple[settings.System, ...] = (*settings.ORCAS, "paged")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Conversations, and how fast they come."""

    rounds_before: float = 3.0
    """Rounds that a conversation has behind it, on average of a geometric law. Our
    choice; nothing is published but that most prompts have all of 1,024 tokens."""
    hours: float = 1.0
    """Of load."""
    num_rates: int = 8
    """Rates, evenly spaced up to `most`."""
    num_near: int = 4
    """More of them, between those at which latency passes 0.1 and 0.9 s a token."""
    most: float = 1.2
    """Requests a second, the highest; the published axis ends at 0.8."""
    seed: int = 0
    """Of lengths and arrivals."""

    def __post_init__(self) -> None:
        """Refuses what cannot be served."""
        validation.above(self, "hours", "most")
        if self.rounds_before < 0 or self.seed < 0:
            raise ValueError(f"{self.rounds_before, self.seed=} must be at least 0")
        if self.num_rates < 2 or self.num_near < 0:
            raise ValueError(
                f"{self.num_rates=} must be at least 2, {self.num_near=} 0"
            )


CONFIGS = {"smoke": Config(hours=0.02, num_rates=2, num_near=0), "paper": Config()}

type Row = dict[str, Any]


def load(config: Config) -> runs.Load:
    """Draws rounds, each of its own conversation.

    The prompt is what was said and asked so far, its last 1,024 tokens.
    """
    rng = np.random.default_rng(config.seed)
    seconds = 3600 * config.hours
    mean = config.most * seconds
    num = int(np.ceil(mean + 6 * np.sqrt(mean) + 1))
    # A geometric law of failures with this mean.
    before = rng.geometric(1 / (1 + config.rounds_before), num) - 1
    said = lengths.SHAREGPT.draw(rng, num + int(before.sum()))
    total = said.prompt[num:] + said.output[num:]
    ends = np.cumsum(before)
    sums = np.concatenate([[0], np.cumsum(total)])
    history = sums[ends] - sums[ends - before]
    tokens = lengths.Lengths(
        np.minimum(history + said.prompt[:num], HISTORY).astype(np.int32),
        np.minimum(said.output[:num], HISTORY),
    )
    gaps_s = arrivals.poisson(rng, rate=1.0, num=num)
    return runs.Load(gaps_s, tokens, seconds)


def run(config: Config, progress: Progress = QUIET) -> list[Row]:
    """Serves the conversations by every system."""
    requests = load(config)
    prompt, output = requests.tokens
    # What the slots are chosen by: prompts are longer than those of one round.
    law = dataclasses.replace(
        lengths.SHAREGPT, prompt=lengths.Fixed(tokens=int(prompt.mean()))
    )
    setting = runs.Setting(settings.SERVERS["13B"], law)
    even = config.most * np.arange(1, config.num_rates + 1) / config.num_rates
    rates: dict[settings.System, list[float]] = dict.fromkeys(SYSTEMS, even.tolist())
    seen = {
        "prompt_tokens": float(prompt.mean()),
        "output_tokens": float(output.mean()),
        "full_share": float(np.mean(prompt == HISTORY)),
    }
    rows = runs.serve(setting, requests, rates, progress)
    if config.num_near and not progress.stopped:
        curves = {system: capacity.curve(rows, system) for system in SYSTEMS}
        rates = {
            system: capacity.between(curve, config.num_near).tolist()
            for system, curve in curves.items()
            if not capacity.bears_all(curve)
        }
        rows += runs.serve(setting, requests, rates, progress)
    return [seen | row for row in rows]


def _curves(result: list[Row]) -> dict[str, capacity.Curve]:
    return {
        system: capacity.curve(result, system)
        for system in SYSTEMS
        if any(row["system"] == system for row in result)
    }


def plot(axes: Any, result: list[Row]) -> None:
    """Draws latency against rate, and the ratio of loads borne against the bound."""
    latency, ratio = axes
    colors = style.colors()
    curves = _curves(result)
    looks: dict[str, Any] = dict(
        zip(SYSTEMS, (colors[1], colors[4], colors[6], colors[5]), strict=True)
    )
    for system, curve in curves.items():
        latency.plot(*curve, "o-", color=looks[system], label=system)
    latency.axvline(AXIS, color="0.6", linewidth=0.8, linestyle=":")
    latency.set_ylim(0, 1.0)
    latency.set_xlim(left=0)
    latency.set_xlabel("requests/s (dotted: published axis)")
    latency.set_ylabel("normalised latency, s/token")
    latency.set_title("chat, OPT-13B", loc="left")
    latency.legend(loc="upper left")
    bounds = np.linspace(*capacity.BOUNDS, 33)
    for system in settings.ORCAS:
        if not {system, "paged"} <= set(curves):
            continue
        pairs = [
            (bound, capacity.at(curves["paged"], bound).rate / there.rate)
            for bound in bounds
            for there in [capacity.at(curves[system], bound)]
            if there.relation == "is"
        ]
        if pairs:
            ratio.plot(*zip(*pairs, strict=True), color=looks[system], label=system)
    ratio.axhline(2, color="0.6", linewidth=0.8, linestyle=":")
    ratio.set_ylim(0, 3)
    ratio.set_xlabel("bound on the latency, s/token")
    ratio.set_ylabel("load of the paged system, times")
    ratio.set_title("over Orca's (dotted: as printed)", loc="left")


_LAW = "Conversations follow our law; the paper's are ShareGPT's."


def claims(result: list[Row]) -> list[Claim]:
    """Holds what is printed against ours."""
    curves = _curves(result)
    if len(curves) < len(SYSTEMS):
        return []
    borne = {name: capacity.at(curve) for name, curve in curves.items()}
    ours = borne["paged"]
    orcas = [borne[name].rate for name in settings.ORCAS]
    span = "; ".join(f"{name} {borne[name].text}" for name in SYSTEMS)
    found = [
        judge(
            "most prompts have all of 1,024 tokens",
            source=PAPER,
            published=0.5,
            ours=float(result[0]["full_share"]),
            unit="1",
            relation="at_least",
            differs=_LAW,
        ),
        judge(
            "Orca's three reservations bear the same load; the best over the worst",
            source=PAPER,
            published=1.0,
            ours=max(orcas) / min(orcas),
            unit="1",
            tolerance=0.05,
            differs=_LAW,
            note="Blocks of prompts of 1,024 tokens are of 2,048, whoever reserves.",
        ),
    ]
    drawn = "From the curves of the paper's own figure a third party reads less than 2."
    found += [
        judge(
            f"paged memory bears twice the load of {name}",
            source=PAPER,
            published=2.0,
            ours=ours.rate / borne[name].rate,
            unit="times",
            tolerance=0.2,
            note=f"At {capacity.BOUND} s a token, requests/s: {span}. {drawn}",
        )
        for name in settings.ORCAS
    ]
    return found


def metrics(result: list[Row]) -> dict[str, Any]:
    """Gives what each system bears, and every load."""
    return {
        "capacities": [
            {"system": name, "relation": found.relation, "rate_per_s": found.rate}
            for name, curve in _curves(result).items()
            for found in [capacity.at(curve)]
        ],
        "rows": result,
    }


def summary(result: list[Row]) -> list[Part]:
    """Puts the systems beside each other."""
    curves = _curves(result)
    if not curves:
        return []
    ours = capacity.at(curves["paged"]).rate if "paged" in curves else np.nan
    rows = []
    for name, curve in curves.items():
        borne = capacity.at(curve)
        end = min(
            (row for row in result if row["system"] == name),
            key=lambda row: abs(row["rate_per_s"] - borne.rate),
        )
        rows.append(
            (
                name,
                borne.text,
                f"{ours / borne.rate:.2f}",
                f"{end['batch']:.2f}",
                units.share(end["tokens_share"]),
                units.share(end["recomputed_share"]),
            )
        )
    first = result[0]
    return [
        Sheet(
            f"requests/s at {capacity.BOUND} s a token",
            ("system", "requests/s", "paged, times", "batch", "tokens", "recomputed"),
            rows,
            f"Prompts have {first['prompt_tokens']:.0f} tokens on average, "
            f"{units.share(first['full_share'])} all of 1,024; answers "
            f"{first['output_tokens']:.0f}. Tokens: share of the memory with keys and "
            "values, near that rate.",
        )
    ]
