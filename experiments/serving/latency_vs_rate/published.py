"""What was published on load and latency, held against ours."""

import itertools
from collections.abc import Iterator
from typing import Any

from experiments.framework import Claim, judge
from experiments.serving.latency_vs_rate import capacity, settings
from experiments.serving.latency_vs_rate.capacity import BOUND, BOUNDS, Curve
from experiments.serving.latency_vs_rate.panels import PANELS

PAPER = "Kwon et al. 2023, arXiv:2309.06180"

PLACES = {"13B": 15.7, "66B": 9.7, "175B": 60.1}
"""Thousands of tokens whose keys and values fit: table 1."""
WEIGHTS = {"13B": 26.0, "66B": 132.0, "175B": 346.0}
"""GB of parameters: table 1."""
RATIOS = {
    "Orca (Oracle)": (1.7, 2.7),
    "Orca (Max)": (2.7, 8.0),
}
"""ShareGPT: how many times the load of these the paged system bears, section 6.2."""
FASTER_TRANSFORMER = 22.0
"""The same at most, over FasterTransformer: section 6.2."""
BATCHES: dict[str, dict[str, float]] = {
    "12a": dict(zip(settings.SYSTEMS[1:], (7.00, 9.81, 13.62, 30.42), strict=True)),
    "12d": dict(zip(settings.SYSTEMS[1:], (7.00, 43.24, 72.75, 132.44), strict=True)),
}
"""Requests served at once at 2 and 30 requests/s: figure 13."""
SEVERAL = {"12d": 1.3, "14f": 2.3}
"""Times the load of Orca (Oracle), one sequence and six beams: section 6.3."""

