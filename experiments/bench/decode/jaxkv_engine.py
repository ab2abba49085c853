"""Our engine, timed as its peers are, and seen from outside."""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import peer_main
from experiments.harness.timing import CallTimes, host_share, record_call_times
from jaxkv.engine import state, step
from jaxkv.memory import Pages
from jaxkv.models import ForwardResult, checkpoints
from jaxkv.sampling import Sampling
from jaxkv.serving import Engine
from jaxkv.serving.core import EngineCore
from jaxkv.speculation import methods


class TurnTiming(NamedTuple):
    """One turn: prompts that are read, and a batch that decodes.

    Attributes:
      prefill_s: seconds until every prompt had its first token; None where none is
        read.
      tokens: the first of the answers to them.
      decode_s: seconds of the calls, or steps, in which every sequence decoded.
      num_decoded: tokens that came of these.
      occupancy: share of the batch that decoded, over all calls that followed the first
        tokens, counted or not.
      peak_bytes: peak memory of the process, weights included.
    """

    prefill_s: float | None
    tokens: list[list[int]]
    decode_s: float
    num_decoded: int
    occupancy: float
    peak_bytes: int


@contextlib.contextmanager
def use_forward(core: EngineCore, forward: Any, **fields: Any) -> Generator[None]:
    """Serves with another forward pass, which is compiled where it is new.

    Args:
      core: of the engine.
      forward: the pass.
      **fields: of the configuration that are others, too.
    """
    before = core.static
    config = dataclasses.replace(before["config"], **fields)
    core.static = before | {"forward": forward, "config": config}
    try:
        yield
    finally:
        core.static = before


def skip_prefill(core: EngineCore, forward: Any, num_tokens: int) -> None:
    """Passes over the prompts of all that wait, in one step.

    Args:
      core: of the engine.
      forward: what feeds their tokens in place of the model, for nothing.
      num_tokens: how many those are.
    """
    core.compile()  # the engine's own programs first
    budget = max(num_tokens, core.config.token_budget)
    with use_forward(core, forward, token_budget=budget, steps_per_call=1):
        core.dispatch()
    core.read(core.unread[0])


class DecodeCount(NamedTuple):
    """A batch that decoded for a while; fields are those of `Timing`."""

    decode_s: float
    num_decoded: int
    occupancy: float


def count_full_batches(
    calls: Sequence[CallTimes], infos: Sequence[step.StepInfo]
) -> DecodeCount:
    """Counts the calls in each of whose steps every slot decoded.

    A call lasts from the end of the one before to its own end, so what the host made
    the device wait is in it; the first is not counted, for nobody saw it begin.

    Args:
      calls: in order.
      infos: what their steps did, NumPy arrays `[steps, slots]`.

    Raises:
      ValueError: there is none to count.
    """
    seconds, num, shares = 0.0, 0, []
    for place, (call, info) in enumerate(zip(calls, infos, strict=True)):
        decodes = info.num_emitted > 0
        if call.has_rows:
            shares.append(decodes.mean())
        if place and decodes.all():
            seconds += call.ready_s - calls[place - 1].ready_s
            num += int(info.num_emitted.sum())
    if not num:
        raise ValueError("in no call did every sequence decode")
    return DecodeCount(seconds, num, float(np.mean(shares)))


@dataclasses.dataclass(frozen=True)
class NoOpForward:
    """A forward pass that computes and writes nothing: pages stay as they were."""

    vocab_size: int

    def __call__(self, params: Any, pages: Pages, rows: Any) -> ForwardResult:
        """The likelier, the higher the token's id.

        By data: the compiler would spend minutes on sampling from what it knows.
        """
        level = 1 + jnp.maximum(rows.position[jnp.maximum(rows.logit_rows, 0)], 0)
        token = jnp.arange(self.vocab_size, dtype=jnp.float32)
        logits = token[None, :] / level[:, None].astype(jnp.float32)
        return ForwardResult(logits, pages)


