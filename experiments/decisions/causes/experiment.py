"""Changes one assumption at a time under numbers that are not reproduced.

The paged-attention paper prints no step times and only the means of its lengths, so a
simulation of its figures rests on assumptions. Each failing figure is simulated again
with longer and shorter steps, other shapes of lengths, and other latency bounds. Of
DistServe's example, prefill is slowed until its own rate is the printed one.
"""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import numpy as np

from experiments import lab
from experiments.serving.chatbot import experiment as chatbot
from experiments.serving.disaggregation import runs as disaggregation
from experiments.serving.disaggregation import settings as distserve
from experiments.serving.latency_vs_rate import published, runs, settings
from jaxkv.simulation import (
    Job,
    drop_late_arrivals,
    sample_requests,
    select_requests,
    simulate_jobs,
)
from jaxkv.workloads import SHAREGPT, Fixed, goodput, load_ratio

CHAT = "17"
"""The figure of the chat service; the others are panels of `latency_vs_rate`."""
EXAMPLE = "DistServe"
ORACLE = "over Orca (Oracle)"
MAX = "over Orca (Max)"
PRINTED: dict[str, dict[str, tuple[float, float]]] = {
    "12c": {ORACLE: (1.7, 2.7), MAX: (2.7, 8.0)},
    "12d": {ORACLE: (1.3, 1.3), "batch of pages": (132.44, 132.44)},
    "14f": {ORACLE: (2.3, 2.3)},
    CHAT: {ORACLE: (2.0, 2.0), MAX: (2.0, 2.0)},
    EXAMPLE: {
        "prefill, requests/s": (5.6, 5.6),
        "decode, requests/s": (10.0, 10.0),
        "both, requests/s": (1.6, 1.6),
    },
}
"""Published numbers and ranges, with sources in the claims of `latency_vs_rate`,
`chatbot` and `disaggregation`."""
TOLERANCES = {"12d": 0.05, "14f": 0.05, CHAT: 0.1, EXAMPLE: 0.15}
"""Shares of the published number within which a value agrees."""
RECORDED = "as recorded"
SYSTEMS: tuple[settings.System, ...] = ("Orca (Max)", "Orca (Oracle)", "paged")


class Config(lab.ConfigRecord):
    """Figures and changes."""

    figures: Annotated[tuple[str, ...], lab.Choices(PRINTED)] = tuple(PRINTED)
    """Figures to simulate."""
    step_scales: lab.PositiveFloats = (0.8, 1.25, 1.6)
    """Factors on all step times."""
    shape_scales: lab.PositiveFloats = (0.5, 2.0)
    """Factors on the shape parameter of the lengths of answers."""
    bounds: lab.PositiveFloats = (0.2, 0.9)
    """Other latency bounds in s a token."""
    hours_share: Annotated[float, lab.Range(0, 1, "(]")] = 0.5
    """Share of the hours of each figure."""
    num_rates: Annotated[int, lab.Range(2)] = 6
    """Even rates on the published axis."""
    num_near: lab.NonNegativeInt = 4
    """Further rates where latency crosses the bounds."""
    seconds: lab.PositiveFloat = 300.0
    """Simulated seconds of each load of DistServe's example."""
    seed: lab.NonNegativeInt = 0
    """Seed of lengths and arrivals."""


CONFIGS = {
    "smoke": Config(
        figures=("12c", EXAMPLE),
        step_scales=(1.25,),
        shape_scales=(),
        hours_share=0.02,
        num_rates=3,
        num_near=2,
        seconds=10.0,
    ),
    "paper": Config(),
}


class ChangeTable(lab.ResultTable):
    """A quantity under each change of an assumption."""

    figure: lab.Texts = lab.column("figure, or the example of DistServe")
    quantity: lab.Texts = lab.column("quantity")
    change: lab.Texts = lab.column("change of an assumption")
    value: lab.Floats = lab.column("simulated")
    low: lab.Floats = lab.column("published, or the end of its range")
    high: lab.Floats = lab.column("the other end")
    agrees: lab.Bools = lab.column("within the tolerance", heading="agrees")


