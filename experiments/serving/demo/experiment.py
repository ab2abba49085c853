"""How much faster does continuous batching serve the same requests?

A real model continues real text: prompts of ragged lengths, cut from files that it was
not trained on, with answers of ragged lengths. The same requests, sampled alike, are
served twice by the same engine in the same bounds. Under static batching a batch of
requests keeps its slots and its longest-case reservations until its last one ends;
under continuous batching a slot goes to the next request at once, and pages are taken
as sequences grow. Programs are compiled before the clock starts.

KV utilisation is the mean, over steps that fed tokens, of the share of reserved token
places that hold one: used places / (used pages * page size).
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from experiments.framework import Excerpts, Ours, Part, beside, ours, report
from experiments.framework.table import Record, Texts, column
from experiments.harness import model_shapes, prompts, showing
from experiments.harness.serving import Server
from experiments.plotting import style, systems, timelines
from jaxkv.engine import StepInfo
from jaxkv.progress import QUIET, Progress
from jaxkv.scheduling import fcfs, static_batching
from jaxkv.serving import Completion

NUM_REPORTED, NUM_CHARS = 6, 240
"""Answers in the report, and characters of each."""
NUM_LINES = 6
"""Lines of each, and of its prompt."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(prompts.RaggedConfig):
    """The requests, and the engine that serves them."""

    max_length: int = 512
    """Token places that static batching reserves for each slot."""

    def __post_init__(self) -> None:
        """Refuses lengths that do not fit."""
        super().__post_init__()
        if self.longest > self.max_length:
            raise ValueError(
                f"prompt_tokens={self.prompt_tokens!r} and "
                f"output_tokens={self.output_tokens!r} may need "
                f"{self.longest} tokens, more than max_length={self.max_length!r}"
            )


PANELS = (3, 1)
PANEL_SIZE_INCHES = (6.8, 2.7)

CONFIGS = {
    "real": Config(),
    "smoke": Config(
        num_requests=6,
        prompt_tokens=(4, 24),
        output_tokens=(2, 24),
        max_slots=2,
        max_length=48,
        token_budget=16,
        steps_per_call=8,
    ),
}


class PolicyRecord(NamedTuple):
    """What happened. Steps that fed nothing are left out.

    Attributes:
      request_id: of the request in each slot, -1 for none: [steps, slots].
      held: slots kept for a finished request: [steps, slots].
      num_rows: tokens fed: [steps, slots].
      used_pages: pages reserved: [steps].
      used_places: token places that hold K and V: [steps].
      page_size: token places in a page.
      latency_s: from each request's arrival until the host held its last token; not a
        number where it was not served to its end: [requests].
      num_tokens: tokens of each answer: [requests].
      text: the answers: [requests].
      reason: why each ended; empty where it did not: [requests].
      duration_s: from the first arrival until the host held the last token.
      compile_s: what compiling took before that, with a request to warm up.
    """

    request_id: np.ndarray
    held: np.ndarray
    num_rows: np.ndarray
    used_pages: np.ndarray
    used_places: np.ndarray
    page_size: int
    latency_s: np.ndarray
    num_tokens: np.ndarray
    text: np.ndarray
    reason: np.ndarray
    duration_s: float
    compile_s: float

    @property
    def is_done(self) -> np.ndarray:
        """Which requests were served to their end: [requests]."""
        return self.reason != ""


class Result(Record):
    """The same requests, served twice."""

    prompt: Texts = column("text of every prompt")
    static: PolicyRecord = column("under static batching")
    continuous: PolicyRecord = column("under continuous batching")

    @property
    def both(self) -> dict[str, PolicyRecord]:
        """The two, by what people call them."""
        found = (self.static, self.continuous)
        return dict(zip(POLICIES, found, strict=True))


