"""Measures preemption with a real model.

A model continues real text. Requests are always the same; only the policy and the
memory differ. All requests arrive at 0 s. The model's own end token is ignored, so that
output lengths are as requested.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import numpy as np

from experiments import lab
from experiments.harness import (
    PromptRequest,
    RaggedConfig,
    cut_held_out_prompts,
    load_text_model,
)
from experiments.serving.preemption import restore_times, serving
from experiments.serving.preemption.restore_times import RestoreTimes
from experiments.serving.preemption.serving import (
    PreemptionSetting,
    PreemptionSettings,
    Servings,
)
from jaxkv.engine import EngineConfig
from jaxkv.models import LoadedModel
from jaxkv.scheduling import Victim

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Config(RaggedConfig):
    """The requests, and the memory that serves them."""

    prompt_tokens: tuple[int, int] = (16, 128)
    """Shortest and longest prompt in tokens."""
    output_tokens: tuple[int, int] = (48, 320)
    """Shortest and longest answer in tokens."""
    sigma: float = 0.6
    """Standard deviation of the logarithm of both lengths."""
    max_slots: int = 16
    """Largest number of sequences that run at once."""
    pool_share: Annotated[float, lab.Range(0, 1, "(]")] = 0.4
    """Pages in the pool, as a share of the pages of the `max_slots` longest requests at
    their end."""
    pool_shares: Annotated[tuple[float, ...], lab.Range(0, 1, "(]")] = (0.5, 0.3, 0.2)
    """Further pool sizes, as shares."""
    watermark_shares: lab.Shares = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
    """Watermarks: pages kept free at admission, as shares of the pool."""
    swap_shares: lab.Shares = (0.0, 1 / 8, 1 / 4, 1 / 2, 1.0)
    """Sizes of the swap space in pages, as shares of the pool."""
    host_share: Annotated[float, lab.Range(0, 1, "(]")] = 1 / 8
    """Pages of the device buffer when host memory is used, as a share of the pool."""
    host_shares: lab.Shares = (0.0, 1 / 16, 1.0)
    """Pages of swap space in host memory, as shares of the pool."""
    repeats: lab.PositiveInt = 3
    """Servings of each timed setting."""
    move_tokens: lab.PositiveInt = 512
    """Tokens of the single request that is restored."""
    page_sizes: lab.PositiveInts = (1, 4, 16, 64)
    """Page sizes at which it is restored."""
    move_repeats: lab.PositiveInt = 30
    """Measurements of the restored request."""
    numerics: Literal["fast", "reproducible"] = "reproducible"
    """Numerics: "reproducible" makes answers independent of preemption."""


CONFIGS = {
    "real": Config(),
    "smoke": Config(
        num_requests=16,
        prompt_tokens=(4, 16),
        output_tokens=(16, 40),
        sigma=0.6,
        pool_shares=(0.6, 0.5),
        watermark_shares=(0.0, 1 / 4),
        swap_shares=(0.0, 1 / 4, 1.0),
        host_shares=(),
        repeats=1,
        move_tokens=64,
        page_sizes=(),
        move_repeats=2,
        max_slots=6,
        page_size=4,
        token_budget=16,
        steps_per_call=4,
    ),
}


class Result(lab.ResultRecord):
    """Servings of the same requests under many settings, and times of one restore."""

    ways: Servings = lab.column(
        "without preemption; with recomputation and with swapping"
    )
    victims: Servings = lab.column("by rule that selects the victim")
    watermarks: Servings = lab.column("by pages kept free at admission")
    pools: Servings = lab.column("by pool size")
    spaces: Servings = lab.column("by swap space on the device")
    hosts: Servings = lab.column(
        "by swap space in host memory, with a small device buffer"
    )
    moves: RestoreTimes = lab.column("times to restore one request")


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Serves all settings; if stopped, keeps the finished ones."""
    longest = max(config.longest, config.move_tokens + 1)
    model = load_text_model(config.model, max_length=longest)
    progress.show("cutting prompts from files that the model has not seen")
    requests, moved = cut_prompts(config, model)
    served = serving.serve_settings(
        model, requests, _list_settings(config, requests), progress
    )
    moves = restore_times.time_restores(
        model,
        moved,
        config.page_sizes,
        repeats=config.move_repeats,
        numerics=config.numerics,
        progress=progress,
    )
    return Result(**served, moves=moves)


