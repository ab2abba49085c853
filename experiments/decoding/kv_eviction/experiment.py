"""Measures memory against quality under KV eviction, on text and on retrieval.

The bundled model reads prompts of held-out code, and tokens are evicted by each rule.
Then the engine is forced to answer with the true continuation, and reports the
log-probabilities of the model's own logits: the loss of the text, in bits per byte. In
a second task the prompt begins with a variable of 8 random letters, held-out code
follows, and the prompt ends with `return`; the forced answer is the variable. Its first
two letters cannot be known; the model retrieves the next ones from the cache, and the
accuracy is the share of letters that are the most likely byte. A letter by chance has
1/26.

Intervals are 95 % over prompts, of differences to the full cache of the same prompts.
Processor time of all requests is that of the process, in rounds of all engines in turn.
"""

import string
import time
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import lab
from jaxkv.engine import TokenHistory
from jaxkv.memory import EVICTION_RULES, EvictionRule
from jaxkv.sampling import Sampling
from jaxkv.serving import Engine
from scaling.corpora import STANDARD_LIBRARY, load_documents

CLAIMS = lab.claims_file(__file__)
FULL_CACHE = "full cache"
NUM_LETTERS = 8
NUM_UNKNOWN = 2
"""First letters that only the answer shows."""
PAGE_SIZE = 16
END = "\n    return "


