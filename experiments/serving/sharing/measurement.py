"""Measures page sharing of a real model on real text.

The page tables are read in the middle of every step. Samples of one request share the
pages of its prompt. Beams also share the pages that they wrote before they diverged.
Requests with a common prefix share its pages if the prefix cache finds them.

Lengths follow the printed means of Alpaca (short) and ShareGPT (long), with a byte per
token. The model's own end token is ignored.
"""

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from experiments import lab
from experiments.harness import (
    draw_lengths,
    draw_ragged_lengths,
    load_text_model,
    make_benchmark_config,
    make_stepper,
)
from experiments.serving.sharing import picture, requests
from experiments.serving.sharing.picture import NUM_SEQUENCES, PageTableScenes
from experiments.serving.sharing.requests import (
    PUBLISHED_SAVINGS,
    PrefillCounts,
    PrefixSavings,
    Savings,
)
from jaxkv.engine import EngineConfig
from jaxkv.sampling import Sampling
from jaxkv.workloads import ALPACA, SHAREGPT, Lengths

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLAIMS = lab.claims_file(__file__)
DATASET_NAMES = {"short": "Alpaca", "long": "ShareGPT"}


class Config(lab.ConfigRecord):
    """The requests and the engine."""

    model: str = "stdlib-bytes"
    """Model folder or bundled model."""
    answers: tuple[int, ...] = (2, 4, 6, 8)
    """Samples per request."""
    widths: tuple[int, ...] = (2, 4, 6)
    """Beams per request."""
    num_short: lab.PositiveInt = 48
    """Requests with Alpaca's lengths."""
    num_long: lab.PositiveInt = 16
    """Requests with ShareGPT's lengths."""
    length_scale: Annotated[float, lab.Range(0, 1, "(]")] = 1.0
    """Factor of the mean lengths."""
    prefixes: lab.PositiveInts = (80, 341)
    """Tokens of a common prefix: 1 and 5 examples."""
    num_prefixed: lab.PositiveInt = 48
    """Requests with a common prefix."""
    own_tokens: Annotated[tuple[int, int], lab.Ascending(1, strictly=False)] = (16, 64)
    """Shortest and longest rest of their prompts in tokens, and of their answers."""
    repeats: lab.PositiveInt = 5
    """Servings with the prefix cache, and as many without."""
    chunk_sizes: lab.PositiveInts = (1, 7, 64)
    """Chunk sizes in tokens for counting prompt tokens."""
    temperature: float = 0.7
    """Sampling temperature."""
    top_p: float = 0.95
    """Nucleus sampling threshold."""
    max_slots: Annotated[int, lab.Range(NUM_SEQUENCES)] = 8
    """Largest number of sequences that run at once."""
    max_length: int = 1024
    """Longest sequence in tokens."""
    page_size: lab.PositiveInt = 16
    """Token places in a page."""
    numerics: Literal["fast", "reproducible"] = "fast"
    """Numerics: "reproducible" makes answers independent of the batch."""
    seed: lab.NonNegativeInt = 0
    """Seed of lengths, prompts and sampling."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        for name in ("answers", "widths"):
            lab.Range(2, self.max_slots).check(name, getattr(self, name))
        if not (self.answers and self.widths):
            raise ValueError(
                f"answers={self.answers!r} and widths={self.widths!r} must not be empty"
            )
        longest = max((0, *self.prefixes)) + 2 * self.own_tokens[1]
        if longest > self.max_length:
            raise ValueError(
                f"prefixes={self.prefixes!r} and own_tokens={self.own_tokens!r} may "
                f"need {longest} tokens, "
                f"more than max_length={self.max_length!r}"
            )


CONFIGS = {
    "real": Config(),
    "smoke": Config(
        answers=(4, 8),
        widths=(4,),
        num_short=4,
        num_long=2,
        length_scale=0.2,
        prefixes=(33,),
        num_prefixed=10,
        own_tokens=(2, 8),
        repeats=1,
        chunk_sizes=(3, 64),
        max_length=208,
        numerics="reproducible",
    ),
}


class Result(lab.ResultRecord):
    """Shared pages by kind of request."""

    samples: Savings = lab.column(
        "by number of samples",
        heading="pages saved by sequences of one request: samples",
        note="Pages in use relative to pages without sharing; expected: by lengths.",
    )
    beams: Savings = lab.column(
        "by number of beams", heading="pages saved by sequences of one request: beams"
    )
    readings: PrefillCounts = lab.column(
        "by chunk size", heading="prompts of several samples, chunked prefill"
    )
    prefixes: PrefixSavings = lab.column(
        "by length of the prefix",
        heading="requests that begin with the same text",
        note="Without and with a prefix cache that holds the prefix; rates: "
        "median, lowest and highest of alternating pairs of runs.",
    )
    picture: PageTableScenes = lab.column(
        "by scene", key="pictures", heading="drawn scenes"
    )


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Serves all parts with one program; if stopped, keeps the finished ones."""
    model = load_text_model(config.model, max_length=config.max_length)
    ask = Sampling(temperature=config.temperature, top_p=config.top_p)
    engine = make_stepper(model, ample_engine_config(config), requests.step_with_tables)
    client = requests.Client(engine, model, ask, progress)
    rng = np.random.default_rng(config.seed)
    draw = functools.partial(
        draw_lengths,
        max_length=config.max_length,
        rng=rng,
        scale=config.length_scale,
    )
    kinds = {
        "short": draw(ALPACA, config.num_short),
        "long": draw(SHAREGPT, config.num_long),
    }
    suffix_lengths = [
        np.array(draw_ragged_lengths(rng, config.own_tokens, 0.5, config.num_prefixed))
        for _ in Lengths._fields
    ]
    few = [tokens[: config.max_slots] for tokens in kinds["long"]]
    progress.show("compiling")
    return Result(
        picture=picture.serve_scenes(client),
        samples=requests.serve_groups(client, kinds, config.answers, beams=False),
        beams=requests.serve_groups(client, kinds, config.widths, beams=True),
        readings=requests.count_prompt_rows(
            client, Lengths(*few), max(config.answers), config.chunk_sizes
        ),
        prefixes=requests.serve_prefixes(
            client, config.prefixes, Lengths(*suffix_lengths), repeats=config.repeats
        ),
    )


