"""The engine of jaxkv, timed like its peers."""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import (
    CallTimes,
    host_share,
    peak_bytes,
    record_call_times,
    reset_peak,
)
from jaxkv.engine import EngineConfig, EngineRules, RequestKinds, StepInfo
from jaxkv.memory import Pages, Rows
from jaxkv.models import Forward, ForwardResult, LoadedModel
from jaxkv.sampling import Sampling
from jaxkv.serving import Engine
from jaxkv.speculation import Method, ModelWeights, build_speculative, parse_speculation

PLAIN = RequestKinds(sampled=False, grouped=False)
"""Greedy requests of one answer, which is all that is timed."""
MAX_PREFILL = 512
"""Tokens of a prompt that are prefilled before decoding is timed. For a longer prompt,
compiling a program that skips the prefill takes less time."""


class TurnTiming(NamedTuple):
    """One turn: a prefill, and a batch that decodes.

    Attributes:
      prefill_s: time until every prompt had its first token, in s; None without
        prefill.
      tokens: first tokens of the answers to the prompts.
      decode_s: time of the calls, or steps, in which every sequence decoded, in s.
      num_decoded: tokens generated in that time.
      occupancy: share of the batch that decoded, over all calls after prefill.
      peak_bytes: peak memory of the process, including weights.
    """

    prefill_s: float | None
    tokens: list[list[int]]
    decode_s: float
    num_decoded: int
    occupancy: float
    peak_bytes: int


@contextlib.contextmanager
def use_forward(engine: Engine, forward: Forward, **fields: Any) -> Generator[None]:
    """Replaces the forward pass of an engine in the context; new programs are compiled.

    Args:
      engine: the engine.
      forward: forward pass.
      **fields: further changes to the engine config.
    """
    before = engine.static
    config = dataclasses.replace(before["config"], **fields)
    engine.static = {"forward": forward, "config": config}
    try:
        yield
    finally:
        engine.static = before


def skip_prefill(engine: Engine, forward: Forward, num_tokens: int) -> None:
    """Marks the prompts of all waiting requests as prefilled, in one step.

    Args:
      engine: the engine.
      forward: forward pass without computation.
      num_tokens: total number of prompt tokens.
    """
    budget = max(num_tokens, engine.config.token_budget)
    with use_forward(engine, forward, token_budget=budget, steps_per_call=1):
        engine.dispatch()
    engine.read(engine.unread[0])


def prefill_one(engine: Engine) -> None:
    """Runs calls until the only request has its first token."""
    while not (engine.trace and engine.trace[-1].num_emitted.any()):
        engine.dispatch()
        engine.read(engine.unread[0])


class DecodeCount(NamedTuple):
    """Decoding of a batch; fields are those of `TurnTiming`."""

    decode_s: float
    num_decoded: int
    occupancy: float


def count_full_batches(
    calls: Sequence[CallTimes], infos: Sequence[StepInfo]
) -> DecodeCount:
    """Counts the calls in which every slot decoded in every step.

    The time of a call is from the end of the previous call to its own end, which
    includes time that the device waits for the host. The first call is not counted,
    because its start is unknown.

    Args:
      calls: call times, in order.
      infos: step infos of the calls, NumPy arrays `[steps, slots]`.

    Raises:
      ValueError: no call qualifies.
    """
    seconds = 0.0
    num = 0
    shares = []
    for place, (call, info) in enumerate(zip(calls, infos, strict=True)):
        decodes = info.num_emitted > 0
        if call.has_rows:
            shares.append(decodes.mean())
        if place and decodes.all():
            seconds += call.ready_s - calls[place - 1].ready_s
            num += int(info.num_emitted.sum())
    if not num:
        raise ValueError("no call has every sequence decoding")
    return DecodeCount(seconds, num, float(np.mean(shares)))


@dataclasses.dataclass(frozen=True)
class NoOpForward:
    """A forward pass without computation or writes: pages do not change."""

    vocab_size: int

    def __call__(self, params: object, pages: Pages, rows: Rows) -> ForwardResult:
        """Returns logits that increase with the token id."""
        level = 1 + jnp.maximum(rows.position[jnp.maximum(rows.logit_rows, 0)], 0)
        token = jnp.arange(self.vocab_size, dtype=jnp.float32)
        logits = token[None, :] / level[:, None].astype(jnp.float32)
        return ForwardResult(logits, pages)


def fill_with_random(pages: Pages) -> Pages:
    """Fills pages with random numbers, by repeating a few random pages."""
    num_drawn = 64

    def fill(x: jax.Array) -> jax.Array:
        few = jax.random.normal(jax.random.key(0), (num_drawn, *x.shape[2:]))
        index = jnp.arange(x.shape[0] * x.shape[1]).reshape(x.shape[:2]) % num_drawn
        return few.astype(x.dtype)[index]

    return jax.tree.map(jax.jit(fill), pages)