class Config(lab.ConfigRecord):
    """Model, prompts and budgets."""

    model: str = "stdlib-bytes"
    """Folder, or name of a bundled model whose tokens are bytes."""
    rules: Annotated[
        tuple[EvictionRule, ...], lab.Choices((*EVICTION_RULES, "quest"))
    ] = ("streaming-llm", "h2o", "snapkv", "keydiff")
    """Compared rules."""
    budgets: lab.AscendingInts = (64, 128)
    """Tokens that each head keeps."""
    window: lab.PositiveInt = 32
    """Last tokens whose attention "snapkv" and "h2o" read."""
    num_prompts: Annotated[int, lab.Range(2)] = 32
    """Prompts of each task."""
    prompt_tokens: Annotated[int, lab.Range(64)] = 384
    """Tokens of each prompt."""
    answer_tokens: lab.PositiveInt = 96
    """Tokens of each continued text."""
    rounds: lab.PositiveInt = 1
    """Rounds over which processor time is measured."""
    seed: lab.NonNegativeInt = 0
    """Seed of places and letters."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.budgets[-1] >= self.prompt_tokens:
            raise ValueError(
                f"budgets={self.budgets} must be below "
                f"prompt_tokens={self.prompt_tokens}"
            )


CONFIGS = {
    "real": Config(),
    "smoke": Config(
        rules=("keydiff",),
        budgets=(24,),
        num_prompts=2,
        prompt_tokens=64,
        answer_tokens=8,
    ),
}


class EvictionRuns(lab.ResultTable):
    """Quality and memory by rule and budget."""

    rule: lab.Texts = lab.column("rule")
    budget: lab.Ints = lab.column("tokens of each head; 0 keeps all")
    pages: lab.Floats = lab.column("pages in use, mean over steps")
    loss: lab.Floats = lab.column("loss of the text [bits/byte]", form="{:.3f}")
    loss_increase: lab.Floats = lab.column(
        "increase over the full cache [bits/byte]", form="{:.3f}"
    )
    loss_margin: lab.Floats = lab.column("half its 95 % interval", form="{:.3f}")
    accuracy: lab.Floats = lab.column("retrieved letters [share]", form="{:.3f}")
    accuracy_change: lab.Floats = lab.column(
        "change from the full cache [share]", form="{:.3f}"
    )
    accuracy_margin: lab.Floats = lab.column("half its 95 % interval", form="{:.3f}")
    cpu_ratio: lab.Floats = lab.column(
        "processor time / full cache [ratio]", form="{:.2f}"
    )


class Result(lab.ResultRecord):
    """Runs of all rules and budgets."""

    runs: EvictionRuns = lab.column("rules and budgets")
    num_prompts: int = lab.column("prompts of each task")
    prompt_tokens: int = lab.column("tokens of each prompt")
    answer_tokens: int = lab.column("tokens of each continued text")


class ForcedRequest(NamedTuple):
    """A prompt and the answer that is forced, in bytes."""

    prompt: bytes
    answer: bytes


def draw_forced_requests(config: Config) -> list[ForcedRequest]:
    """Draws the continued texts, then as many retrievals."""
    rng = np.random.default_rng(config.seed)
    length = config.prompt_tokens + config.answer_tokens
    texts = [x.text for x in load_documents(STANDARD_LIBRARY).held_out]
    texts = [text for text in texts if len(text) > length]

    def cut(num: int) -> bytes:
        text = texts[rng.integers(len(texts))]
        start = int(rng.integers(len(text) - num))
        return text[start : start + num]

    requests = []
    for _ in range(config.num_prompts):
        text = cut(length)
        prompt = text[: config.prompt_tokens]
        requests.append(ForcedRequest(prompt, text[config.prompt_tokens :]))
    for _ in range(config.num_prompts):
        name = "".join(rng.choice([*string.ascii_lowercase], NUM_LETTERS)).encode()
        start = b"    " + name + b" = None\n"
        text = cut(config.prompt_tokens - len(start) - len(END))
        requests.append(ForcedRequest(start + text + END.encode(), name))
    return requests


def load_forced_engine(
    config: Config,
    requests: list[ForcedRequest],
    rule: EvictionRule | None,
    budget: int,
) -> Engine:
    """Loads an engine that answers each request by its index with the forced tokens."""
    size = max(len(request.answer) for request in requests)
    table = np.zeros((len(requests), size), np.int32)
    for row, request in enumerate(requests):
        table[row, : len(request.answer)] = [*request.answer]

    def force(history: TokenHistory, logits: jax.Array) -> jax.Array:
        place = history.num_tokens - history.prompt_length
        row = jnp.clip(history.request_id, 0, len(requests) - 1)
        token = jnp.asarray(table)[row, jnp.clip(place, 0, size - 1)]
        words = jnp.arange(logits.shape[1], dtype=jnp.int32)
        is_token = words[None, :] == token[:, None]
        return jnp.where(is_token, 0.0, -1e9).astype(logits.dtype)

    length = config.prompt_tokens + config.answer_tokens
    return Engine.load(
        config.model,
        logits_fn=force,
        keep_trace=True,
        num_pages=8 * -(-length // PAGE_SIZE),
        page_size=PAGE_SIZE,
        max_length=length,
        max_sequences=len(requests),
        queue_capacity=len(requests),
        max_logprobs=1,
        evict=rule,
        evict_budget=budget,
        evict_window=config.window,
    )


def answer(engine: Engine, requests: list[ForcedRequest]) -> tuple[np.ndarray, ...]:
    """Answers all requests.

    Returns:
      Loss of each text in bits per byte, share of retrieved letters of each retrieval,
      and the pages in use in every step.
    """
    engine.trace.clear()
    for i, request in enumerate(requests):
        num = len(request.answer)
        ask = Sampling.greedy(max_tokens=num, ignore_eos=True, logprobs=1)
        engine.submit([*request.prompt], ask, request_id=i)
    done = {x.request_id: x.completion for x in engine.stream() if x.completion}
    half = len(requests) // 2
    losses = []
    accuracies = []
    for i, request in enumerate(requests):
        result = done[i].answers[0]
        if result.tokens != [*request.answer]:
            raise RuntimeError(f"request {i} has other tokens than the forced ones")
        assert result.logprobs is not None
        assert result.top_logprobs is not None
        if i < half:
            losses.append(-np.mean(result.logprobs) / np.log(2))
            continue
        pairs = zip(result.top_logprobs, request.answer, strict=True)
        hits = [max(top, key=top.__getitem__) == byte for top, byte in pairs]
        accuracies.append(np.mean(hits[NUM_UNKNOWN:]))
    used = np.concatenate([np.asarray(info.used_pages) for info in engine.trace])
    return np.array(losses), np.array(accuracies), used[used > 0]


def margin(differences: np.ndarray) -> float:
    """Returns half of the 95 % interval of a mean."""
    return float(1.96 * differences.std(ddof=1) / np.sqrt(len(differences)))


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Answers all requests under every rule and budget.

    Raises:
      ValueError: the model cannot be served, or a budget is too small for a rule.
    """
    requests = draw_forced_requests(config)
    settings: list[tuple[EvictionRule | None, int]] = [(None, 0)]
    settings += [(rule, budget) for rule in config.rules for budget in config.budgets]
    engines = []
    measured = []
    for rule, budget in progress.track(settings, "rules", "programs"):
        engines.append(load_forced_engine(config, requests, rule, budget))
        measured.append(answer(engines[-1], requests))
    cpu_s = np.zeros((config.rounds, len(engines)))
    for turn in progress.track([*range(config.rounds)], "rounds", "rounds"):
        for i, engine in enumerate(engines):
            start_s = time.process_time()
            answer(engine, requests)
            cpu_s[turn, i] = time.process_time() - start_s
    rows = []
    full_loss, full_accuracy, _ = measured[0]
    for i, (rule, budget) in enumerate(settings[: len(measured)]):
        loss, accuracy, pages = measured[i]
        loss_change = loss - full_loss
        accuracy_change = accuracy - full_accuracy
        rows.append(
            (
                rule or FULL_CACHE,
                budget,
                pages.mean(),
                loss.mean(),
                loss_change.mean(),
                margin(loss_change),
                accuracy.mean(),
                accuracy_change.mean(),
                margin(accuracy_change),
                float(np.median(cpu_s[:, i] / cpu_s[:, 0])),
            )
        )
    sizes = config.num_prompts, config.prompt_tokens, config.answer_tokens
    return Result(EvictionRuns.of(rows), *sizes)


