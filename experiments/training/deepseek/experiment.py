"""Trains DeepSeek-V3's three ideas small, and dense models of equal active compute.

Latent attention is compared with multi-head, grouped-query and multi-query attention by
held-out loss and KV bytes per token; balance of experts by bias with the auxiliary
loss; and the model with all three ideas with a dense one, served with and without
drafts of its own module for multi-token prediction.

All models have the same learning rate, text and number of tokens.
"""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import numpy as np
from jaxtyping import Float

from experiments import lab
from experiments.harness import direction_verdict, format_interval, judge_direction
from experiments.training.deepseek import runs, serving
from experiments.training.deepseek.runs import (
    ATTENTIONS,
    BALANCES,
    DENSE,
    FULL_BLOCK,
    BlockShapes,
    Config,
    Kind,
    TrainedModel,
)
from experiments.training.deepseek.serving import DraftDepths, ServedModels
from jaxkv import files
from scaling.corpora import CorpusConfig, open_corpus
from scaling.costs import kv_bytes_per_token
from scaling.shapes import describe_config
from scaling.training import count_model_parameters, stream_windows, training_flops

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = (2, 2)
PANEL_SIZE_INCHES = (3.4, 3.4)


CONFIGS = {
    "smoke": Config(
        shapes=BlockShapes(
            width=16,
            num_layers=1,
            num_dense_layers=0,
            num_heads=2,
            head_dim=8,
            num_groups=1,
            mlp_size=96,
            kv_rank=16,
            rope_dim=4,
            num_experts=4,
            top_k=2,
            expert_size=8,
        ),
        kinds=("MHA", "MLA", "balanced by loss", "balanced by bias", "DeepSeek"),
        num_seeds=1,
        # Little text is held out, so that scoring is quick.
        corpus=CorpusConfig(held_out=0.02),
        seq_len=32,
        batch_size=4,
        num_steps=20,
        num_windows=16,
        num_prompts=2,
        prompt_tokens=8,
        output_tokens=8,
        num_drafts=1,
        batches=(2,),
        rounds=2,
    ),
    "cpu": Config(folder="runs/deepseek-cpu"),
}


class TrainedModels(lab.ResultTable):
    """All trained models."""

    kind: lab.Texts = lab.column("a `runs.Kind`", heading="model")
    seed: lab.Ints = lab.column("seed of parameters and order of the text")
    num_params: lab.Ints = lab.column(
        "parameters, without modules for multi-token prediction", heading="parameters"
    )
    num_active: lab.Ints = lab.column("matrix parameters of a token", heading="active")
    flops: lab.Floats = lab.column(
        "training operations of a token, without modules",
        heading="operations a token",
        form=lab.format_flops,
    )
    kv_bytes: lab.Floats = lab.column(
        "bytes of a token in pages of bfloat16",
        heading="KV bytes a token",
        form="{:,.0f}",
    )
    kv_formula: lab.Floats = lab.column(
        "the same by `scaling.costs`", heading="by formula", form="{:,.0f}"
    )
    num_tokens: lab.Ints = lab.column("trained tokens", heading="tokens")
    loss: lab.Floats = lab.column("nats per token of held-out text", form="{:.4f}")
    loss_se: lab.Floats = lab.column(
        "of the loss, due to the choice of text",
        heading="standard error",
        form="{:.4f}",
    )
    seconds: lab.Floats = lab.column(
        "of training", heading="time", form=lab.format_seconds
    )


class LossDifferences(lab.ResultTable):
    """Differences of held-out losses, paired by seed and window."""

    ours: lab.Texts = lab.column("a kind", heading="loss of")
    theirs: lab.Texts = lab.column("another kind", heading="less that of")
    difference: lab.Floats = lab.column(
        "mean over seeds", heading="nats", form="{:+.4f}"
    )
    low: lab.Floats = lab.column("lower end of the interval", form="{:+.4f}")
    high: lab.Floats = lab.column("upper end of the interval", form="{:+.4f}")


