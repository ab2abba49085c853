"""A ladder of small models, and the forecast that it makes before its truth exists.

`protocol.toml` is written first. The hashes of the protocol, of the ladder's runs, of
the forecast and of the targets form a chain: each part has those before it.
"""

import dataclasses
import hashlib
import json
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import lab
from experiments.training.forecasting import methods
from experiments.training.forecasting.methods import LadderRuns
from jaxkv import files
from scaling import sweeps
from scaling.corpora import AnyCorpus, CorpusConfig, LanguageConfig
from scaling.frontiers import bootstrap_frontier, by_parabola, find_run_groups
from scaling.sweeps import (
    BASE_WIDTH,
    SweepConfig,
    count_cost,
    family_shape,
    run_logged_sweep,
)

HOME = Path(__file__).parent
TARGET_WIDTHS = (*range(4, 16, 2), *range(16, 513, 16))


class Protocol(NamedTuple):
    """A protocol, with the hash of its file."""

    fields: dict[str, Any]
    sha256: str

    def corpus(self, name: str) -> AnyCorpus:
        """Returns a corpus by its name."""
        fields = self.fields["corpora"][name]
        if "mixture" in fields:
            fields = fields | {"mixture": tuple(fields["mixture"])}
        return LanguageConfig(**fields) if "kind" in fields else CorpusConfig(**fields)

    def model(self, name: str, width: int) -> Any:
        """Returns the model of a width for a corpus."""
        shape = family_shape(width, self.fields["num_layers"], self.fields["seq_len"])
        corpus = self.corpus(name)
        return dataclasses.replace(shape, vocab_size=corpus.vocab_size)

    def sweep(self, name: str) -> SweepConfig:
        """Returns the grid of a corpus."""
        names = ("batch_size", "seq_len", "max_extensions", "min_steps")
        fields = {x: self.fields[x] for x in (*names, "num_eval_windows")}
        for x in ("budgets", "learning_rates", "tokens_per_param"):
            fields[x] = tuple(self.fields[x])
        widths = self.fields["widths"]
        return SweepConfig(
            models=tuple(self.model(name, width) for width in widths),
            corpus=self.corpus(name),
            base_width=BASE_WIDTH,
            seeds=(self.fields["rate_seed"], *self.fields["scored_seeds"]),
            num_repeated=len(widths),
            **fields,
        )


def read_protocol(name: str) -> Protocol:
    """Reads a protocol of this folder."""
    text = files.read_text(HOME / name)
    return Protocol(tomllib.loads(text), sha256(text))


def sha256(text: str) -> str:
    """Returns the hash of a text."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


class LadderConfig(lab.ConfigRecord):
    """The protocol."""

    protocol: str = "protocol.toml"
    """File in the folder of the experiment."""


LADDER_CONFIGS = {
    "ladder": LadderConfig(),
    "ladder_smoke": LadderConfig(protocol="protocol_smoke.toml"),
}


class LadderResult(lab.ResultRecord):
    """The ladder's runs and its forecast."""

    runs: str = lab.column("runs of all corpora, one JSON object a line")
    forecast: str = lab.column("JSON: hashes, targets, quantiles, rolling origins")


def run(config: LadderConfig, progress: lab.Progress = lab.QUIET) -> LadderResult:
    """Trains the ladder of each corpus, then forecasts."""
    protocol = read_protocol(config.protocol)
    lines = []
    for name in protocol.fields["corpora"]:
        with tempfile.TemporaryDirectory() as folder:
            outcome = run_logged_sweep(protocol.sweep(name), Path(folder), progress)
        if outcome.is_stopped:
            raise KeyboardInterrupt("interrupted before a forecast")
        lines += [
            json.dumps({"corpus": name} | dict(row), sort_keys=True)
            for row in outcome.records
            if row["status"] == "done"
        ]
    runs = "\n".join(lines) + "\n"
    progress.show("forecasting")
    return LadderResult(runs=runs, forecast=lab.dumps(forecast(protocol, runs)))