POLICIES = {
    "static batching": static_batching.static(),
    "continuous batching": fcfs.fcfs(),
}


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Serves the requests under both policies; ended early, it has what is done."""
    model = model_shapes.load_with_text(config.model, max_length=config.max_length)
    progress.show("cutting prompts from files that the model has not seen")
    rng = np.random.default_rng(config.seed)
    requests = config.requests(model.tokenizer, rng)
    num, pages = len(requests), -(-config.max_length // config.page_size)
    bounds = config.bounds(config.max_slots * pages, config.max_length)
    served = []
    for name, policy in POLICIES.items():
        server = Server(model_shapes.engine(model, bounds, policy=policy))
        update = progress.bar(name, num, "requests")
        compile_s, done = 0.0, {}
        if not progress.stopped:
            progress.show(f"{name}: compiling")
            server.serve([requests[0].tokens], [requests[0].sampling])
            compile_s = server.engine.now()
            done = server.stream(requests, progress, update)
        served.append(collect_record(server.steps, done, config, compile_s))
    return Result(np.array([request.text for request in requests]), *served)


def plot(axes: Any, result: Result) -> None:
    """Draws both batches on one axis of steps, and the memory that they hold."""
    *bars, memory = axes
    num_steps = max(1, *(len(served.num_rows) for served in result.both.values()))
    peaks = {}
    for ax, (name, served) in zip(bars, result.both.items(), strict=True):
        timelines.draw_slots(
            ax, served.request_id, served.held, served.num_rows, num_steps=num_steps
        )
        kind, steps = name.split()[0], len(served.num_rows)
        rate = serving_metrics(served)["tokens_per_s"]
        title = f"{name.capitalize()}: {steps:,} steps, {rate or 0:,.0f} tokens/s"
        style.titled(ax, title, "time [steps]", "slot [1]")
        edges = np.arange(steps + 1)
        reserved = served.used_pages * served.page_size
        peaks[kind] = int(reserved.max(initial=0))
        color = systems.look(kind).color
        look = {"color": color, "baseline": None, "linewidth": 1.4}
        held = served.used_places
        memory.stairs(reserved, edges, label=f"{kind}: reserved", linestyle=":", **look)
        memory.stairs(held, edges, label=f"{kind}: holding tokens", **look)
        memory.stairs(reserved, edges, fill=True, color=color, alpha=0.15)
        ax.xaxis.set_major_formatter("{x:,.0f}")
    title = "KV memory reserved, at most: "
    title += ", ".join(f"{peak:,} places {kind}" for kind, peak in peaks.items())
    style.titled(memory, title, "time [steps]", "KV memory [token places]")
    memory.set(xlim=(0, num_steps), ylim=(0, None))
    for axis in (memory.xaxis, memory.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    memory.legend()


def metrics(result: Result) -> dict[str, Any]:
    """Compares the two, and shows some answers."""
    static, continuous = map(serving_metrics, result.both.values())
    rates = static["tokens_per_s"], continuous["tokens_per_s"]
    both = result.static.is_done & result.continuous.is_done
    same = both & (result.static.text == result.continuous.text)
    return {
        "static": static,
        "continuous": continuous,
        "speed_up": rates[1] / rates[0] if all(rates) else None,
        "requests": len(result.prompt),
        "same_answers": int(same.sum()),
        "completions": [
            {"prompt": given, "continuation": wrote} for given, wrote in _shown(result)
        ],
    }


def summary(result: Result) -> list[Part]:
    """Compares the two in words, and shows some answers."""
    found = metrics(result)
    requests, slots = found["requests"], result.static.held.shape[1]
    ends = [int(served.is_done.sum()) for served in result.both.values()]
    note = f"Stopped early: {ends[0]} and {ends[1]} requests came to their end."
    if min(ends) == requests:
        note = (
            f"{found['speed_up']:.2f} times as many tokens per second; "
            f"{found['same_answers']} of {requests} answers are the same under both."
        )
    columns = dict(zip(POLICIES, (found["static"], found["continuous"]), strict=True))
    title = f"{requests} requests through {slots} slots, served twice"
    (sheet,) = report.metric_sheets(columns)
    shown = Excerpts("what the model was given, and wrote", _shown(result))
    return [sheet._replace(title=title, note=note), *([shown] if shown.pairs else [])]


@beside(__file__).judges
def claims(result: Result) -> Iterator[Ours]:
    """Holds published numbers against ours, where both policies came to an end."""
    if (result.static.is_done & result.continuous.is_done).all():
        static, continuous = map(serving_metrics, result.both.values())
        yield ours("speed_up", continuous["tokens_per_s"] / static["tokens_per_s"])
        yield ours("reserved", static["kv_utilisation"])
        yield ours("paged", continuous["kv_utilisation"])


def _shown(result: Result) -> list[tuple[str, str]]:
    """The ends of some prompts and the beginnings of their answers."""
    pairs = []
    for i in np.flatnonzero(result.continuous.is_done):
        given = showing.visible(result.prompt[i][-NUM_CHARS:]).split("\n")
        wrote = showing.visible(result.continuous.text[i][:NUM_CHARS]).split("\n")
        pairs.append((given[-NUM_LINES:], wrote[:NUM_LINES]))
    # Those of several lines first: a line alone says little.
    pairs.sort(key=lambda pair: min(map(len, pair)) < NUM_LINES // 2)
    return [("\n".join(a), "\n".join(b)) for a, b in pairs[:NUM_REPORTED]]


def collect_record(
    steps: StepInfo | None,
    answers: Mapping[int, Completion],
    config: Config,
    compile_s: float,
) -> PolicyRecord:
    """Lines up the steps of an engine, and the answers, by request, that are complete.

    Args:
      steps: of an engine, in order; None if there were none.
      answers: ids are in [0, num_requests).
      config: what was served.
      compile_s: seconds spent before the clock started.
    """
    none = np.zeros((0, config.max_slots), np.int32)
    fields = {"request_id": none, "held": none == 1, "num_rows": none}
    fields |= {"used_pages": none[:, 0], "used_places": none[:, 0]}
    if steps is not None:
        fed = steps.num_rows.any(1)
        fields = {name: getattr(steps, name)[fed] for name in fields}
    num = config.num_requests
    latency_s, num_tokens = np.full(num, np.nan), np.zeros(num, np.int32)
    text, reason = [""] * num, [""] * num
    for i, answer in answers.items():
        latency_s[i] = answer.finish_s - answer.arrival_s
        num_tokens[i], reason[i] = len(answer.tokens), answer.reason
        text[i] = answer.text or ""
    start_s = min((answer.arrival_s for answer in answers.values()), default=0.0)
    end_s = max((answer.finish_s for answer in answers.values()), default=0.0)
    return PolicyRecord(
        **fields,
        page_size=config.page_size,
        latency_s=latency_s,
        num_tokens=num_tokens,
        text=np.array(text),
        reason=np.array(reason),
        duration_s=end_s - start_s,
        compile_s=compile_s,
    )


def serving_metrics(served: PolicyRecord) -> dict[str, Any]:
    """Sums a serving up; `None` stands for a number of nothing.

    Returns:
      tokens_per_s: tokens of complete answers over `duration_s`.
      steps: that fed tokens.
      mean_latency_s, p95_latency_s: of complete answers.
      kv_utilisation: mean over steps of the share of reserved token places that hold
        one, finished sequences that keep their places included.
      slot_utilisation: mean over steps of the share of slots whose sequence is fed.
      duration_s, compile_s: as they are.
    """
    latency_s = served.latency_s[served.is_done]
    some, steps = latency_s.size > 0, len(served.num_rows)
    reserved = served.used_pages * served.page_size
    share = served.used_places / np.maximum(reserved, 1)
    return {
        "tokens_per_s": served.num_tokens.sum() / served.duration_s if some else None,
        "steps": steps,
        "mean_latency_s": latency_s.mean() if some else None,
        "p95_latency_s": np.percentile(latency_s, 95) if some else None,
        "kv_utilisation": share.mean() if steps else None,
        "slot_utilisation": (served.num_rows > 0).mean() if steps else None,
        "duration_s": served.duration_s,
        "compile_s": served.compile_s,
    }
