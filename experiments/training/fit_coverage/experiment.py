"""Measures the coverage of fitted confidence intervals, and their warnings.

Surfaces with known coefficients are fitted repeatedly. On sound surfaces, the 90 %
intervals of the exponent `a = beta / (alpha + beta)`, of the floor E, and of the loss
at 10 times the largest compute should contain the truth in 90 % of the fits, without
warnings. Ill-posed surfaces (collinear, few, corrupted, or with a negligible term or
floor) should cause a warning, unless all 3 intervals contain the truth.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np

from experiments import lab
from scaling import fits
from scaling.laws import CHINCHILLA, ILL_POSED, SOUND, simulate_runs, surface_loss

QUANTITIES = ("a", "E", "loss at 10 C")
_MIN_SURFACES = 200
"""Fewest surfaces for a verdict on a share."""


class Config(lab.ConfigRecord):
    """Numbers and sizes of the surfaces."""

    sizes: Annotated[tuple[int, ...], lab.Range(10), lab.Entries(1)] = (32, 240)
    """Runs on a surface."""
    num_datasets: lab.PositiveInt = 400
    """Sound surfaces of each size and kind of noise."""
    num_ill_posed: lab.PositiveInt = 60
    """Surfaces of each ill-posed kind, of the first size."""
    num_resamples: Annotated[int, lab.Range(20)] = 400
    """Resamples of each surface."""
    seed: int = 1000
    """Seed of the first surface; following surfaces have following seeds."""


CONFIGS = {
    "real": Config(),
    "smoke": Config(sizes=(32,), num_datasets=6, num_ill_posed=1, num_resamples=50),
}


def run(config: Config, progress: lab.Progress = lab.QUIET) -> list[lab.Row]:
    """Fits all surfaces, a row per kind; if stopped, keeps the finished kinds."""
    kinds = [
        (SOUND, size, noise, config.num_datasets)
        for size in config.sizes
        for noise in ("student", "normal")
    ]
    kinds += [
        (kind, config.sizes[0], "both", config.num_ill_posed) for kind in ILL_POSED
    ]
    total = sum(count for *_, count in kinds)
    update = progress.bar("surfaces", total, "surfaces")
    done = 0
    rows = []
    for kind, size, noise, count in kinds:
        progress.show(f"{kind}, {size} runs, {noise} noise")
        outcomes = []
        for i in range(count):
            if progress.stopped:
                return rows
            noise_kind = ("student", "normal")[i % 2] if noise == "both" else noise
            outcomes.append(_fit(kind, size, noise_kind, config.seed + i, config))
            done += 1
            update(done)
        row = {"kind": kind, "runs": size, "noise": noise, "surfaces": count}
        covered, width, doubted = map(np.array, zip(*outcomes, strict=True))
        covers_all = covered.all(1)
        width = np.median(width, axis=0)
        shares = {f"covers {x}": covered[:, i].mean() for i, x in enumerate(QUANTITIES)}
        shares |= {f"width {x}": width[i] for i, x in enumerate(QUANTITIES)}
        shares |= {"doubted": doubted.mean(), "covers all": covers_all.mean()}
        shares["neither"] = np.mean(~covers_all & ~doubted)
        rows.append(row | {name: float(x) for name, x in shares.items()})
    return rows


def _fit(
    kind: str, size: int, noise: Any, seed: int, config: Config
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Returns coverage and width by quantity, and True if the fit has warnings."""
    data, truth = simulate_runs(kind, size, seed=seed, noise=noise)
    result = fits.bootstrap(
        fits.fit(CHINCHILLA, data),
        data,
        num_resamples=config.num_resamples,
        seed=seed,
    )
    flops = 10 * 6 * np.max(data["num_params"] * data["num_tokens"])
    params = 0.1 * flops**0.5
    tokens = flops / (6 * params)
    target = {"num_params": [params], "num_tokens": [tokens]}
    prediction = fits.predict(result, target, "confidence")
    a = result.exponent_intervals["a"]
    floor = result.intervals["E"]
    low, high = np.array([a, floor, (prediction.low[0], prediction.high[0])]).T
    exponent = truth["beta"] / (truth["alpha"] + truth["beta"])
    true = np.array([exponent, truth["E"], surface_loss(params, tokens, truth)])
    return (low <= true) & (true <= high), high - low, bool(result.warnings)


def _kinds(
    result: list[lab.Row],
) -> tuple[list[lab.Row], list[lab.Row]]:
    """Splits the rows into sound and ill-posed surfaces."""
    sound = [row for row in result if row["kind"] == SOUND]
    return sound, [row for row in result if row["kind"] != SOUND]