class JaxkvEngine:
    """An engine whose batch decodes after a context of random numbers.

    Args:
      model: model to serve.
      bounds: engine config with a slot for each sequence of the batch.
      dtype: type of the pages.
      speculate: method of `speculation.methods`, or None.

    Attributes:
      compile_s: compile time in s.
    """

    name = "jaxkv"
    version = f"jax {jax.__version__}"

    def __init__(
        self,
        model: LoadedModel,
        bounds: EngineConfig,
        dtype: str,
        speculate: Method | None = None,
    ):
        self.dtype = dtype
        target = ModelWeights(model.config, model.params)
        parts, speculation = build_speculative(
            target, bounds, parse_speculation(speculate), dtype=dtype
        )
        self._bounds = bounds
        self._vocab_size = model.config.vocab_size
        self.forward = parts.forward
        parts = dataclasses.replace(
            parts,
            pages=fill_with_random(parts.pages),
            vocab_size=model.config.vocab_size,
        )
        rules = EngineRules(speculation=speculation)
        self._engine = Engine(parts, rules, keep_trace=True)
        self._host_shares: list[float | None] = []
        start_s = time.perf_counter()
        self._engine.compile(PLAIN)
        self.compile_s = time.perf_counter() - start_s

    @property
    def host_share(self) -> float | None:
        """Median host share over all turns except the first; None if unknown."""
        shares = [x for x in self._host_shares[1:] if x is not None]
        return statistics.median(shares) if shares else None

    def measure(
        self, prompts: list[list[int]], num_tokens: int, turn_s: float, reads: int
    ) -> TurnTiming:
        """Prefills prompts of one length, then decodes a batch after as many tokens.

        Args:
          prompts: one prompt per sequence.
          num_tokens: largest number of tokens per sequence, without those of the first
            call.
          turn_s: time after which no call starts, in s.
          reads: tokens of each answer in the prefill measurement; 0 skips it.
        """
        reset_peak()
        prefill_s = None
        tokens = [[] for _ in prompts]
        if reads:
            prefill_s, tokens = self._read(prompts, reads)
        self._host_shares.append(None)
        decoded = self.decode(prompts, num_tokens, turn_s, note=True)
        # Peak of the first device if it reports one, else of this process.
        stats = jax.local_devices()[0].memory_stats() or {}
        peak = stats.get("peak_bytes_in_use") or peak_bytes()
        return TurnTiming(prefill_s, tokens, *decoded, peak)

    def _read(
        self, prompts: list[list[int]], reads: int
    ) -> tuple[float, list[list[int]]]:
        """Returns the time until all prompts have a token, and the answers' tokens."""
        served = self._engine
        once = Sampling.greedy(max_tokens=1, ignore_eos=True)
        start_s = first_s = time.perf_counter()
        for prompt in prompts:
            served.submit(prompt, once)
        tokens: dict[int, list[int]] = {}
        for event in served.stream():
            if event.tokens:
                first_s = time.perf_counter()
                tokens[event.request_id] = [*event.tokens]
        if reads == 1:
            return first_s - start_s, [tokens[x] for x in sorted(tokens)]
        ask = dataclasses.replace(once, max_tokens=reads)
        completions = served.generate(prompts, ask)
        return first_s - start_s, [[*completion.tokens] for completion in completions]

    def decode(
        self,
        prompts: list[list[int]],
        num_tokens: int,
        turn_s: float,
        *,
        forward: Forward | None = None,
        note: bool = False,
    ) -> DecodeCount:
        """Decodes after prompts; only one short prompt is prefilled.

        Args:
          prompts: prompts, of which only the lengths are used.
          num_tokens: tokens of each answer.
          turn_s: time limit of decoding, in s.
          forward: replacement of the model's forward pass.
          note: True if the host share is recorded.
        """
        served = self._engine
        bounds = self._bounds
        first = 1 + bounds.steps_per_call * bounds.emit_width
        max_tokens = bounds.max_length - len(prompts[0])
        num_tokens = min(max_tokens, first + num_tokens)
        ask = Sampling.greedy(max_tokens=num_tokens, ignore_eos=True)
        ids = [served.submit(prompt, ask) for prompt in prompts]
        num_prefilled = len(prompts) * len(prompts[0])
        if len(prompts) == 1 and num_prefilled <= MAX_PREFILL:
            prefill_one(served)
        else:
            skip_prefill(served, NoOpForward(self._vocab_size), num_prefilled)
        served.trace.clear()
        how = use_forward(served, forward or self.forward)
        with record_call_times(served) as calls, how:
            end_s = time.perf_counter() + turn_s
            for _ in served.stream():
                late = time.perf_counter() > end_s
                if ids and late and len(served.trace) > 1:
                    for request_id in ids:
                        served.cancel(request_id)
                    ids = []
        if note:
            self._host_shares[-1] = host_share(calls)
        return count_full_batches(calls, served.trace)