class ExpertBalance(lab.ResultTable):
    """Load of the busiest expert over training."""

    kind: lab.Texts = lab.column("a kind of `runs.BALANCES`")
    seed: lab.Ints = lab.column("seed of the run")
    step: lab.Ints = lab.column("last step of the report")
    busiest: lab.Floats = lab.column(
        "largest load over the mean load, mean over mixtures"
    )


COMPARED_PAIRS: tuple[tuple[Kind, Kind], ...] = (
    ("MLA", "MHA"),
    ("MLA", "GQA"),
    ("MHA", "MQA"),
    ("balanced by bias", "balanced by loss"),
    ("DeepSeek", "balanced by bias"),
    ("DeepSeek", "MHA"),
)
"""Pairs of kinds whose losses are compared."""


class Result(lab.ResultRecord):
    """Trained models, their comparison, and served models."""

    models: TrainedModels = lab.column("by kind and seed")
    differences: LossDifferences = lab.column(
        "by pair of kinds",
        note="95 % intervals: of the choice of held-out windows, and of the seeds by "
        "Student's t.",
    )
    balance: ExpertBalance = lab.column("by report of the mixtures", is_reported=False)
    served: ServedModels = lab.column("by way of serving and batch size")
    depths: DraftDepths = lab.column("by draft position")
    device: str = lab.column("kind of device that served", is_reported=False)

    def late_balance(self, kind: Kind) -> Float[np.ndarray, " seeds"]:
        """Returns the load of the busiest expert in the last quarter, by seed."""
        loads = self.balance.where(kind=kind)
        late = loads.at(loads.step > 0.75 * loads.step.max(initial=0))
        seeds = late.distinct("seed")
        return np.array([late.where(seed=x).busiest.mean() for x in seeds])


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Trains all models, then serves two; if stopped, keeps the finished parts."""
    corpus = open_corpus(config.corpus)
    models: list[TrainedModel] = []
    jobs = [(kind, seed) for seed in range(config.num_seeds) for kind in config.kinds]
    with files.folder_or_temporary(config.folder) as folder:
        for kind, seed in progress.track(jobs, "models", "models"):
            trained = runs.train_block_model(
                kind,
                config.run_of(kind, seed),
                folder / f"{kind.replace(' ', '_')}-{seed}",
                corpus=corpus,
                num_windows=config.num_windows,
                progress=progress,
            )
            if trained is None:
                break
            models.append(trained)
    first = {x.kind: x for x in models if x.config.seed == 0}
    served = ServedModels.of([])
    depths = DraftDepths.of([])
    if {DENSE, FULL_BLOCK} <= {*first} and not progress.stopped:
        served, depths = serving.serve_in_turns(
            first[DENSE],
            first[FULL_BLOCK],
            prompts=stream_windows(
                corpus.held_out,
                seq_len=config.prompt_tokens - 1,
                num_windows=config.num_prompts,
            ).tolist(),
            output_tokens=config.output_tokens,
            num_drafts=config.num_drafts,
            batches=config.batches,
            rounds=config.rounds,
            progress=progress,
        )
    pairs = [(*pair, *runs.loss_difference(models, *pair)) for pair in COMPARED_PAIRS]
    return Result(
        models=TrainedModels.of(map(_row, models)),
        differences=LossDifferences.of(x for x in pairs if np.isfinite(x[2])),
        balance=ExpertBalance.of(
            (x.kind, x.config.seed, line["step"], line["busiest"])
            for x in models
            if x.kind in BALANCES
            for line in x.result.curve
        ),
        served=served,
        depths=depths,
        device=jax.devices()[0].device_kind,
    )


def _row(trained: TrainedModel) -> dict[str, object]:
    """Returns a row of `TrainedModels`."""
    model = trained.model
    score = trained.score
    counts = count_model_parameters(model)
    bare = dataclasses.replace(model, num_ahead_layers=0)
    seq_len = trained.config.seq_len
    shape = describe_config(model)
    return {
        "kind": trained.kind,
        "seed": trained.config.seed,
        "num_params": counts.total,
        "num_active": counts.matmul,
        "flops": training_flops(bare, sequence=seq_len) / seq_len,
        "kv_bytes": serving.page_bytes_per_token(model),
        "kv_formula": kv_bytes_per_token(shape),
        "num_tokens": trained.config.num_tokens,
        "loss": score.loss,
        "loss_se": score.loss_se,
        "seconds": trained.result.curve[-1]["duration_s"],
    }


CLAIMS = lab.claims_file(__file__)
LOSS_CLAIMS = {
    ("MLA", "MHA"): "MLA_over_MHA",
    ("MLA", "GQA"): "MLA_over_GQA",
    ("MHA", "MQA"): "MHA_over_MQA",
    ("balanced by bias", "balanced by loss"): "balanced_by_bias_over_balanced_by_loss",
    ("DeepSeek", "MHA"): "DeepSeek_over_MHA",
}
"""Claims on the difference of the losses of two kinds."""


@CLAIMS.judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares losses, bytes, balance and drafts with expected or stated values."""
    models = result.models
    if len(models):
        off = np.abs(models.kv_bytes - models.kv_formula).max()
        yield lab.measured("kv_bytes", off, num=len(models))
    for row in result.differences.rows():
        id = LOSS_CLAIMS.get((row["ours"], row["theirs"]))
        if id is None:
            continue
        # An interval of the gain, which is above 0 if the loss is lower.
        shown = judge_direction(-row["high"], -row["low"], above=0)
        yield lab.measured(
            id,
            row["difference"],
            direction=direction_verdict(shown),
            shown=shown,
            interval=format_interval(row["low"], row["high"], 4),
        )
    by_loss, by_bias = (result.late_balance(kind) for kind in BALANCES)
    if by_loss.size and by_bias.size:
        # Decided if every run of one balance is below every run of the other.
        low = by_bias.min() - by_loss.max()
        high = by_bias.max() - by_loss.min()
        shown = judge_direction(-high, -low, above=0)
        yield lab.measured(
            "balance",
            by_bias.mean() - by_loss.mean(),
            direction=direction_verdict(shown),
            by_bias=by_bias.mean(),
            by_loss=by_loss.mean(),
            shown=shown,
            interval=format_interval(low, high),
        )
    if not len(result.served):
        return
    drafting = result.served.where(way=serving.WITH_DRAFTS)
    num = int(drafting.num_tokens.sum())
    yield lab.measured("lossless", drafting.num_other.sum(), num=num)
    yield lab.measured("acceptance", 100 * result.depths.accepted_share[0])
    ratios = result.served.ratios(serving.WITH_DRAFTS, drafting.batch[0])
    low = ratios.min()
    high = ratios.max()
    shown = judge_direction(low, high)
    yield lab.measured(
        "speed",
        np.median(ratios),
        direction=direction_verdict(shown),
        shown=shown,
        batch=drafting.batch[0],
        num_drafts=len(result.depths),
        device=result.device,
        interval=format_interval(low, high),
    )