STEP = (
    "The paper prints no times: a step takes what DistServe's fit says, times the "
    "ratio of the cards' bandwidths, and longer steps fill more memory at one rate."
)
_OWN = "For OPT-175B no times are published at all: those of OPT-66B are scaled."
_SHAPE = "Shapes of Alpaca's lengths are our choice; only their means are printed."


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Judges what was served; panels that were not are left out."""
    curves = capacity.curves(rows)
    if not curves:
        return []
    both = {"paged", "Orca (Oracle)"}
    curves = {name: x for name, x in curves.items() if both <= x.keys()}
    return [
        *_table_1(),
        *_figure_12(curves),
        *_figure_13(rows),
        *_figure_14(curves),
    ]


def _table_1() -> Iterator[Claim]:
    for name, server in settings.SERVERS.items():
        yield judge(
            f"OPT-{name}: token places in {server.kv_gib} GiB",
            source=f"{PAPER}, table 1",
            published=PLACES[name],
            ours=server.num_places / 1e3,
            unit="thousand",
            tolerance=0.05,
            note="Memory over the bytes of a token's keys and values.",
        )
    for name, server in settings.SERVERS.items():
        yield judge(
            f"OPT-{name}: parameters in 16 bits",
            source=f"{PAPER}, table 1",
            published=WEIGHTS[name],
            ours=server.weight_bytes / 1e9,
            unit="GB",
            tolerance=1.0,
        )


def _ratio(systems: dict[str, Curve], other: str) -> float:
    """How many times the load of another system the paged one bears; NaN if unknown."""
    ours, theirs = (capacity.at(systems[x]) for x in ("paged", other))
    known = ours.relation == theirs.relation == "is"
    return ours.rate / theirs.rate if known else float("nan")


def _figure_12(curves: dict[str, dict[str, Curve]]) -> Iterator[Claim]:
    shared = {name: curves[name] for name in curves if name in ("12a", "12b", "12c")}
    for name, systems in shared.items():
        for other, (least, most) in RATIOS.items():
            if other not in systems:
                continue
            for published, relation in ((least, "at_least"), (most, "at_most")):
                yield judge(
                    f"{PANELS[name].title}: times the load of {other}",
                    source=f"{PAPER}, figure {name} and section 6.2",
                    published=published,
                    ours=_ratio(systems, other),
                    unit="1",
                    relation=relation,
                    note=f"At {BOUND} s a token. {_OWN if name == '12c' else ''}",
                )
    found = [
        ratio
        for systems in shared.values()
        if "Orca (Max)" in systems
        for ratio in capacity.ratios(systems["paged"], systems["Orca (Max)"])
    ]
    if found:
        yield judge(
            "ShareGPT: up to 8 times the load of Orca (Max)",
            source=f"{PAPER}, section 6.2",
            published=RATIOS["Orca (Max)"][1],
            ours=max(found),
            unit="1",
            relation="at_least",
            note=f"The largest ratio at {BOUNDS[0]} to {BOUNDS[1]} s a token, of "
            f"models {', '.join(PANELS[x].server for x in shared)}.",
        )
    plain = {name: curves[name] for name in curves if name.startswith("12")}
    found = [
        ratio
        for systems in plain.values()
        if "FasterTransformer" in systems
        for ratio in capacity.ratios(systems["paged"], systems["FasterTransformer"])
    ]
    if found:
        yield judge(
            "up to 22 times the load of FasterTransformer",
            source=f"{PAPER}, section 6.2",
            published=FASTER_TRANSFORMER,
            ours=max(found),
            unit="1",
            relation="at_least",
            note="Static batches, their steps as fast as those of the others: its own "
            "kernels are not known. The largest ratio at any bound and load.",
        )
    if {"12d", "12f"} <= curves.keys():
        yield judge(
            "OPT-175B, Alpaca: the advantage over Orca (Oracle) is less pronounced "
            "than for OPT-13B; its share of that",
            source=f"{PAPER}, section 6.2, on figure 12f",
            published=1.0,
            ours=_ratio(curves["12f"], "Orca (Oracle)")
            / _ratio(curves["12d"], "Orca (Oracle)"),
            unit="1",
            relation="at_most",
            note=f"Many short requests fit, and the batch is full. {_OWN}",
        )


def _figure_13(rows: list[dict[str, Any]]) -> Iterator[Claim]:
    for row in capacity.ends(rows):
        batches = BATCHES.get(row["panel"], {})
        if row["system"] not in batches:
            continue
        published, panel = batches[row["system"]], PANELS[row["panel"]]
        share = batch_tolerance(row["system"])
        note = STEP if row["system"] == "paged" else ""
        if panel.data == "Alpaca":
            note = f"{note} {_SHAPE}".strip()
        yield judge(
            f"{panel.title}, {row['rate_per_s']:g} requests/s: served at once by "
            f"{by(row['system'])}",
            source=f"{PAPER}, figure 13{'ab'[panel.data == 'Alpaca']}",
            published=published,
            ours=row["batch"],
            unit="requests",
            tolerance=share * published,
            note=note,
        )


def batch_tolerance(system: str) -> float:
    """How far a batch may lie from the printed one, as a share of it.

    That of the paged system follows from the length of a step; the others' from memory
    and lengths alone, once more is asked than they bear.
    """
    return 0.12 if system == "paged" else 0.05


def by(system: str) -> str:
    """The system's name within a sentence."""
    return "the paged system" if system == "paged" else system


def _figure_14(curves: dict[str, dict[str, Curve]]) -> Iterator[Claim]:
    for name, published in SEVERAL.items():
        if name in curves:
            yield judge(
                f"{PANELS[name].title}: times the load of Orca (Oracle)",
                source=f"{PAPER}, section 6.3, on figures 12d and 14f",
                published=published,
                ours=_ratio(curves[name], "Orca (Oracle)"),
                unit="1",
                tolerance=0.1 * published,
                note=f"At {BOUND} s a token. {_SHAPE} {_beams(name)}".strip(),
            )
    for letters, what in (("abc", "samples"), ("def", "beams")):
        names = [f"14{letter}" for letter in letters]
        if all(name in curves for name in names):
            found = [_ratio(curves[x], "Orca (Oracle)") for x in names]
            yield judge(
                f"the more {what}, the larger the advantage over Orca (Oracle); "
                "smallest gain from one width to the next",
                source=f"{PAPER}, section 6.3, figure 14",
                published=0.0,
                ours=min(b - a for a, b in itertools.pairwise(found)),
                unit="1",
                relation="at_least",
                note="Ratios at widths of 2, 4 and 6: "
                f"{', '.join(f'{x:.2f}' for x in found)}. {_beams(names[0])}".strip(),
            )


def _beams(name: str) -> str:
    if PANELS[name].kind != "beams":
        return ""
    return (
        "Beams are samples in a pool longer by what beams share beyond the prompt, as "
        "the engine measured it in `sharing`."
    )