def fill_with_random(pages: Pages) -> Pages:
    """Pages full of random numbers, of which a few are drawn and stand again."""
    num_drawn = 64

    def fill(x: jax.Array) -> jax.Array:
        few = jax.random.normal(jax.random.key(0), (num_drawn, *x.shape[2:]))
        index = jnp.arange(x.shape[0] * x.shape[1]).reshape(x.shape[:2]) % num_drawn
        return few.astype(x.dtype)[index]

    return jax.tree.map(jax.jit(fill), pages)


class JaxkvEngine:
    """Our engine, whose batch decodes behind a context of random numbers.

    Args:
      model: what to serve.
      bounds: of the engine, with a slot for each sequence of the batch.
      dtype: of the pages.
      speculate: a method of `speculation.methods`, or None.

    Attributes:
      compile_s: seconds that its programs took.
    """

    name = "jaxkv"
    version = f"jax {jax.__version__}"

    def __init__(
        self,
        model: checkpoints.Loaded,
        bounds: state.EngineConfig,
        dtype: str,
        speculate: methods.Method | None = None,
    ):
        self.dtype = dtype
        target = methods.Model(model.config, model.params)
        served = methods.build_speculative(
            target, bounds, methods.of(speculate), dtype=dtype
        )
        self._bounds, self._vocab_size = bounds, model.config.vocab_size
        self.forward = served.forward
        self._engine = Engine(
            served.params,
            served.forward,
            fill_with_random(served.pages),
            bounds,
            speculation=served.speculation,
            eos_ids=(),
            vocab_size=model.config.vocab_size,
            keep_trace=True,
        )
        self._host_shares: list[float | None] = []
        start_s = time.perf_counter()
        self._engine.core.compile()
        self.compile_s = time.perf_counter() - start_s

    @property
    def host_share(self) -> float | None:
        """The median over the turns behind the first; None where none tells."""
        known = [x for x in self._host_shares[1:] if x is not None]
        return statistics.median(known) if known else None

    def measure(
        self, prompts: list[list[int]], num_tokens: int, turn_s: float, reads: int
    ) -> TurnTiming:
        """Reads prompts of one length, then decodes a batch behind as many tokens.

        Args:
          prompts: one for each sequence.
          num_tokens: that each decodes at most, beside those of the first call.
          turn_s: seconds after which the last call begins.
          reads: tokens of each answer to the prompts that are read; 0 reads none.
        """
        peer_main.reset_peak()
        prefill_s, tokens = None, [[] for _ in prompts]
        if reads:
            prefill_s, tokens = self._read(prompts, reads)
        self._host_shares.append(None)
        decoded = self.decode(prompts, num_tokens, turn_s, note=True)
        # The first device's if it keeps count, else this process's.
        stats = jax.local_devices()[0].memory_stats() or {}
        peak = stats.get("peak_bytes_in_use") or peer_main.peak_bytes()
        return TurnTiming(prefill_s, tokens, *decoded, peak)

    def _read(
        self, prompts: list[list[int]], reads: int
    ) -> tuple[float, list[list[int]]]:
        """Seconds until one token of each is there, in a serving of its own; tokens."""
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
        found = served.generate(prompts, ask)
        return first_s - start_s, [[*each.tokens] for each in found]

    def decode(
        self,
        prompts: list[list[int]],
        num_tokens: int,
        turn_s: float,
        *,
        forward: Any = None,
        note: bool = False,
    ) -> DecodeCount:
        """Decodes behind prompts that nobody read; arguments as of `measure`.

        Args:
          prompts: for their lengths.
          num_tokens: of each answer.
          turn_s: seconds of decoding.
          forward: the forward pass in place of the model's.
          note: whether the host's share is noted.
        """
        served, bounds = self._engine, self._bounds
        first = 1 + bounds.steps_per_call * bounds.emit_width
        most = bounds.max_length - len(prompts[0])
        num_tokens = min(most, first + num_tokens)
        ask = Sampling.greedy(max_tokens=num_tokens, ignore_eos=True)
        ids = [served.submit(prompt, ask) for prompt in prompts]
        num_read = len(prompts) * len(prompts[0])
        skip_prefill(served.core, NoOpForward(self._vocab_size), num_read)
        served.trace.clear()
        how = use_forward(served.core, forward or self.forward)
        with record_call_times(served.core) as calls, how:
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