def ample_engine_config(config: Config) -> EngineConfig:
    """Returns the config of an engine that never runs out of pages in this study."""
    pages_per_slot = -(-config.max_length // config.page_size)
    return make_benchmark_config(
        4 * config.max_slots,
        config.max_length,
        page_size=config.page_size,
        num_pages=2 * config.max_slots * pages_per_slot,
        max_slots=config.max_slots,
        token_budget=max(64, config.max_slots),
        max_beams=max(*config.widths, NUM_SEQUENCES),
        prefix_cache=True,
        numerics=config.numerics,
        seed=config.seed,
    )


def metrics(result: Result) -> dict[str, Any]:
    """Returns a row per setting."""
    numbers = lab.metrics(result) | {"prefixes": result.prefixes.metrics()}
    for row in numbers["beams"]:  # lengths do not determine the saving of beams
        del row["expected_share"]
    # Every run of the experiment has the keys of both studies.
    return numbers | {"simulated": [], "translations": []}


def lengths_claims(savings: Any, **words: Any) -> Iterator[lab.MeasuredValue]:
    """Compares measured savings of samples with those by lengths."""
    for name in savings.distinct("lengths"):
        selected = savings.where(lengths=name)
        difference = abs(selected.saved_share - selected.expected_share).max()
        yield lab.measured("lengths", 100 * difference, lengths=name, **words)


@CLAIMS.judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares savings with closed forms and published numbers."""
    yield from lengths_claims(result.samples, how="", reading="")
    readings = result.readings
    beams = result.beams
    if len(readings):
        *first, last = map(str, readings.chunk_size)
        max_reads = float((readings.prompt_rows / readings.prompt_tokens).max())
        sizes = f"{', '.join(first)} and {last}"
        yield lab.measured(
            "once", max_reads, num=readings.num_sequences[0], sizes=sizes
        )
    for id, savings in (("answers", result.samples), ("beams", beams)):
        for row in savings.rows():
            words = row | ({"range": ""} if row["lengths"] == "short" else {})
            yield from figure_claim(id, words)
    gains = [
        row["saved_share"] - result.samples.saved(row["lengths"], row["sequences"])
        for row in beams.rows()
    ]
    if np.isfinite(gains).any():
        yield lab.measured("beams-above", 100 * float(np.nanmin(gains)))
    prefixes = result.prefixes
    for i, num in enumerate(prefixes.prefix_tokens.tolist()):
        yield lab.measured("faster", float(prefixes.speed_ups[i, 1]), num=num)


def figure_claim(id: str, row: dict[str, Any]) -> Iterator[lab.MeasuredValue]:
    """Compares a saving with figure 15, if it has one."""
    ours_ = 100 * row["saved_share"]
    published = 100 * row["published_share"]
    if np.isfinite(published):
        data = DATASET_NAMES[row["lengths"]]
        yield lab.measured(id, ours_, published=published, data=data, **row)


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws charts above and page tables below."""
    _draw_savings(axes[0, 0], result.samples, "answers")
    _draw_savings(axes[0, 1], result.beams, "beams")
    if len(result.beams):
        max_sequences = result.beams.num_sequences.max()
        num = np.linspace(2, max_sequences)
        look = {"color": "0.45", "linewidth": 1, "linestyle": "--"}
        axes[0, 1].plot(num, 100 - 100 / num, label="at most (n - 1) / n", **look)
        axes[0, 1].set_ylim(0, 100)
        axes[0, 1].legend()
    grid = axes[1, 0].get_subplotspec().get_gridspec()
    figure = axes[1, 0].figure
    for ax in axes[1:].flat:
        ax.remove()
    _draw_prefixes(figure.add_subplot(grid[1, :]), result.prefixes)
    for i in range(len(result.picture)):
        picture.draw_scene(figure.add_subplot(grid[2 + i, :]), result.picture, i)


def _draw_savings(ax: "Axes", savings: Savings, kind: str) -> None:
    """Draws measured savings as points, expected as lines, published in grey."""
    max_share = 0.0
    for name in ("long", "short"):
        reference = [
            (n, 100 * y) for (x, n), y in PUBLISHED_SAVINGS[kind].items() if x == name
        ]
        look: dict[str, Any] = {"linewidth": 1, "linestyle": ":", "zorder": 1}
        label = "the paper's" if name == "short" else ""
        lab.draw_curve(ax, *zip(*reference, strict=True), "published", label, **look)
        selected = savings.where(lengths=name)
        system = LENGTH_NAMES[name]
        if not len(selected):
            continue
        ours = 100 * selected.saved_share
        expected = 100 * selected.expected_share
        is_known = np.isfinite(expected).all()
        mean_lengths = selected.mean_prompt.mean(), selected.mean_answer.mean()
        tokens = "{:.0f} + {:.0f} tokens".format(*mean_lengths)
        look = {"linestyle": "" if is_known else "-", "markersize": 6}
        lab.draw_curve(ax, selected.num_sequences, ours, system, tokens, **look)
        if is_known:
            look = {"marker": "", "linewidth": 1}
            lab.draw_curve(ax, selected.num_sequences, expected, system, **look)
        max_share = max(max_share, float(ours.max()))
    ax.margins(x=0.08)
    title = f"Several {kind} share up to {max_share:.0f} % of the pages"
    x = f"{kind} of a request [sequences]"
    lab.set_labels(ax, title, x, "pages saved [%]", ylim=(0, None))
    if len(savings):
        ax.set_xticks(sorted({*savings.num_sequences.tolist(), 2, 4, 6}))
    ax.legend()


LENGTH_NAMES = {"long": "ShareGPT", "short": "Alpaca"}
"""Dataset whose colour short and long requests have."""


def _draw_prefixes(ax: "Axes", prefixes: PrefixSavings) -> None:
    """Draws pages, prompt tokens and steps with the cache relative to without."""
    kinds = {
        "pages": (lab.BLUE, ""),
        "prompt tokens computed": (lab.GREEN, "//"),
        "steps": (lab.ORANGE, ".."),
    }
    rows = list(prefixes.metrics())
    names = []
    for i, row in enumerate(rows):
        names.append(f"{row['prefix_tokens']}\ntokens")
        shares = (
            1 - row["saved_share"],
            row["prompt_rows_with"] / row["prompt_rows_without"],
            row["steps_with"] / row["steps_without"],
        )
        items = enumerate(zip(kinds.items(), shares, strict=True))
        for k, ((label, (color, hatch)), share) in items:
            look: dict[str, Any] = {"color": lab.colors()[color], "hatch": hatch}
            look |= {"edgecolor": "white", "label": None if i else label}
            bar = ax.barh(i + 0.27 * (k - 1), 100 * share, 0.25, **look)
            ax.bar_label(bar, [f"{100 * share:.0f}"], padding=3)
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(max(1, len(names)) - 0.5, -0.5)
    title = "With a prefix cache"
    if rows:
        best = max(rows, key=lambda row: row["speed_up"])
        title = f"A prefix cache gives {best['speed_up']:.1f} times the tokens/s with "
        title += f"{best['prefix_tokens']} tokens in common"
        ax.legend()
    x = "with the prefix cache [% of without]"
    lab.set_labels(ax, title, x, "", xlim=(0, 108))


STUDY = lab.Study(
    CONFIGS,
    Result,
    run,
    plot,
    claims,
    lab.sheets,
    metrics,
    panels=lab.Panels(5, 2, 2.8),
    switch=("num_simulated", False),
)
