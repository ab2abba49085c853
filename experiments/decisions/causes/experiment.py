"""Replaces assumptions under numbers that are not reproduced by measured values.

The paged-attention paper prints no step times and only the means of its lengths, so a
simulation of its figures rests on assumptions. Its drawings have more: histograms of
the lengths, latencies at low load, from which step times follow, and the loads that
systems sustain. Each figure is simulated as recorded, with either assumption replaced,
and with both. The same is done with the first figure of DistServe.
"""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import numpy as np

from experiments import lab
from experiments.decisions.causes import distserve
from experiments.serving.chatbot import experiment as chatbot
from experiments.serving.latency_vs_rate import drawings, published, runs, settings
from jaxkv.workloads import Fixed, sustained_rate

CHAT = "17"
"""The figure of the chat service; the others are panels of `latency_vs_rate`."""
EXAMPLE = "DistServe"
FIGURES = ("12a", "12b", "12c", "12d", "12e", "12f", "14f", CHAT, EXAMPLE)
SYSTEMS: tuple[settings.System, ...] = (*settings.ORCAS, "paged")
RATE_SHARE = 0.15
"""Tolerance of a rate, as for DistServe's rates in `disaggregation`."""


class Change(NamedTuple):
    """Assumptions that are replaced.

    Attributes:
      name: name in tables.
      has_lengths: True for the lengths of figure 11.
      has_steps: True for the step times that latencies at low load imply.
      has_full_prompts: True if every prompt of the chat service has all its tokens.
    """

    name: str
    has_lengths: bool = False
    has_steps: bool = False
    has_full_prompts: bool = False


RECORDED = Change("as recorded")
LENGTHS = Change("drawn lengths", has_lengths=True)
STEPS = Change("drawn steps", has_steps=True)
BOTH = Change("both", has_lengths=True, has_steps=True)
PREFILL = Change("fitted prefill")
"""Of DistServe's example alone: prefill is scaled until it has its printed rate."""
FULL = Change("full prompts", has_full_prompts=True)


class Config(lab.ConfigRecord):
    """Figures and length of the simulations."""

    figures: Annotated[tuple[str, ...], lab.Choices(FIGURES)] = FIGURES
    """Figures to simulate."""
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
        hours_share=0.02,
        num_rates=3,
        num_near=2,
        seconds=10.0,
    ),
    "paper": Config(),
}


class ChangeTable(lab.ResultTable):
    """A quantity under each change of the assumptions."""

    figure: lab.Texts = lab.column("figure, or the example of DistServe")
    quantity: lab.Texts = lab.column("quantity")
    change: lab.Texts = lab.column("assumptions that are replaced")
    value: lab.Floats = lab.column("simulated; NaN if no rate was sustained")
    published: lab.Floats = lab.column("drawn or printed")
    tolerance: lab.Floats = lab.column("largest share of a difference", heading="to")

    @property
    @lab.computed_column(heading="off by", form="{:+.1%}")
    def off(self) -> np.ndarray:
        """Difference as a share of the published value."""
        return self.value / self.published - 1


class Result(lab.ResultRecord):
    """Values under all changes."""

    changes: ChangeTable = lab.column("values by figure, change and quantity")


def _simulate(
    config: Config, figure: str, change: Change, progress: lab.Progress
) -> list[lab.Row]:
    """Returns the rows of a figure of the paged-attention paper under a change."""
    panel = published.PANELS["12a" if figure == CHAT else figure]
    setting = panel.setting()
    clock = "drawn" if change.has_steps else "fit"
    setting = setting._replace(server=setting.server._replace(clock=clock))
    law = setting.law
    if change.has_lengths:
        law = drawings.drawn_law(panel.data, law)
    hours = panel.hours * config.hours_share
    axis = panel.axis
    max_rate = 2 * axis
    if figure == CHAT:
        axis = max_rate = chatbot.AXIS * 1.5
        chat = chatbot.Config(hours=hours, most=axis, seed=config.seed)
        requests = chatbot.draw_conversations(chat, law)
        if change.has_full_prompts:
            prompt = np.full_like(requests.tokens.prompt, chatbot.HISTORY)
            requests = requests._replace(tokens=requests.tokens._replace(prompt=prompt))
        mean = Fixed(tokens=int(requests.tokens.prompt.mean()))
        law = dataclasses.replace(law, prompt=mean)
    else:
        requests = runs.draw_load(law, max_rate, 3600 * hours, config.seed)
    return runs.explore_rates(
        setting._replace(law=law),
        requests,
        SYSTEMS,
        axis * np.arange(1, config.num_rates + 1) / config.num_rates,
        num_near=config.num_near,
        max_rate=max_rate,
        progress=progress,
    )


type _Row = tuple[str, str, str, float, float, float]
"""A row of `ChangeTable`."""


def _panel_values(
    figure: str, rows: list[lab.Row]
) -> Iterator[tuple[str, float, float, float]]:
    """Yields loads that systems sustain and printed batches, as in `ChangeTable`."""
    bound = runs.LATENCY_BOUND
    drawn_curves = drawings.drawn_curves(figure)
    curves = runs.latency_curves(rows)
    for system in SYSTEMS:
        load = sustained_rate(curves[system], bound)
        rate = load.rate if load.relation == "is" else np.nan
        drawn_rate = drawings.drawn_rate(drawn_curves[system], bound)
        yield f"{system}, requests/s", rate, drawn_rate, RATE_SHARE
    for system, batch in published.FIGURE_BATCHES.get(figure, {}).items():
        axis = published.PANELS[figure].axis
        [value] = [
            row["batch"]
            for row in rows
            if row["system"] == system
            and not row["turn"]
            and np.isclose(row["rate_per_s"], axis)
        ]
        tolerance = published.batch_tolerance(system)
        yield f"{system}, at once", value, batch, tolerance


