"""Compares static and continuous batching on the same requests.

A real model continues real text: prompts of varied lengths, cut from files that it was
not trained on, with answers of varied lengths. One engine serves the same requests
twice, with the same sampling and capacity. Under static batching, a batch keeps its
slots and its reservations for the longest sequence until its last request ends. Under
continuous batching, a slot goes to the next request at once, and pages are allocated
on demand. Programs are compiled before the clock starts.

KV utilisation is the mean of used token places / (used pages * page size) over
non-empty steps.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from experiments import lab
from experiments.harness import RaggedConfig, Server, load_text_model, make_engine
from jaxkv import scheduling
from jaxkv.cli import make_printable
from jaxkv.engine import StepInfo
from jaxkv.serving import Completion

NUM_REPORTED = 6
NUM_CHARS = 240
"""Answers in the report, and characters of each."""
NUM_LINES = 6
"""Lines of each answer and of its prompt."""


class Config(RaggedConfig):
    """The requests, and the engine that serves them."""

    max_length: int = 512
    """Token places that static batching reserves for each slot."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.longest > self.max_length:
            raise ValueError(
                f"prompt_tokens={self.prompt_tokens!r} and "
                f"output_tokens={self.output_tokens!r} may need "
                f"{self.longest} tokens, more than max_length={self.max_length!r}"
            )


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
    """Steps and answers of one policy; empty steps are left out.

    Attributes:
      request_id: request in each slot, -1 if none: [steps, slots].
      held: True if a finished request keeps the slot: [steps, slots].
      num_rows: tokens fed: [steps, slots].
      used_pages: reserved pages: [steps].
      used_places: token places that hold K and V: [steps].
      page_size: token places in a page.
      latency_s: time from arrival until the host has the last token; NaN if the request
        did not finish: [requests].
      num_tokens: tokens of each answer: [requests].
      text: answers: [requests].
      reason: finish reason; empty if the request did not finish: [requests].
      duration_s: time from the first arrival until the host has the last token.
      compile_s: compile time before that, with a warm-up request.
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
        """True for requests that finished: [requests]."""
        return self.reason != ""


class Result(lab.ResultRecord):
    """Both servings of the same requests."""

    prompt: lab.Texts = lab.column("prompts")
    static: PolicyRecord = lab.column("under static batching")
    continuous: PolicyRecord = lab.column("under continuous batching")

    @property
    def both(self) -> dict[str, PolicyRecord]:
        """Both records by name of the policy."""
        records = (self.static, self.continuous)
        return dict(zip(DEMO_POLICIES, records, strict=True))


DEMO_POLICIES = {
    "static batching": scheduling.static(),
    "continuous batching": scheduling.fcfs(),
}


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Serves the requests under both policies; if stopped, keeps finished requests."""
    model = load_text_model(config.model, max_length=config.max_length)
    progress.show("cutting prompts from files that the model has not seen")
    rng = np.random.default_rng(config.seed)
    requests = config.requests(model.tokenizer, rng)
    num = len(requests)
    pages = -(-config.max_length // config.page_size)
    bounds = config.engine_config(config.max_slots * pages, config.max_length)
    served = []
    for name, policy in DEMO_POLICIES.items():
        server = Server(make_engine(model, bounds, policy=policy))
        update = progress.bar(name, num, "requests")
        compile_s = 0.0
        done = {}
        if not progress.stopped:
            progress.show(f"{name}: compiling")
            server.serve([requests[0].tokens], [requests[0].sampling])
            compile_s = server.engine.now()
            done = server.stream(requests, progress, update)
        served.append(collect_record(server.steps, done, config, compile_s))
    return Result(np.array([request.text for request in requests]), *served)


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws slots by step for both policies, and the memory that each reserves."""
    *bars, memory = axes
    num_steps = max(1, *(len(served.num_rows) for served in result.both.values()))
    peaks = {}
    for ax, (name, served) in zip(bars, result.both.items(), strict=True):
        lab.draw_slots(
            ax, served.request_id, served.held, served.num_rows, num_steps=num_steps
        )
        kind = name.split()[0]
        steps = len(served.num_rows)
        rate = serving_metrics(served)["tokens_per_s"]
        title = f"{name.capitalize()}: {steps:,} steps, {rate or 0:,.0f} tokens/s"
        lab.set_labels(ax, title, "time [steps]", "slot [1]")
        edges = np.arange(steps + 1)
        reserved = served.used_pages * served.page_size
        peaks[kind] = int(reserved.max(initial=0))
        color = lab.system_style(kind).color
        look = {"color": color, "baseline": None, "linewidth": 1.4}
        held = served.used_places
        memory.stairs(reserved, edges, label=f"{kind}: reserved", linestyle=":", **look)
        memory.stairs(held, edges, label=f"{kind}: holding tokens", **look)
        memory.stairs(reserved, edges, fill=True, color=color, alpha=0.15)
        ax.xaxis.set_major_formatter("{x:,.0f}")
    title = "KV memory reserved, at most: "
    title += ", ".join(f"{peak:,} places {kind}" for kind, peak in peaks.items())
    lab.set_labels(memory, title, "time [steps]", "KV memory [token places]")
    memory.set(xlim=(0, num_steps), ylim=(0, None))
    for axis in (memory.xaxis, memory.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    memory.legend()


def metrics(result: Result) -> dict[str, Any]:
    """Returns metrics of both policies, and some answers."""
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
            {"prompt": prompt, "continuation": wrote}
            for prompt, wrote in _shown(result)
        ],
    }


def summary(result: Result) -> list[lab.ReportPart]:
    """Returns a table of both policies, and some answers."""
    numbers = metrics(result)
    requests = numbers["requests"]
    slots = result.static.held.shape[1]
    ends = [int(served.is_done.sum()) for served in result.both.values()]
    note = f"Stopped early: {ends[0]} and {ends[1]} requests came to their end."
    if min(ends) == requests:
        note = (
            f"{numbers['speed_up']:.2f} times as many tokens per second; "
            f"{numbers['same_answers']} of {requests} answers are the same under both."
        )
    columns = dict(
        zip(DEMO_POLICIES, (numbers["static"], numbers["continuous"]), strict=True)
    )
    title = f"{requests} requests through {slots} slots, served twice"
    (sheet,) = lab.metric_sheets(columns)
    shown = lab.Excerpts("prompts and answers", _shown(result))
    return [sheet._replace(title=title, note=note), *([shown] if shown.pairs else [])]


@lab.claims_file(__file__).judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares published numbers, if both policies finished all requests."""
    if (result.static.is_done & result.continuous.is_done).all():
        static, continuous = map(serving_metrics, result.both.values())
        yield lab.measured(
            "speed_up", continuous["tokens_per_s"] / static["tokens_per_s"]
        )
        yield lab.measured("reserved", static["kv_utilisation"])
        yield lab.measured("paged", continuous["kv_utilisation"])


def _shown(result: Result) -> list[tuple[str, str]]:
    """Returns the ends of some prompts and the starts of their answers."""
    pairs = []
    for i in np.flatnonzero(result.continuous.is_done):
        prompt_lines = make_printable(result.prompt[i][-NUM_CHARS:]).split("\n")
        wrote = make_printable(result.continuous.text[i][:NUM_CHARS]).split("\n")
        pairs.append((prompt_lines[-NUM_LINES:], wrote[:NUM_LINES]))
    # Excerpts of several lines come first.
    pairs.sort(key=lambda pair: min(map(len, pair)) < NUM_LINES // 2)
    return [("\n".join(a), "\n".join(b)) for a, b in pairs[:NUM_REPORTED]]


def collect_record(
    steps: StepInfo | None,
    answers: Mapping[int, Completion],
    config: Config,
    compile_s: float,
) -> PolicyRecord:
    """Collects the steps and the finished answers of an engine.

    Args:
      steps: steps in order; None if there were none.
      answers: finished answers by request id, in [0, num_requests).
      config: config of the run.
      compile_s: compile time in s.
    """
    none = np.zeros((0, config.max_slots), np.int32)
    fields = {"request_id": none, "held": none == 1, "num_rows": none}
    fields |= {"used_pages": none[:, 0], "used_places": none[:, 0]}
    if steps is not None:
        fed = steps.num_rows.any(1)
        fields = {name: getattr(steps, name)[fed] for name in fields}
    num = config.num_requests
    latency_s = np.full(num, np.nan)
    num_tokens = np.zeros(num, np.int32)
    text = [""] * num
    reason = [""] * num
    for i, answer in answers.items():
        latency_s[i] = answer.finish_s - answer.arrival_s
        num_tokens[i] = len(answer.tokens)
        reason[i] = answer.reason
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
    """Returns summary metrics; None if they are undefined.

    Returns:
      tokens_per_s: tokens of finished answers / `duration_s`.
      steps: non-empty steps.
      mean_latency_s, p95_latency_s: latencies of finished answers.
      kv_utilisation: mean share of reserved token places that hold a token; reserved
        places of finished requests count.
      slot_utilisation: mean share of slots that are fed.
      duration_s, compile_s: as in the record.
    """
    latency_s = served.latency_s[served.is_done]
    has_answers = latency_s.size > 0
    steps = len(served.num_rows)
    reserved = served.used_pages * served.page_size
    share = served.used_places / np.maximum(reserved, 1)
    return {
        "tokens_per_s": served.num_tokens.sum() / served.duration_s
        if has_answers
        else None,
        "steps": steps,
        "mean_latency_s": latency_s.mean() if has_answers else None,
        "p95_latency_s": np.percentile(latency_s, 95) if has_answers else None,
        "kv_utilisation": share.mean() if steps else None,
        "slot_utilisation": (served.num_rows > 0).mean() if steps else None,
        "duration_s": served.duration_s,
        "compile_s": served.compile_s,
    }


STUDY = lab.Study(
    CONFIGS, Result, run, plot, claims, summary, metrics, panels=lab.Panels(3, 1, 2.7)
)
