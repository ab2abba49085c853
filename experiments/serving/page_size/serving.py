"""Simulates workloads with pages of every size.

The time of a step does not depend on the page size, so that pages differ only by
memory: the unused places of each sequence's last page. The `attention` study measures
the cost of page table lookups.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from experiments import lab
from experiments.serving.latency_vs_rate import runs, settings
from jaxkv import scheduling, simulation
from jaxkv.simulation import SimulationMember

SLOTS: Mapping[str, int] = {"ShareGPT": 96, "Alpaca": 256}
LOADED: Mapping[str, float] = {"ShareGPT": 1.7, "Alpaca": 25.0}
"""Requests/s at which latencies are compared, close to the sustained rate."""
OVERLOAD_RATES: Mapping[str, float] = {"ShareGPT": 2.2, "Alpaca": 60.0}
"""Requests/s above the sustained rate, at which memory is full."""
BEST: Mapping[str, tuple[int, int]] = {"ShareGPT": (16, 128), "Alpaca": (16, 32)}
"""Best page sizes in figure 18b."""
CLAIMS = lab.claims_file(__file__)


class Config(lab.ConfigRecord):
    """Page sizes and the load."""

    page_sizes: lab.AscendingInts = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Token places in a page; ascending."""
    hours: lab.PositiveFloat = 1 / 3
    """Hours of simulated load."""
    seed: lab.NonNegativeInt = 0
    """Seed of lengths and arrivals."""


CONFIGS = {"paper": Config()}


class Serving(lab.ResultTable):
    """Latency and memory of each load and page size."""

    data: lab.Texts = lab.column("dataset of the lengths")
    rate: lab.Floats = lab.column("requests/s")
    page_size: lab.Floats = lab.column("token places in a page")
    normalised_s: lab.Floats = lab.column(
        "mean latency / output tokens; elapsed time for requests without an answer"
    )
    batch: lab.Floats = lab.column("mean batch size")
    tokens: lab.Floats = lab.column("share of the memory that holds keys and values")
    unused: lab.Floats = lab.column(
        "share of the memory in allocated but unused places"
    )
    preempted: lab.Floats = lab.column("preemptions per request")


class Result(lab.ResultRecord):
    """Simulated loads."""

    serving: Serving = lab.column("by dataset, rate and page size")


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Simulates each dataset at two rates; if stopped, keeps the finished ones."""
    page_sizes = config.page_sizes
    seconds = 3600 * config.hours
    seed = config.seed
    server = settings.SERVERS["13B"]
    rows = []
    for data, law in settings.DATASETS.items():
        if progress.stopped:
            break
        progress.show(f"{data}, pages of every size")
        load = runs.draw_load(law, OVERLOAD_RATES[data], seconds, seed)
        cases = [
            (r, s) for r in (LOADED[data], OVERLOAD_RATES[data]) for s in page_sizes
        ]
        places = server.num_places
        cost = settings.step_time(server)
        members = [
            SimulationMember(
                load.at(rate),
                runs.pool_capacity(places // size, size),
                scheduling.fcfs(),
                cost,
            )
            for rate, size in cases
        ]
        served = simulation.simulate(
            simulation.stack(members),
            max_slots=SLOTS[data],
            head=runs.HEAD_SIZE,
            since_s=seconds / 4,  # until then memory fills
            until_s=seconds,
            progress=progress,
        )
        for i, (rate, size) in enumerate(cases):
            w = load.at(rate)
            means = served.means
            num = w.prompt.shape[0]
            finish_s = served.finish_s[i][:num]
            finish_s = np.where(np.isnan(finish_s), served.end_s[i], finish_s)
            took_s = finish_s - served.arrival_s[i][:num]
            latency_s = np.mean(took_s / np.asarray(w.output))
            unused = means.reserved[i] + means.internal[i]
            again = served.preempted[i].sum() / num
            measures = (latency_s, means.batch[i], means.tokens[i], unused, again)
            rows.append((data, rate, size, *measures))
    return Result(Serving.of(rows))


@CLAIMS.judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares latencies and memory use with published and expected ones."""
    places = settings.SERVERS["13B"].num_places
    for data in result.serving.distinct("data"):
        rows = result.serving.where(data=data, rate=LOADED[data])
        law = settings.DATASETS[data]
        sizes, latency, (low, high) = rows.page_size, rows.normalised_s, BEST[data]
        mask_by_id = {"best": (sizes >= low) & (sizes <= high), "larger": sizes > high}
        for id, selected in mask_by_id.items():
            if selected.any():
                slowest = float(latency[selected].max() / latency.min())
                yield lab.measured(
                    id, slowest, rate=LOADED[data], data=data, low=low, high=high
                )
        rows = result.serving.where(data=data, rate=OVERLOAD_RATES[data])
        # The formula counts before the tokens of a step are written, the simulator
        # after.
        written = rows.batch / places
        unused = 100 * (rows.unused + written)
        for i, size in enumerate(rows.page_size.astype(int).tolist()):
            if size in (16, 128) and size < law.prompt.mean + law.output.mean:
                half = 100 * float(rows.batch[i]) * (size + 1) / 2 / places
                yield lab.measured(
                    "half", float(unused[i]), published=half, data=data, size=size
                )


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws latency and memory use by page size."""
    latency, memory = axes
    worst = ("", 0, 0.0)
    best = ("", 0, 100.0)
    for data in ("ShareGPT", "Alpaca"):
        rows = result.serving.where(data=data, rate=LOADED[data])
        if len(rows):
            y = rows.normalised_s
            label = f"{data}, {LOADED[data]:g} requests/s"
            lab.draw_curve(latency, rows.page_size, y, data, label)
            bar = [0.85 * y.min()] * 2
            look = {"marker": "", "linewidth": 4}
            label = f"{data}, the paper's best"
            lab.draw_curve(latency, BEST[data], bar, data, label, alpha=0.5, **look)
            times = y.max() / y.min()
            at = int(rows.page_size[y.argmax()])
            worst = (data, at, times) if times > worst[2] else worst
        rows = result.serving.where(data=data, rate=OVERLOAD_RATES[data])
        lab.draw_curve(memory, rows.page_size, 100 * rows.tokens, data, data)
        if len(rows) and 100 * rows.tokens.min() < best[2]:
            at = int(rows.page_size[rows.tokens.argmin()])
            best = data, at, 100 * float(rows.tokens.min())
    size = "page size [tokens]"
    title = "Latency by page size"
    if worst[0]:
        title = f"Pages of {worst[1]}: {worst[2]:.0f} times the latency on {worst[0]}"
    lab.set_labels(latency, title, size, "latency [s/token]", yscale="log")
    lab.label_log_axis(latency.yaxis)
    title = "A full memory by page size"
    if best[0]:
        title = (
            f"Pages of {best[1]}: tokens fill {best[2]:.0f} % of memory on {best[0]}"
        )
    lab.set_labels(memory, title, size, "memory with tokens [%]", ylim=(0, 104))
    for ax in axes:
        lab.use_powers_of_two(ax)
        ax.legend()


STUDY = lab.Study(
    CONFIGS,
    Result,
    run,
    plot,
    claims,
    panels=lab.Panels(1, 2, 3.6),
    switch=("hours", True),
)