class Result(lab.ResultRecord):
    """Values under all changes."""

    changes: ChangeTable = lab.column("one assumption changed at a time")


class _Change(NamedTuple):
    """One change of an assumption."""

    name: str
    step_scale: float = 1.0
    shape_scale: float = 1.0
    has_full_prompts: bool = False


def _list_changes(config: Config, figure: str) -> list[_Change]:
    changes = [_Change(RECORDED)]
    for scale in config.step_scales:
        changes.append(_Change(f"step times x {scale:g}", step_scale=scale))
    for scale in config.shape_scales:
        changes.append(_Change(f"shape of answers x {scale:g}", shape_scale=scale))
    if figure == CHAT:
        changes.append(_Change("every prompt has 1,024 tokens", has_full_prompts=True))
    return changes


def _change_law(law: Any, change: _Change) -> Any:
    output = dataclasses.replace(
        law.output, shape=law.output.shape * change.shape_scale
    )
    return dataclasses.replace(law, output=output)


def _simulate(
    config: Config, figure: str, change: _Change, progress: lab.Progress
) -> list[lab.Row]:
    """Returns the rows of a figure of the paged-attention paper under a change."""
    panel = published.PANELS["12a" if figure == CHAT else figure]
    setting = panel.setting()
    server = setting.server._replace(step_scale=change.step_scale)
    law = _change_law(setting.law, change)
    axis = chatbot.AXIS * 1.5 if figure == CHAT else panel.axis
    max_rate = axis if figure == CHAT else 2 * axis
    hours = panel.hours * config.hours_share
    if figure == CHAT:
        chat = chatbot.Config(hours=hours, most=axis, seed=config.seed)
        requests = chatbot.draw_conversations(chat, _change_law(SHAREGPT, change))
        if change.has_full_prompts:
            prompt = np.full_like(requests.tokens.prompt, chatbot.HISTORY)
            requests = requests._replace(tokens=requests.tokens._replace(prompt=prompt))
        law = dataclasses.replace(
            law, prompt=Fixed(tokens=int(requests.tokens.prompt.mean()))
        )
    else:
        requests = runs.draw_load(law, max_rate, 3600 * hours, config.seed)
    return runs.explore_rates(
        setting._replace(server=server, law=law),
        requests,
        SYSTEMS,
        axis * np.arange(1, config.num_rates + 1) / config.num_rates,
        num_near=config.num_near,
        max_rate=max_rate,
        progress=progress,
    )


def _ratio_rows(
    config: Config, figure: str, change: _Change, rows: list[lab.Row]
) -> Iterator[tuple[str, str, float]]:
    """Yields quantities, changes and values of simulated rows."""
    curves = runs.latency_curves(rows)
    bounds = {change.name: runs.LATENCY_BOUND}
    if change.name == RECORDED:
        bounds |= {f"bound {bound:g} s a token": bound for bound in config.bounds}
    for quantity in PRINTED[figure]:
        system: Any = quantity.removeprefix("over ")
        if quantity.startswith("batch"):
            axis = published.PANELS[figure].axis
            [batch] = [
                row["batch"]
                for row in rows
                if row["system"] == "paged"
                and not row["turn"]
                and np.isclose(row["rate_per_s"], axis)
            ]
            yield quantity, change.name, batch
            continue
        for name, bound in bounds.items():
            yield quantity, name, load_ratio(curves["paged"], curves[system], bound)