@CLAIMS.judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares processor times with the bar, and rules with statements of papers."""
    runs = result.runs
    evicting = runs.at(np.flatnonzero(runs.budget > 0))
    if not len(evicting):
        return
    few = result.num_prompts < 16
    worst = evicting.at([int(np.argmax(evicting.cpu_ratio))])
    yield lab.measured(
        "cost",
        worst.cpu_ratio[0],
        differs=few,
        rule=worst.rule[0],
        budget=int(worst.budget[0]),
    )
    returning = evicting.at(np.flatnonzero(evicting.rule != "quest"))
    if len(returning):
        yield lab.measured(
            "pages", float(returning.pages.max() / runs.pages[0]), differs=few
        )
    small = evicting.where(budget=int(evicting.budget.min()))
    recent = small.where(rule="streaming-llm")
    for rule in ("snapkv", "keydiff"):
        other = small.where(rule=rule)
        if len(recent) and len(other):
            gain = float(other.accuracy[0] - recent.accuracy[0])
            yield lab.measured("retrieval", gain, rule=rule)


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws the loss of the text and the retrieved letters by budget."""
    runs = result.runs
    for ax, field, spread, name in (
        (axes[0], "loss_increase", "loss_margin", "loss above full cache [bits/byte]"),
        (axes[1], "accuracy", "accuracy_margin", "retrieved letters [share]"),
    ):
        for number, rule in enumerate(runs.distinct("rule")):
            selected = runs.where(rule=rule)
            if rule == FULL_CACHE:
                if field == "accuracy" and len(selected):
                    lab.draw_reference_line(ax, selected.accuracy[0], FULL_CACHE)
                continue
            values = getattr(selected, field)
            error = getattr(selected, spread)
            color = lab.colors()[COLORS[number % len(COLORS)]]
            marker = "osD^v"[number % 5]
            # Shifted, so that intervals do not overlap.
            x = selected.budget * (1 + 0.03 * (number - 2))
            ax.errorbar(
                x, values, error, label=rule, color=color, marker=marker, capsize=3
            )
        evicting = runs.at(np.flatnonzero(runs.budget > 0))
        title = ""
        if len(evicting):
            at = int(np.argmin(evicting.loss_increase))
            best = f"{evicting.rule[at]} with {evicting.budget[at]} tokens"
            title = f"{best} costs {evicting.loss_increase[at]:.3f} bits/byte"
            if field == "accuracy":
                at = int(np.argmax(evicting.accuracy))
                best = f"{evicting.rule[at]} with {evicting.budget[at]} tokens"
                title = f"{best} retrieves {evicting.accuracy[at]:.0%} of the letters"
        lab.set_labels(ax, title, "budget [tokens/head]", name, ylim=(0, None))
        if len(evicting):
            ax.set_xticks(evicting.distinct("budget"))
            ax.legend()


COLORS = (lab.BLACK, lab.BLUE, lab.ORANGE, lab.GREEN, lab.PURPLE)


def summary(result: Result) -> list[lab.ReportPart]:
    """Returns the table of rules and budgets."""
    title = (
        f"{result.num_prompts} prompts of {result.prompt_tokens} tokens for each task"
    )
    names = [x for x in EvictionRuns.columns() if x != "loss"]
    return [result.runs.sheet(title, *names)]


STUDY = lab.Study(
    CONFIGS, Result, run, plot, claims, summary, panels=lab.Panels(1, 2, 4.6)
)