def forecast(protocol: Protocol, runs: str) -> dict[str, Any]:
    """Returns the forecast: hashes, targets with their quantiles, rolling origins."""
    fields = protocol.fields
    rows = [json.loads(line) for line in runs.splitlines()]
    targets = []
    origins = []
    for name in fields["corpora"]:
        of_corpus = [row for row in rows if row["corpus"] == name]
        ladder = scored_runs(protocol, of_corpus)
        places = [
            _place(protocol, name, of_corpus, ladder, x) for x in fields["targets"]
        ]
        at = {x: np.array([p[x] for p in places]) for x in _COLUMNS}
        made = methods.make_forecasts(
            fields["law"], ladder, at, fields["num_resamples"]
        )
        for i, place in enumerate(places):
            quantiles = {method: x[:, i].tolist() for method, x in made.items()}
            targets.append({"corpus": name} | place | {"quantiles": quantiles})
        for num in fields["origins"]:
            origins += _roll(protocol, name, ladder, num)
    return {
        "protocol_sha256": protocol.sha256,
        "runs_sha256": sha256(runs),
        "targets": targets,
        "origins": origins,
    }


_COLUMNS = ("num_params", "num_tokens", "flops")


def scored_runs(protocol: Protocol, rows: Sequence[dict[str, Any]]) -> LadderRuns:
    """Returns the runs of the seeds on which no rate was chosen."""
    scored = [row for row in rows if row["seed"] in protocol.fields["scored_seeds"]]
    budgets = np.log(protocol.fields["budgets"])
    trunks = [(x["hidden_size"], x["seed"], x["learning_rate"]) for x in scored]
    order = {trunk: i for i, trunk in enumerate(dict.fromkeys(trunks))}
    numbers = {x: np.array([row[x] for row in scored], float) for x in _COLUMNS}
    gaps = np.abs(np.log(numbers["flops"])[:, None] - budgets)
    return LadderRuns(
        **numbers,
        loss=np.array([row["loss"] for row in scored]),
        trunk=np.array([order[trunk] for trunk in trunks]),
        budget=gaps.argmin(1),
    )


def _place(
    protocol: Protocol,
    name: str,
    rows: Sequence[dict[str, Any]],
    ladder: LadderRuns,
    factor: float,
) -> dict[str, Any]:
    """Returns size, tokens and rate of a target."""
    fields = protocol.fields
    columns = ladder.num_params, ladder.num_tokens, ladder.flops, ladder.loss
    groups = find_run_groups(*columns, tolerance=0.1)
    frontier = bootstrap_frontier(
        "parabola", by_parabola(groups), groups.flops, groups.strata
    )
    flops = factor * max(fields["budgets"])
    if frontier.num_params is None:  # fewer than two budgets have a minimum
        last = ladder.budget == ladder.budget.max()
        size = ladder.num_params[last][ladder.loss[last].argmin()]
    else:
        size = frontier.num_params(np.array([flops]))[0]
    costs = {
        width: count_cost(protocol.model(name, width), fields["seq_len"])
        for width in TARGET_WIDTHS
    }
    width = min(costs, key=lambda x: abs(np.log(costs[x].params.total / size)))
    batch_tokens = fields["batch_size"] * fields["seq_len"]
    per_token = costs[width].flops_per_token
    num_steps = round(flops / per_token / batch_tokens)
    num_tokens = num_steps * batch_tokens
    of_rate_seed = [row for row in rows if row["seed"] == fields["rate_seed"]]
    rate, _ = sweeps.extrapolate(of_rate_seed, width, num_tokens)
    return {
        "factor": factor,
        "width": width,
        "num_steps": num_steps,
        "learning_rate": rate,
        "num_params": costs[width].params.total,
        "num_tokens": num_tokens,
        "flops": per_token * num_tokens,
    }