def summary(result: Result) -> list[lab.ReportPart]:
    """Returns tables of models, differences, balance, served models and drafts."""
    balance = [
        (kind, f"{values.mean():.2f}", ", ".join(f"{x:.2f}" for x in values))
        for kind in BALANCES
        if (values := result.late_balance(kind)).size
    ]
    sheets = [
        *lab.sheets(result),
        lab.Sheet(
            "load of the busiest expert over the mean load, last quarter of the steps",
            ("balance", "mean", "by seed"),
            balance,
            "During training, over the steps of a report; the mean over mixtures.",
        ),
    ]
    return [sheet for sheet in sheets if not isinstance(sheet, lab.Sheet) or sheet.rows]


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws loss by KV bytes, balance, acceptance by depth, and speed."""
    _draw_attention(axes[0, 0], result.models)
    _draw_balance(axes[0, 1], result)
    _draw_depths(axes[1, 0], result)
    _draw_speed(axes[1, 1], result)


def _draw_attention(ax: "Axes", models: TrainedModels) -> None:
    """Draws every run of every attention, and the line through their means."""
    points = []
    for kind in ATTENTIONS:
        rows = models.where(kind=kind)
        if not len(rows):
            continue
        lab.draw_curve(ax, rows.kv_bytes, rows.loss, kind, kind, linestyle="")
        points.append((kind, rows.kv_bytes[0], rows.loss.mean()))
    title = "Loss by KV bytes"
    if {"MLA", DENSE} <= {x[0] for x in points}:
        by_kind = {x[0]: x for x in points}
        share = by_kind["MLA"][1] / by_kind[DENSE][1]
        lead = by_kind["MLA"][2] - by_kind[DENSE][2]
        title = f"MLA: {100 * share:.0f} % of MHA's bytes, {lead:+.3f} nats"
        ax.legend()
    x = "KV cache [bytes/token]"
    y = "held-out loss [nats/byte]"
    lab.set_labels(ax, title, x, y, xscale="log")
    lab.label_log_axis(ax.xaxis)


def _draw_balance(ax: "Axes", result: Result) -> None:
    """Draws the busiest expert over training for both balances."""
    means = []
    for kind in BALANCES:
        balance = result.balance.where(kind=kind)
        for seed in balance.distinct("seed"):
            one = balance.where(seed=seed)
            label = "" if seed else kind
            lab.draw_curve(ax, one.step, one.busiest, kind, label, markersize=3)
        late = result.late_balance(kind)
        means += [f"{late.mean():.2f} {kind.removeprefix('balanced ')}"] * bool(
            late.size
        )
    lab.draw_reference_line(ax, 1, "even")
    title = f"At the end {', '.join(means)}" if means else "Busiest expert"
    lab.set_labels(ax, title, "training [steps]", "busiest expert / mean [ratio]")
    ax.set_ylim(bottom=0)
    if means:
        ax.legend()


def _draw_depths(ax: "Axes", result: Result) -> None:
    """Draws the share of accepted drafts by position."""
    depths = result.depths
    title = "Accepted drafts"
    if len(depths):
        share = 100 * depths.accepted_share
        container = ax.bar(depths.depth, share, 0.6, color=lab.colors()[5])
        ax.bar_label(container, [f"{x:.0f}" for x in share], padding=2)
        title = f"Of the first drafts {share[0]:.0f} % are accepted"
        ax.set_xticks(depths.depth)
    x = "position of the draft [tokens]"
    y = "accepted [%]"
    lab.set_labels(ax, title, x, y, ylim=(0, 100))


def _draw_speed(ax: "Axes", result: Result) -> None:
    """Draws tokens per second of every way of serving, for the smallest batch."""
    batches = result.served.distinct("batch")
    served = result.served.where(batch=batches[0] if batches else 0)
    title = "Speed of serving"
    for place, kind in enumerate(served.way.tolist()):
        rates = served.tokens_per_s[place]
        container = ax.barh(place, np.median(rates), 0.6, **lab.system_style(kind).bar)
        ax.bar_label(container, [f"{np.median(rates):,.0f}"], padding=3)
    if len(served):
        ratios = served.ratios(serving.WITH_DRAFTS, batches[0])
        title = f"With drafts {np.median(ratios):.2f} times as fast, batch {batches[0]}"
        labels = [kind.replace(", ", ",\n") for kind in served.way.tolist()]
        ax.set_yticks(range(len(served)), labels)
        ax.set_ylim(len(served) - 0.4, -0.6)
        ax.margins(x=0.15)
    ax.tick_params(axis="y", length=0)
    lab.set_labels(ax, title, "speed [tokens/s]", "")


STUDY = lab.Study(
    CONFIGS, Result, run, plot, claims, summary, panels=lab.Panels(2, 2, 3.4)
)
