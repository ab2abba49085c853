"""Panels of figures 12 to 14, and their published claims."""

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from experiments import lab
from experiments.serving.latency_vs_rate import drawings, runs, settings
from experiments.serving.latency_vs_rate.runs import LATENCY_BOUND, LATENCY_RANGE
from jaxkv.workloads import LatencyCurve, load_ratio, load_ratios

CLAIMS = lab.claims_file(__file__)
PAPER, STEP, CURVE_SHAPE = map(CLAIMS.text, ("paper", "step", "shape"))
SCALED, BEAMS = map(CLAIMS.text, ("scaled", "beams"))
FIGURE_BATCHES: Mapping[str, Mapping[str, float]] = CLAIMS.published("batch")
"""Batch sizes at 2 and 30 requests/s: figure 13."""
ORACLE = "Orca (Oracle)"


class Panel(NamedTuple):
    """One panel.

    Attributes:
      server: a key of `settings.MACHINES`.
      data: a key of `settings.DATASETS`.
      axis: end of the rate axis in requests/s.
      kind: decoding of a request.
      width: sequences of a request.
    """

    server: str
    data: str
    axis: float
    kind: Literal["plain", "samples", "beams"] = "plain"
    width: int = 1

    @property
    def title(self) -> str:
        """Model, data and decoding."""
        decoding = {
            "plain": "",
            "samples": f", {self.width} samples",
            "beams": f", beam width {self.width}",
        }[self.kind]
        return f"OPT-{self.server}, {self.data}{decoding}"

    @property
    def hours(self) -> float:
        """Hours of simulated load; 0.25 h suffice for Alpaca's short requests."""
        hours = settings.MACHINES[self.server].hours
        return hours if self.data == "ShareGPT" else min(hours, 0.25)

    @property
    def systems(self) -> tuple[settings.System, ...]:
        """Systems of the panel; figure 14 omits FasterTransformer."""
        return settings.SYSTEMS[self.kind != "plain" :]

    def setting(self) -> runs.Setting:
        """Returns the simulated setting.

        Beam search is simulated as samples in a pool that is enlarged by the factor
        that beams save beyond the shared prompt, since the simulation has no beams.
        """
        longer = beam_pool_factor(self.width) if self.kind == "beams" else 1.0
        server = settings.MACHINES[self.server]
        return runs.Setting(server, settings.DATASETS[self.data], self.width, longer)


def beam_pool_factor(width: int) -> float:
    """Returns the pool size at which samples use the same share of pages as beams.

    It follows from the pages that `sharing` measured for requests with short prompts.

    Raises:
      ValueError: `sharing` did not measure that width.
    """
    path = Path(__file__).parents[2] / "records" / "sharing" / "result.npz"
    # The file is read as arrays: its experiment would import the engine and a model.
    with np.load(path) as arrays:

        def held(table: str) -> float:
            selected = arrays[f"{table}.lengths"] == "short"
            selected &= arrays[f"{table}.num_sequences"] == width
            if not selected.any():
                raise ValueError(f"{path}: has no requests of {width} sequences")
            pages = arrays[f"{table}.distinct_pages"][selected].sum()
            return float(pages / arrays[f"{table}.logical_pages"][selected].sum())

        return held("samples") / held("beams")


PANELS: Mapping[str, Panel] = {
    "12a": Panel("13B", "ShareGPT", 2.0),
    "12b": Panel("66B", "ShareGPT", 1.0),
    "12c": Panel("175B", "ShareGPT", 2.5),
    "12d": Panel("13B", "Alpaca", 30.0),
    "12e": Panel("66B", "Alpaca", 20.0),
    "12f": Panel("175B", "Alpaca", 20.0),
    "14a": Panel("13B", "Alpaca", 15.0, "samples", 2),
    "14b": Panel("13B", "Alpaca", 10.0, "samples", 4),
    "14c": Panel("13B", "Alpaca", 6.0, "samples", 6),
    "14d": Panel("13B", "Alpaca", 15.0, "beams", 2),
    "14e": Panel("13B", "Alpaca", 10.0, "beams", 4),
    "14f": Panel("13B", "Alpaca", 6.0, "beams", 6),
    "12a (calibrated)": Panel(settings.CALIBRATED, "ShareGPT", 2.0),
}
"""Panels by their names in the paper, and one with the calibrated clock."""
OF_THE_PAPER = tuple(
    name for name, x in PANELS.items() if x.server != settings.CALIBRATED
)


def axis_end_rows(rows: list[lab.Row]) -> list[lab.Row]:
    """Returns the rows at the ends of the published axes."""
    return [
        row
        for row in rows
        if not row["turn"]
        and math.isclose(row["rate_per_s"], PANELS[row["panel"]].axis)
    ]