def _list_settings(
    config: Config, requests: list[PromptRequest]
) -> Iterator[tuple[str, str, int, PreemptionSettings]]:
    """Lists the settings to compare; the first has no preemption.

    Yields:
      A field of the result, and the arguments of `serving.serve_settings`.
    """
    lengths = [len(x.tokens) + (x.sampling.max_tokens or 0) for x in requests]
    pages = sorted(-(-length // config.page_size) for length in lengths)
    need = sum(pages[-config.max_slots :])

    def pages_of(share: float) -> int:
        # The pool holds at least the longest request.
        return max(pages[-1], round(share * need))

    pool = pages_of(config.pool_share)
    small = max(1, round(config.host_share * pool))
    wide = tight_engine_config(config, need, need)
    tight = tight_engine_config(config, pool, pool)
    narrow = tight_engine_config(config, pool, small)
    again = PreemptionSetting("recompute", pool)
    swap = PreemptionSetting("swap", pool, "swap", swap_pages=pool)
    both = (again, swap)
    rules = get_args(Victim.__value__)
    cases = [(PreemptionSetting("room for all", need), wide)]
    for setting in both:
        held = setting._replace(name=f"{setting.name}, hold new", hold_new=True)
        cases += [(setting, tight), (held, tight)]
    yield "ways", "recompute and swap", config.repeats, cases
    settings = [
        x._replace(name=f"{x.name}, {y}", victim=y) for x in both for y in rules
    ]
    yield "victims", "who is preempted", 1, [(setting, tight) for setting in settings]
    marks = [round(share * pool) for share in config.watermark_shares]
    cases = [(again._replace(watermark=mark), tight) for mark in marks]
    yield "watermarks", "watermarks", 1, cases
    sizes = {pool, *map(pages_of, config.pool_shares)}
    cases = [
        (
            setting._replace(pool_pages=num, swap_pages=min(setting.swap_pages, num)),
            wide,
        )
        for num in sorted(sizes, reverse=True)
        for setting in both
    ]
    yield "pools", "smaller pools", 1, cases
    places = [round(share * pool) for share in config.swap_shares]
    cases = [(swap._replace(swap_pages=num), tight) for num in places]
    yield "spaces", "swap space", 1, cases
    places = [round(share * pool) for share in config.host_shares]
    swap = swap._replace(swap_pages=small)
    cases = [(swap._replace(host_pages=num), narrow) for num in places]
    yield "hosts", "host memory", 1, cases


def tight_engine_config(
    config: Config, num_pages: int, max_swap_pages: int
) -> EngineConfig:
    """Returns the engine config for a pool size and swap space in pages."""
    return config.engine_config(
        num_pages,
        config.longest,
        max_swap_pages=max_swap_pages,
        numerics=config.numerics,
        seed=config.seed,
    )


def cut_prompts(
    config: Config, model: LoadedModel
) -> tuple[list[PromptRequest], PromptRequest]:
    """Cuts the prompts of the served requests and of the restored request."""
    rng = np.random.default_rng(config.seed)
    requests = config.requests(model.tokenizer, rng, ignore_eos=True)
    # Eight attempts: a file may be shorter than the request.
    tries = [config.move_tokens] * 8
    ask = requests[0].sampling
    candidates = cut_held_out_prompts(model.tokenizer, tries, [ask] * 8, rng)
    return requests, max(candidates, key=lambda request: len(request.tokens))


@lab.claims_file(__file__).judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Judges the parts that were served."""
    ways = result.ways
    served = [x for x in lab.field_values(result).values() if isinstance(x, Servings)]
    if len(ways) > 1:
        different = sum(x.num_different.sum() for x in served)
        yield lab.measured("alike", different, num=sum(map(len, served)))
    roomy = [
        x.at((x.preemption == "swap") & (x.swap_pages >= x.pool_pages)) for x in served
    ]
    if any(map(len, roomy)):
        yield lab.measured("roomy", sum(x.num_recomputed.sum() for x in roomy))
    held = [x.where(hold_new=True) for x in served]
    if any(map(len, held)):
        yield lab.measured("held", sum(x.num_overtaken.sum() for x in held))
    none = result.spaces.where(swap_pages=0)
    plain = ways.where(name="recompute")
    if len(none) and len(plain):
        lost = none.num_recomputed[0]
        reference = float(plain.num_recomputed[0])
        yield lab.measured("left_end", lost, published=reference)
    again = result.pools.where(preemption="recompute")
    if len(again):
        max_percent = 100 * again.recomputed_share.max()
        yield lab.measured("smallest_pool", max_percent, pages=again.pool_pages.min())
    again = result.victims.where(preemption="recompute")
    latest = again.where(victim="latest").recomputed_share
    if len(latest) and len(again) > 1:
        saved = 1 - again.recomputed_share.min() / max(latest[0], 1e-9)
        yield lab.measured("victims", saved, num=len(again))
    again, swap = (ways.where(name=x) for x in ("recompute", "swap"))
    if len(again) and len(swap):
        yield lab.measured(
            "end_to_end", np.median(again.duration_s[0] / swap.duration_s[0])
        )
    moves = result.moves
    sizes = result.moves.page_size
    if len(moves) < 2:
        return
    again, swap = (
        np.median(x, axis=1) for x in (moves.recompute_s, moves.swap_through_host_s)
    )
    words = {"low": sizes.min(), "high": sizes.max()}
    yield lab.measured("reading", again.max() / again.min(), **words)
    small, large = swap[sizes.argmin()], swap[sizes.argmax()]
    yield lab.measured("small_pages", small / large, **words)
    yield lab.measured("a_fifth", (again / swap).max())


def summary(result: Result) -> list[lab.ReportPart]:
    """Returns tables of all settings; parts that were not served are left out."""
    ways = result.ways
    moves = result.moves
    counts = ("num_preempted", "recomputed_share", "pages_moved", "steps")
    times = ("seconds", "mean_latency_s", "p95_latency_s", "num_different")
    moved = ("num_bytes", "recompute_s", "swap_s", "swap_through_host_s")
    parts_s = ("out_s", "in_s", "host_out_s", "host_in_s")
    mark_columns = ("watermark", "watermark_share", *counts)
    room = ("swap_pages", "host_pages", "num_fallbacks", *counts)
    pool = ways.pool_pages.min(initial=2**31)
    need = ways.pool_pages.max(initial=0)
    title = f"a pool of {pool} pages; {need} suffice for all requests"
    note = (
        f"Seconds: median (lowest-highest) of {ways.duration_s.shape[-1]} alternating "
        "servings. Pages moved: out and back. Hold new: no new request is admitted "
        "until all preempted ones are done."
    )
    marks = "a watermark at admission, recomputing"
    spaces = "swap space that is too small"
    lost = "Requests that find no room in the buffer have their tokens recomputed."
    small = Servings.joined([result.spaces, result.hosts])
    back = f"restoring one request of {moves.num_tokens.max(initial=0):,} tokens"
    medians = f"Medians of {moves.recompute_s.shape[-1]}."
    sheets = [
        ways.sheet(title, "name", *counts, *times, note=note),
        result.victims.sheet("rules for victims", "victim", "preemption", *counts),
        result.watermarks.sheet(marks, *mark_columns),
        result.pools.sheet("smaller pools", "pool_pages", "preemption", *counts),
        small.sheet(spaces, *room, note=lost),
        moves.sheet(back, "page_size", *moved, *parts_s, note=medians),
    ]
    return [sheet for sheet in sheets if sheet.rows]


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws 4 panels; panels of parts that were not served stay empty."""
    _draw_ways(axes[0], result.ways)
    _draw_watermarks(axes[1], result.watermarks, result.victims)
    _draw_spaces(axes[2], result.spaces, result.hosts)
    _draw_moves(axes[3], result.moves)


def _draw_ways(ax: "Axes", ways: Servings) -> None:
    """Draws computed and recomputed tokens as a bar for each setting."""
    names = ways.name.tolist()
    again_look: dict[str, Any] = {"hatch": "xxx", "edgecolor": "white"}
    shares = {}
    for i, row in enumerate(ways.rows()):
        fed = row["num_fed"] / 1000
        again = row["num_recomputed"] / 1000
        color = lab.system_style(names[i]).color
        ax.barh(i, fed - again, 0.66, color=color)
        ax.barh(i, again, 0.66, left=fed - again, color=color, **again_look)
        text = f"{row['steps']:,} steps, {row['duration_s']:.1f} s"
        if again:
            shares[names[i]] = 100 * row["recomputed_share"]
            text += f", {shares[names[i]]:.0f} % again"
        lab.annotate(ax, text, (fed, i), (4, 0), va="center_baseline")
    for label, look in (("computed once", {}), ("computed again", again_look)):
        ax.fill_between([], [], label=label, facecolor="0.45", **look)
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(axis="y", length=0)
    ax.margins(x=0.45)
    ax.set_xlim(left=0)
    ax.invert_yaxis()
    title = "The same requests in too small a pool"
    if shares:
        name = max(shares, key=lambda x: shares[x])
        title = f"Too small a pool: {name} computes {shares[name]:.0f} % of the tokens "
        title += "again"
        ax.legend()
    lab.set_labels(ax, title, "tokens computed [thousands]", "")


AGAIN = "computed again [% of tokens]"


def _draw_watermarks(ax: "Axes", watermarks: Servings, victims: Servings) -> None:
    """Draws the recomputed share by pages kept free, and the best victim rule."""
    title = "Pages kept free at admission"
    if len(watermarks):
        x = 100 * watermarks.watermark_share
        y = 100 * watermarks.recomputed_share
        lab.draw_curve(ax, x, y, "recompute", "latest is preempted")
        for at in zip(x, y, watermarks.steps.tolist(), strict=True):
            lab.annotate(ax, f"{at[2]:,} steps", at[:2], (6, 3))
        ax.set_xlim(-3, 1.22 * max(x.max(), 1))
        title = (
            f"Keeping {x[-1]:.0f} % of the pool free cuts tokens computed again from "
        )
        title += f"{y[0]:.0f} to {y[-1]:.0f} %"
    again = victims.where(preemption="recompute")
    if len(again):
        y = 100 * again.recomputed_share
        name = again.victim[int(y.argmin())].replace("_", " ")
        look = {"linestyle": "", "markersize": 7}
        lab.draw_curve(ax, [0], [y.min()], name, f"{name} is preempted", **look)
    ax.set_ylim(0, 1.15 * max(ax.get_ylim()[1], 1))
    lab.set_labels(ax, title, "kept free [% of the pool]", AGAIN)
    if len(watermarks) or len(again):
        ax.legend()


def _draw_spaces(ax: "Axes", spaces: Servings, hosts: Servings) -> None:
    """Draws the recomputed share by swap space, with and without host memory."""
    hosts = hosts.at(hosts.host_pages > 0)
    for servings, system, label, line in (
        (spaces, "swap", "buffer on the device", "-"),
        (hosts, "swap, hold new", "and host memory, {} pages", ""),
    ):
        x = 100 * servings.swap_share
        y = 100 * servings.recomputed_share
        pages = " or ".join(f"{num:,}" for num in servings.host_pages.tolist())
        if len(servings):
            lab.draw_curve(ax, x, y, system, label.format(pages), linestyle=line)
    rows = zip(100 * spaces.swap_share, 100 * spaces.recomputed_share, strict=True)
    for i, at in enumerate(rows):
        label = f"{spaces.num_fallbacks[i]} of {spaces.num_preempted[i]}"
        label += " found no room" if i == 0 else ""
        look = {"ha": "right"} if at[0] >= 99 else {}
        lab.annotate(ax, label, at, (6 if at[0] < 99 else 0, 4), **look)
    top = 100 * spaces.recomputed_share.max(initial=0.0)
    title = "Room of the swap buffer"
    enough = 100 * spaces.swap_share[spaces.recomputed_share <= 0]
    if len(enough):
        title = f"A buffer of {enough.min():.0f} % of the pool avoids recomputation"
    lab.set_labels(ax, title, "swap buffer [% of the pool]", AGAIN)
    ax.set(xlim=(-4, 106), ylim=(0, max(1.15 * top, 1)), xticks=range(0, 101, 25))
    if len(spaces):
        ax.legend()


def _draw_moves(ax: "Axes", moves: RestoreTimes) -> None:
    """Draws the time to restore one request by page size."""
    x = "page size [tokens]"
    y = "time [ms]"
    if not len(moves):
        lab.set_labels(ax, "Restoring one request: not measured in this run", x, y)
        return
    sizes = moves.page_size.tolist()
    medians = {}
    for label, values, system in (
        ("recompute", moves.recompute_s, "recompute"),
        ("swap through host memory", moves.swap_through_host_s, "swap, hold new"),
        ("swap from a device buffer", moves.swap_s, "swap"),
    ):
        medians[label] = 1000 * np.median(values, axis=1)
        lab.draw_curve(ax, sizes, medians[label], system, label)
    last = [x[-1] for x in medians.values()]
    title = f"Swapping restores {moves.num_tokens[0]:,} tokens "
    title += f"{last[0] / last[-1]:,.0f} times sooner than recomputation"
    lab.use_powers_of_two(ax)
    lab.set_labels(ax, title, x, y, yscale="log", xticks=sizes)
    lab.label_log_axis(ax.yaxis)
    ax.minorticks_off()
    ax.legend()


STUDY = lab.Study(
    CONFIGS,
    Result,
    run,
    plot,
    claims,
    summary,
    panels=lab.Panels(4, 1, 2.9),
    switch=("simulated_requests", False),
)
