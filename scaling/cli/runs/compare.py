"""`jaxkv compare LOG --by COLUMN`: how much compute does one group of runs save?"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from jaxkv.cli import CommandOutput, describe_default, parse_subject
from jaxkv.report import Sheet, numbered_list
from jaxkv.validation import PositiveInt, Range
from scaling.cli.runs.options import LogOptions, read_runs
from scaling.fits import (
    CHANCE,
    GROUP,
    FitResult,
    Restrictions,
    bootstrap,
    compare,
    f_test_p_value,
    fit,
    join_groups,
    measure_goodness,
    split_groups,
)
from scaling.laws import Law

_UNKNOWN = (math.nan, math.nan)


class CompareOptions(LogOptions):
    """Groups of runs, and the law and the floor of their curves."""

    by: str = ""
    """Columns whose values distinguish the groups, such as optimizer."""
    baseline: Annotated[str, describe_default("the first group of the log")] = ""
    """Group that the other ones are compared with."""
    law: str = "power-floor"
    """Law of each group: of compute, or with an optimum, such as chinchilla."""
    floor: str = "shared"
    """Floor of the groups: shared, free, or a value in nats per token."""
    losses: Annotated[PositiveInt, Range(2, 100)] = 5
    """Number of losses in the table."""


class GroupFits(NamedTuple):
    """Fits of groups of runs with one convention of their floors.

    Attributes:
      fits: fit of each group.
      warnings: lack of fit, in sentences.
    """

    fits: list[FitResult]
    warnings: list[str]


def main(args: list[str]) -> CommandOutput:
    """Runs `compare LOG --by COLUMN [OPTIONS]`.

    Raises:
      ValueError: LOG is missing, an option is invalid, or a group cannot be fitted.
    """
    log, options = parse_subject(
        args,
        CompareOptions,
        "jaxkv compare LOG",
        "LOG is missing: a table of runs, or the folder of a sweep",
        "Fits a law to each group of the runs, and computes the ratio of compute to "
        "the baseline's for equal losses, with intervals from resampled runs.",
    )
    return compare_groups(log, options)


def compare_groups(log: str, options: CompareOptions) -> CommandOutput:
    """Compares the groups of a log at equal loss."""
    names = tuple(filter(None, options.by.replace(" ", "").split(",")))
    if not names:
        raise ValueError("--by must name a column that distinguishes the groups")
    runs, law = read_runs(log, options, options.law)
    labels = np.array(runs.label(names))
    groups = [*dict.fromkeys(labels.tolist())]
    if len(groups) < 2:
        raise ValueError(f"--by {options.by}: {runs.source} has one group, {groups[0]}")
    baseline = options.baseline or groups[0]
    if baseline not in groups:
        raise ValueError(f"--baseline {baseline}: must be one of {', '.join(groups)}")
    groups.sort(key=lambda group: group != baseline)
    parts = [runs.take(labels == group) for group in groups]
    columns = [part.columns for part in parts]
    clusters = [np.array(part.runs) for part in parts]
    fits, doubts = _fit_groups(law, options, groups, columns, clusters)
    results = []
    for group, result in zip(groups[1:], fits[1:], strict=True):
        speedup = compare(
            result, fits[0], num_losses=options.losses, level=options.level
        )
        results.append((group, speedup))
        for end, ratio in (("worst", speedup.ratio[0]), ("best", speedup.ratio[-1])):
            if not math.isfinite(ratio):
                doubts.append(f"{group}: no ratio at the {end} common loss")
    document = {
        "log": log,
        "by": options.by,
        "baseline": baseline,
        "law": law.name,
        "floor": options.floor,
        "level": options.level,
        "groups": [
            {
                "group": group,
                "num_points": result.num_points,
                "coefficients": result.coefficients,
                "intervals": result.intervals,
                "residual_sizes": measure_goodness(result.residuals)._asdict(),
            }
            for group, result in zip(groups, fits, strict=True)
        ],
        "speedups": [
            {"group": group} | {x: y.tolist() for x, y in speedup._asdict().items()}
            for group, speedup in results
        ],
        "warnings": doubts,
        "notes": [*runs.notes],
    }
    level = f"{options.level:.0%} interval"
    rows = [
        (group, f"{loss:.4f}", f"{ratio:.3g}", _range(low, high))
        for group, speedup in results
        for loss, ratio, low, high in zip(*speedup, strict=True)
    ]
    sheets = [
        Sheet(
            "groups",
            ("group", "runs", "error: median, 90 %, max", law.floor or "-", level),
            [
                (
                    group,
                    f"{result.num_points:,}",
                    ", ".join(
                        f"{100 * x:.2g} %" for x in measure_goodness(result.residuals)
                    ),
                    f"{result.coefficients.get(law.floor or '', math.nan):.4g}",
                    "given"
                    if law.floor in result.fixed
                    else _range(*result.intervals.get(law.floor or "", _UNKNOWN)),
                )
                for group, result in zip(groups, fits, strict=True)
            ],
            f"{law.formula}, floor: {options.floor}. {law.source}.",
        ),
        Sheet(
            f"compute of {baseline} over that of each group, at equal loss",
            ("group", "loss", "speedup", level),
            rows,
            "Losses are those that both curves reach within their runs.",
        ),
    ]
    if doubts:
        sheets.append(numbered_list("warnings", doubts))
    return CommandOutput(document, sheets, [])


def _range(low: float, high: float) -> str:
    """Returns an interval as text; "unknown" if an end is missing or far away."""
    is_far = not (math.isfinite(low) and math.isfinite(high)) or high > 1e6
    return "unknown" if is_far else f"{low:.3g} to {high:.3g}"


def _fit_groups(
    law: Law,
    options: CompareOptions,
    groups: list[str],
    columns: Sequence[Mapping[str, Any]],
    clusters: list[np.ndarray],
) -> GroupFits:
    """Fits every group, and all of them together if they share the floor."""
    restrictions = Restrictions()
    if options.floor not in ("shared", "free"):
        try:
            value = float(options.floor)
        except ValueError:
            raise ValueError(
                f"--floor {options.floor}: must be shared, free or a number"
            ) from None
        if law.floor is None:
            raise ValueError(f"--floor {options.floor}: {law.name} has no floor")
        restrictions = Restrictions({law.floor: value})
    separate = []
    for group, data, cluster in zip(groups, columns, clusters, strict=True):
        try:
            separate.append(
                fit(
                    law,
                    data,
                    restrictions=restrictions,
                    cluster=cluster,
                    level=options.level,
                )
            )
        except ValueError as error:
            raise ValueError(f"{group}: {error}") from None
    doubts = [
        f"{group}: {line}"
        for group, result in zip(groups, separate, strict=True)
        for line in result.warnings
    ]
    resample = functools.partial(
        bootstrap, num_resamples=options.bootstrap, seed=options.seed
    )
    if options.floor != "shared":
        fits = [
            resample(result, data, cluster=cluster)
            for result, data, cluster in zip(separate, columns, clusters, strict=True)
        ]
        return GroupFits(fits, doubts)
    joined = join_groups(law, len(groups))
    data = {
        name: np.concatenate([part[name] for part in columns])
        for name in (*law.inputs, law.target)
    }
    sizes = [len(cluster) for cluster in clusters]
    data[GROUP] = np.repeat(np.exp(np.arange(len(groups))), sizes)
    cluster = np.concatenate(
        [[f"{i} {run}" for run in part] for i, part in enumerate(clusters)]
    )
    start = {
        f"{name}_{i}": value
        for i, result in enumerate(separate)
        for name, value in result.coefficients.items()
        if name != law.floor
    }
    floor_name = law.floor or ""
    floors = [result.coefficients[floor_name] for result in separate]
    starts = [
        start | {floor_name: floor}
        for floor in (min(floors), sum(floors) / len(floors))
    ]
    result = fit(joined, data, cluster=cluster, starts=starts, level=options.level)
    result = resample(result, data, law=joined, cluster=cluster)
    # One floor for all groups against one for each.
    alone = sum(float(x.residuals @ x.residuals) for x in separate)
    together = float(result.residuals @ result.residuals)
    freedom = len(groups) - 1
    below = len(cluster) - sum(x.num_free for x in separate)
    if below > 0 and alone > 0:
        ratio = max(together - alone, 0.0) / freedom / (alone / below)
        chance = f_test_p_value(ratio, freedom, below)
        if chance < CHANCE:
            listed = ", ".join(f"{floor:.4g}" for floor in floors)
            doubts.append(
                f"one floor does not fit all groups (p = {chance:.1g}; separately "
                f"{listed}): see --floor free"
            )
    return GroupFits(split_groups(result, law, columns), doubts)