@CLAIMS.judge
def claims(rows: list[lab.Row]) -> Iterator[lab.MeasuredValue]:
    """Judges the simulated panels with published step times."""
    rows = [row for row in rows if row["panel"] in OF_THE_PAPER]
    if not rows:
        return
    for name, server in settings.SERVERS.items():
        places = server.num_places / 1e3
        yield lab.measured("places", places, server=name, kv_gib=server.kv_gib)
    for name, server in settings.SERVERS.items():
        yield lab.measured("weights", server.weight_bytes / 1e9, server=name)
    panels = runs.group_rows(rows, "panel")
    curves = {name: runs.latency_curves(selected) for name, selected in panels.items()}
    full_panels: Any = {
        x: y for x, y in curves.items() if {"paged", ORACLE} <= y.keys()
    }
    yield from _figure_12(full_panels)
    for row in axis_end_rows(rows):
        panel = PANELS[row["panel"]]
        system = row["system"]
        printed = FIGURE_BATCHES.get(row["panel"], {}).get(system)
        if printed is None:
            continue
        is_alpaca = panel.data == "Alpaca"
        yield lab.measured(
            "batch",
            row["batch"],
            tolerance=batch_tolerance(system) * printed,
            panel=row["panel"],
            system=system,
            load=panel.title,
            rate=row["rate_per_s"],
            system_name=name_in_sentence(system),
            letter="ab"[is_alpaca],
            step=STEP if system == "paged" else "",
            shape=CURVE_SHAPE if is_alpaca else "",
        )
    yield from _figure_14(full_panels)
    for panel, systems in full_panels.items():
        is_sharegpt = PANELS[panel].data == "ShareGPT"
        orcas = (ORACLE, "Orca (Max)") if is_sharegpt else (ORACLE,)
        for other in filter(systems.__contains__, orcas):
            yield lab.measured(
                "drawn",
                _ratio(systems, other),
                published=drawings.drawn_ratio(panel, other, LATENCY_BOUND),
                load=PANELS[panel].title,
                other=other,
                figure=panel,
                bound=LATENCY_BOUND,
                beams=BEAMS if PANELS[panel].kind == "beams" else "",
            )


type Panels = Mapping[str, Mapping[str, LatencyCurve]]


def _ratio(systems: Mapping[str, LatencyCurve], other: str = ORACLE) -> float:
    return load_ratio(systems["paged"], systems[other], LATENCY_BOUND)


def _ratios(panels: Panels, other: str) -> list[float]:
    """Returns ratios of load at all bounds that both systems cross, over all panels."""
    return [
        ratio
        for x in panels.values()
        if other in x
        for ratio in load_ratios(x["paged"], x[other], LATENCY_RANGE).tolist()
    ]


def _figure_12(curves: Panels) -> Iterator[lab.MeasuredValue]:
    shared = {name: curves[name] for name in curves if name in ("12a", "12b", "12c")}
    for panel, systems in shared.items():
        for other in (ORACLE, "Orca (Max)"):
            if other in systems:
                yield lab.measured(
                    "load",
                    _ratio(systems, other),
                    other=other,
                    panel=panel,
                    load=PANELS[panel].title,
                    drawn=drawings.drawn_ratio(panel, other, LATENCY_BOUND),
                    note=f"At {LATENCY_BOUND} s a token. "
                    f"{SCALED if panel == '12c' else ''}",
                )
    if ratios := _ratios(shared, "Orca (Max)"):
        models = ", ".join(PANELS[x].server for x in shared)
        yield lab.measured(
            "orca_max",
            max(ratios),
            low=LATENCY_RANGE[0],
            high=LATENCY_RANGE[1],
            models=models,
            drawn=max(
                drawings.highest_ratio(panel, "Orca (Max)", LATENCY_RANGE)
                for panel in shared
            ),
        )
    plain = {name: curves[name] for name in curves if name.startswith("12")}
    if ratios := _ratios(plain, "FasterTransformer"):
        yield lab.measured("static", max(ratios))
    if {"12d", "12f"} <= curves.keys():
        large, small = (_ratio(curves[x]) for x in ("12f", "12d"))
        yield lab.measured("less", large / small)


def batch_tolerance(system: str) -> float:
    """Returns the tolerance of a batch size, as a share of the printed one."""
    return 0.12 if system == "paged" else 0.05


def name_in_sentence(system: str) -> str:
    """Returns the system's name within a sentence."""
    return "the paged system" if system == "paged" else system


def _figure_14(curves: Panels) -> Iterator[lab.MeasuredValue]:
    for panel in ("12d", "14f"):
        if panel in curves:
            yield lab.measured(
                "several",
                _ratio(curves[panel]),
                panel=panel,
                load=PANELS[panel].title,
                bound=LATENCY_BOUND,
                beams=BEAMS if panel == "14f" else "",
            )
    for letters, kind in (("abc", "samples"), ("def", "beams")):
        names = [f"14{letter}" for letter in letters]
        if all(name in curves for name in names):
            ratios = [_ratio(curves[x]) for x in names]
            yield lab.measured(
                "wider",
                min(b - a for a, b in itertools.pairwise(ratios)),
                kind=kind,
                found=", ".join(f"{x:.2f}" for x in ratios),
                beams=BEAMS if kind == "beams" else "",
            )