def plot(axes: np.ndarray, result: list[lab.Row]) -> None:
    """Draws the coverage on sound surfaces, and the results on ill-posed ones."""
    sound, ill = _kinds(result)
    left, right = axes
    left.axhspan(86, 98, color="0.92")
    lab.draw_reference_line(left, 90, "nominal")
    marks = ((lab.BLUE, "o"), (lab.ORANGE, "s"), (lab.GREEN, "^"))
    covered = []
    for i, (name, (color, mark)) in enumerate(zip(QUANTITIES, marks, strict=False)):
        values = [100 * row[f"covers {name}"] for row in sound]
        covered += values
        places = np.arange(len(sound)) + 0.16 * (i - 1)
        look = {"marker": mark, "linestyle": "", "markersize": 7}
        lab.draw_curve(left, places, values, color, name, **look)
    names = [f"{row['runs']} runs,\n{row['noise']} noise" for row in sound]
    left.set_xticks(range(len(sound)), names)
    title = "Sound surfaces: coverage of 90 % intervals"
    if covered:
        title = "Sound surfaces: 90 % intervals hold the truth in "
        title += f"{min(covered):.0f} to {max(covered):.0f} %"
        left.legend()
    lab.set_labels(left, title, "", "intervals that hold the truth [%]", ylim=(80, 100))
    names = [row["kind"] for row in ill]
    doubted = 100 * np.array([row["doubted"] for row in ill])
    neither = 100 * np.array([row["neither"] for row in ill])
    covered_only = 100 - doubted - neither
    start = np.zeros(len(ill))
    for values, label, color, hatch in (
        (doubted, "warning", lab.BLUE, ""),
        (covered_only, "covered", lab.GREEN, "//"),
        (neither, "neither", lab.RED, "\\\\"),
    ):
        look = {"color": lab.colors()[color], "hatch": hatch, "edgecolor": "white"}
        right.barh(names, values, 0.7, left=start, label=label, **look)
        start = start + values
    right.invert_yaxis()
    right.tick_params(axis="y", length=0)
    title = "Ill-posed surfaces"
    if ill:
        weights = [row["surfaces"] for row in ill]
        share = np.average(neither, weights=weights)
        title = f"Ill-posed surfaces: {share:.1f} % have no warning and no coverage"
        right.legend()
    lab.set_labels(right, title, "surfaces [%]", "", xlim=(0, 100))


@lab.claims_file(__file__).judge
def claims(result: list[lab.Row]) -> Iterator[lab.MeasuredValue]:
    """Compares coverage with the nominal one."""
    sound, ill = _kinds(result)
    for row in sound:
        few = row["surfaces"] < _MIN_SURFACES
        for name in QUANTITIES:
            covers = row[f"covers {name}"]
            yield lab.measured("covers", covers, differs=few, name=name, **row)
    for row in sound:
        few = row["surfaces"] < _MIN_SURFACES
        yield lab.measured("sound", row["doubted"], differs=few, **row)
    if ill:
        weights = [row["surfaces"] for row in ill]
        share = float(np.average([row["neither"] for row in ill], weights=weights))
        few = sum(weights) < _MIN_SURFACES
        yield lab.measured("ill_posed", share, differs=few, surfaces=sum(weights))


def summary(result: list[lab.Row]) -> list[lab.ReportPart]:
    """Returns tables of coverage and widths, and of warnings."""
    sound, ill = _kinds(result)
    heads = ["runs", "noise", *(f"{x}: covers, width" for x in QUANTITIES), "doubted"]
    lines = [
        [
            str(row["runs"]),
            row["noise"],
            *(
                f"{lab.format_percent(row[f'covers {x}'])}, {row[f'width {x}']:.3g}"
                for x in QUANTITIES
            ),
            lab.format_percent(row["doubted"]),
        ]
        for row in sound
    ]
    parts: list[lab.ReportPart] = [
        lab.Sheet("sound surfaces, 90 % intervals", heads, lines)
    ]
    if ill:
        keys = ("covers all", "doubted", "neither")
        rows = [
            [row["kind"], *(lab.format_percent(row[x]) for x in keys)] for row in ill
        ]
        sizes = f"{ill[0]['runs']} runs, {ill[0]['surfaces']} each"
        title = f"ill-posed surfaces of {sizes}"
        parts.append(lab.Sheet(title, ["kind", *keys], rows))
    return parts


STUDY = lab.Study(CONFIGS, list, run, plot, claims, summary, panels=lab.Panels(2, 1))