def _prefill_factor(config: Config, progress: lab.Progress) -> dict[float, list[float]]:
    """Returns DistServe's three rates by the factor on the time of prefill.

    The factors are 1 and the one at which prefill alone sustains its printed rate.
    """
    instance = distserve.Instance("opt-13b", 1)
    example = distserve.KNOWN[distserve.EXAMPLE]
    limits = disaggregation.search_limits(example, instance)
    shares = np.linspace(0.1, 1.0, 19)

    def rates(factor: float, role: Any) -> float:
        replica = instance.replica
        replica = replica._replace(
            cost=instance.cost._replace(prefill=instance.cost.prefill * factor)
        )
        loads = shares * limits[role]
        jobs = []
        for rate in loads:
            requests = sample_requests(example.law, rate, config.seconds, config.seed)
            if role == "decode":
                requests = select_requests(requests, requests.tokens.output > 1)
            jobs.append(Job(replica, role, requests))
        served = simulate_jobs(
            jobs, config.seconds, max_slots=distserve.MAX_SLOTS, progress=progress
        )
        table = disaggregation.PlacementLoads.of(
            disaggregation.judge_load(
                distserve.EXAMPLE,
                drop_late_arrivals(answers, config.seconds),
                example.objectives,
                (role, 1, 1, 1, 0, 0.0),
                rate,
            )
            for answers, rate in zip(served, loads, strict=True)
        )
        names = {"prefill": ["attained_first"], "decode": ["attained_gap"]}
        return min(
            goodput(loads, getattr(table, name), share=disaggregation.ATTAINED_SHARE)
            for name in names.get(role, ["attained_first", "attained_gap"])
        )

    printed_rate = PRINTED[EXAMPLE]["prefill, requests/s"][0]
    first = [rates(1.0, role) for role in ("prefill", "decode", "both")]
    low = 1.0
    high = 4.0
    for _ in range(6):
        middle = (low + high) / 2
        is_faster = rates(middle, "prefill") > printed_rate
        low = middle if is_faster else low
        high = high if is_faster else middle
    factor = (low + high) / 2
    return {
        1.0: first,
        factor: [rates(factor, "prefill"), first[1], rates(factor, "both")],
    }


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Simulates every figure under every change; if stopped, keeps finished ones."""
    values: list[tuple[str, str, str, float]] = []
    for figure in config.figures:
        if figure == EXAMPLE:
            if progress.stopped:
                break
            for factor, rates in _prefill_factor(config, progress).items():
                name = f"prefill {factor:.2f} times as long"
                name = RECORDED if factor == 1 else name
                for quantity, rate in zip(PRINTED[EXAMPLE], rates, strict=True):
                    values.append((figure, quantity, name, rate))
            continue
        for change in _list_changes(config, figure):
            progress.show(f"figure {figure}: {change.name}")
            rows = _simulate(config, figure, change, progress)
            if progress.stopped:
                break
            values += [
                (figure, *row) for row in _ratio_rows(config, figure, change, rows)
            ]
    table = []
    for figure, quantity, name, value in values:
        low, high = PRINTED[figure][quantity]
        slack = TOLERANCES.get(figure, 0.0)
        agrees = low * (1 - slack) <= value <= high * (1 + slack)
        table.append((figure, quantity, name, value, low, high, agrees))
    return Result(changes=ChangeTable.of(table))


def plot(axes: Any, result: Result) -> None:
    """Draws every value over the published number, by figure."""
    changes = result.changes
    for ax, figure in zip(axes.ravel(), PRINTED, strict=False):
        rows = changes.where(figure=figure)
        names = rows.distinct("change")
        for quantity, color in zip(PRINTED[figure], lab.colors(), strict=False):
            selected = rows.where(quantity=quantity)
            places = [names.index(name) for name in selected.change]
            ratio = selected.value / selected.low
            ax.plot(ratio, places, "o", color=color, label=quantity)
            end = selected.high[0] / selected.low[0] if len(selected) else 1.0
            if end > 1:
                ax.axvspan(1, end, color=color, alpha=0.15, linewidth=0)
        lab.draw_reference_line(ax, 1, "published = 1", along="y")
        ax.set_yticks(range(len(names)), names)
        title = EXAMPLE if figure == EXAMPLE else f"figure {figure}"
        lab.set_labels(ax, title, "simulated / published [ratio]", "")
        ax.legend()


STUDY = lab.Study(CONFIGS, Result, run, plot, panels=lab.Panels(5, 1, 3.0))