def _roll(
    protocol: Protocol, name: str, ladder: LadderRuns, num_budgets: int
) -> list[dict[str, Any]]:
    """Forecasts the larger budgets of the ladder from its smallest ones."""
    fields = protocol.fields
    known = ladder.up_to(num_budgets)
    rows = []
    places = []
    losses = []
    for budget in range(num_budgets, len(fields["budgets"])):
        mask = ladder.budget == budget
        sizes = np.unique(ladder.num_params[mask])
        means = [ladder.loss[mask & (ladder.num_params == n)].mean() for n in sizes]
        if means:
            best = mask & (ladder.num_params == sizes[int(np.argmin(means))])
            places.append([getattr(ladder, x)[best].mean() for x in _COLUMNS])
            losses.append(min(means))
    at = dict(zip(_COLUMNS, np.array(places).T, strict=True))
    made = methods.make_forecasts(fields["law"], known, at, fields["num_resamples"])
    for method, quantiles in made.items():
        for i, loss in enumerate(losses):
            scored = methods.score_forecast(quantiles[:, i], loss, fields["level"])
            ratio = at["flops"][i] / known.flops.max()
            row = {"corpus": name, "method": method, "factor": float(ratio)}
            rows.append(row | {"loss": float(loss)} | scored._asdict())
    return rows


def ladder_files(result: LadderResult) -> dict[str, str]:
    """Returns the runs and the forecast as files."""
    return {"prediction.json": result.forecast}


def ladder_summary(result: LadderResult) -> list[lab.ReportPart]:
    """Returns a table of the forecasts, and the chain of hashes."""
    document = json.loads(result.forecast)
    middle = len(methods.LEVELS) // 2
    rows = []
    for x in document["targets"]:
        medians = [
            f"{np.exp(q[middle]):.4f} ({np.exp(q[1]):.4f}-{np.exp(q[-2]):.4f})"
            for q in x["quantiles"].values()
        ]
        numbers = (f"{x['width']}", f"{x['num_tokens']:,}", f"{x['learning_rate']:.4g}")
        rows.append((x["corpus"], f"{x['factor']:g}", *numbers, *medians))
    names = [*document["targets"][0]["quantiles"]]
    heads = ("corpus", "times the compute", "width", "tokens", "rate", *names)
    chain = f"protocol {document['protocol_sha256']}, runs {document['runs_sha256']}, "
    chain += f"forecast {sha256(result.forecast)}"
    note = f"Median and 92 % interval. SHA-256: {chain}."
    return [lab.Sheet("forecasts of the targets", heads, rows, note)]


def plot_ladder(axes: np.ndarray, result: LadderResult) -> None:
    """Draws the runs of each corpus with the forecasts of its targets."""
    document = json.loads(result.forecast)
    rows = [json.loads(line) for line in result.runs.splitlines()]
    for ax, name in zip(axes, dict.fromkeys(x["corpus"] for x in rows), strict=False):
        points = [(x["flops"], x["loss"]) for x in rows if x["corpus"] == name]
        black = lab.colors()[lab.BLACK]
        ax.plot(*zip(*points, strict=True), ".", color=black, alpha=0.3)
        draw_forecasts(ax, name, document["targets"])
        ax.legend()


def draw_forecasts(ax: Any, name: str, targets: list[dict[str, Any]]) -> None:
    """Draws the forecasts of a corpus's targets as intervals."""
    selected = [x for x in targets if x["corpus"] == name]
    methods_of = selected[0]["quantiles"]
    middle = len(methods.LEVELS) // 2
    for i, method in enumerate(methods_of):
        flops = np.array([x["flops"] for x in selected]) * 1.12 ** (i - 1)
        quantiles = np.exp([x["quantiles"][method] for x in selected])
        center = quantiles[:, middle]
        ends = np.abs(quantiles[:, [1, -2]].T - center)
        tint = lab.colors()[(lab.BLUE, lab.ORANGE, lab.GREEN)[i]]
        ax.errorbar(flops, center, ends, fmt="o", color=tint, label=method, capsize=3)
    ax.set_xscale("log")
    lab.set_labels(ax, name, "compute [FLOP]", "loss [nats/token]")


LADDER = lab.Study(
    LADDER_CONFIGS,
    LadderResult,
    run,
    plot_ladder,
    summary=ladder_summary,
    metrics=lambda result: json.loads(result.forecast),
    panels=lab.Panels(1, 2),
    files=ladder_files,
)
"""The study that makes a forecast."""