def _example_rows(config: Config, progress: lab.Progress) -> Iterator[_Row]:
    """Yields the rates of DistServe's example under each change, until stopped."""
    if progress.stopped:
        return
    progress.show(EXAMPLE)
    example = distserve.Example(config.seconds, config.seed, progress)
    cost = example.cost
    drawn_cost = distserve.drawn_cost(cost)
    prefill = cost.prefill * example.fit_prefill()
    costs = {
        RECORDED: cost,
        STEPS: drawn_cost,
        PREFILL: cost._replace(prefill=prefill),
        BOTH: drawn_cost._replace(prefill=prefill),
    }
    for change, changed in costs.items():
        rates = example.rates(changed)
        if progress.stopped:
            return
        for role, rate in rates.items():
            printed = distserve.PRINTED[role]
            name = f"{role}, requests/s"
            yield EXAMPLE, name, change.name, rate, printed, RATE_SHARE


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Simulates every figure under every change; if stopped, keeps finished ones."""
    table: list[_Row] = []
    for figure in config.figures:
        if figure == EXAMPLE:
            table += _example_rows(config, progress)
            continue
        changes = (RECORDED, LENGTHS, STEPS, BOTH)
        for change in (*changes, FULL) if figure == CHAT else changes:
            progress.show(f"figure {figure}: {change.name}")
            rows = _simulate(config, figure, change, progress)
            if progress.stopped:
                break
            table += [
                (figure, quantity, change.name, value, known, tolerance)
                for quantity, value, known, tolerance in _panel_values(figure, rows)
            ]
    return Result(changes=ChangeTable.of(table))


@lab.claims_file(__file__).judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Judges the values with the steps and lengths that the papers draw."""
    changes = result.changes
    for row in changes.rows():
        is_example = row["figure"] == EXAMPLE
        quantity, _, unit = row["quantity"].partition(", ")
        is_fitted = is_example and quantity == "prefill"
        if row["change"] != BOTH.name or is_fitted:
            continue
        [before] = changes.where(
            figure=row["figure"], quantity=row["quantity"], change=RECORDED.name
        ).rows()
        yield lab.measured(
            "example" if is_example else "batch" if unit == "at once" else "rate",
            row["value"],
            published=row["published"],
            tolerance=row["tolerance"] * row["published"],
            figure=row["figure"],
            quantity=published.name_in_sentence(quantity),
            before=f"{before['value']:.4g}",
        )


def summary(result: Result) -> list[lab.ReportPart]:
    """Returns the values by figure, and how far off each change leaves them."""
    changes = result.changes
    rows = []
    for change in changes.distinct("change"):
        selected = changes.where(change=change)
        within = np.abs(selected.off) <= selected.tolerance
        rows.append(
            {
                "change": change,
                "values": len(selected),
                "median": _median_off(changes, change),
                "within": int(within.sum()),
            }
        )
    columns = {
        "assumptions": "change",
        "values": "values",
        "median difference, share": "median",
        "within the tolerance": "within",
    }
    names = ("figure", "quantity", "change", "value", "published", "off", "tolerance")
    return [
        lab.row_sheet("all figures", rows, columns),
        changes.sheet("values", *names),
    ]


def plot(axes: Any, result: Result) -> None:
    """Draws every value over the published one: all of them, then by figure."""
    summary_ax, *panels = axes.ravel()
    _draw_ratios(summary_ax, "All figures", result.changes, has_labels=False)
    for ax, figure in zip(panels, FIGURES, strict=True):
        name = EXAMPLE if figure == EXAMPLE else f"Figure {figure}"
        _draw_ratios(ax, name, result.changes.where(figure=figure))


def _draw_ratios(
    ax: Any, name: str, rows: ChangeTable, *, has_labels: bool = True
) -> None:
    """Draws the values of some figures by change, one color and marker a system."""
    names = rows.distinct("change")
    if not names:
        ax.set_axis_off()
        return
    for quantity in rows.distinct("quantity"):
        selected = rows.where(quantity=quantity)
        system, _, unit = quantity.partition(", ")
        system = distserve.LABELS.get(system, system)
        style = lab.system_style(system)
        is_batch = unit == "at once"
        label = system
        if is_batch:  # one entry of the legend for the hollow marks of all systems
            label = "hollow: at once" if system == "paged" else None
        ax.plot(
            selected.value / selected.published,
            [names.index(change) for change in selected.change],
            style.marker,
            color=style.color,
            markerfacecolor="none" if is_batch else None,
            label=label if has_labels else None,
        )
    lab.draw_reference_line(ax, 1, "published = 1", along="y")
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    before, after = (_median_off(rows, x.name) for x in (RECORDED, BOTH))
    title = name
    if np.isfinite([before, after]).all():
        title = f"{name}: off by {before:.0%}, then {after:.0%}"
    lab.set_labels(ax, title, "simulated / published [ratio]", "")
    ax.legend()


def _median_off(rows: ChangeTable, change: str) -> float:
    values = np.abs(rows.where(change=change).off)
    values = values[np.isfinite(values)]
    return float(np.median(values)) if values.size else np.nan


STUDY = lab.Study(
    CONFIGS, Result, run, plot, claims, summary, panels=lab.Panels(5, 2, 2.9)
)
