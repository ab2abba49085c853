"""The host's side of the engine: text in, text out, one call late.

`Engine` owns a state and three compiled programs. In every turn it hands over waiting
requests, dispatches the next steps, and only then reads what the last ones emitted: the
device never waits for Python. It never looks into the state either; what it must know,
its tracker counts.
"""

import collections
import contextlib
import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxkv import validation
from jaxkv.clock import from_seconds
from jaxkv.engine import EngineConfig, EngineState, step
from jaxkv.engine.drafting import Speculation
from jaxkv.engine.requests import Requests
from jaxkv.engine.state import Sequences, init
from jaxkv.memory import Eviction, Pages, invariants
from jaxkv.models import interface as models_interface
from jaxkv.parallel import layout
from jaxkv.sampling import Sampling
from jaxkv.scheduling import fcfs
from jaxkv.scheduling import interface as scheduling_interface
from jaxkv.serving import (
    host_swap,
    interrupts,
    outputs,
    prefixes,
    programs,
    refusals,
    tuning,
)
from jaxkv.serving.outputs import Completion, Event
from jaxkv.serving.request_tracker import RequestTracker
from jaxkv.serving.requests import Part, Record

_IDLE_S = 0.01
"""Longest sleep at a time: another thread may bring a request."""


@dataclasses.dataclass(kw_only=True, eq=False)
class _Call:
    """A dispatched call whose results have not been read."""

    info: step.StepInfo
    drained: Sequences | None = None
    num_pending: int = 0
    """Requests that waited on the host meanwhile, if a trace is kept."""


class Engine:
    """Serves a model. See the module's first lines for how.

    Ctrl-C, or whatever else the handler of a signal raises, leaves it as it was between
    two calls to the device: what was submitted goes on with the next `stream` or
    `generate`, and what an interrupted `generate` had asked is withdrawn.

    Threads may share it. Whoever waits for something runs the device for all, one call
    at a time; in `stream` of several threads each event goes to one of them.

    Where something fails inside such a call, on the device say, or an invariant in
    debug mode, the engine is lost: every later use says so in a `RuntimeError`.
    """

    def __init__(
        self,
        params: Any,
        forward: models_interface.Forward,
        pages: Pages,
        config: EngineConfig,
        *,
        tokenizer: Any = None,
        eos_ids: Sequence[int] | None = None,
        vocab_size: int | None = None,
        policy: scheduling_interface.Policy | None = None,
        eviction: Eviction | None = None,
        logits_fn: step.LogitsFn | None = None,
        speculation: Speculation | None = None,
        keep_trace: bool = False,
        host_pages: int | None = None,
        mesh: Mesh | None = None,
    ):
        """Makes an idle engine; compiles nothing yet.

        Args:
          params: parameters, as `forward` takes them.
          forward: the model.
          pages: its K and V arrays; the engine consumes them.
          config: the bounds.
          tokenizer: with `encode`, `stream` and `eos_ids`; needed for text.
          eos_ids: tokens that end an answer; None takes the tokenizer's.
          vocab_size: token ids must lie below it; None does not check.
          policy: who runs; None means `fcfs.fcfs()`.
          eviction: which pages leave the prefix cache first; None means
            `prefix_eviction.LRU()`.
          logits_fn: changes logits before a token is drawn; a plain function, compiled
            once for each function object.
          speculation: who guesses tokens and who judges them, see `jaxkv.speculation`;
            `config.max_drafts` says how many. None decodes plainly.
          keep_trace: whether `trace` collects the step infos.
          host_pages: swap space in host memory, in pages, beside the staging buffer of
            `max_swap_pages`; None means as many as the pool has.
          mesh: devices to divide the model and its pages over, see
            `parallel.make_mesh`; the parameters are as `parallel.tensor.place_params`
            returns them. None means one device.

        Raises:
          ValueError: an argument is of another type than it should be, the pages do not
            fit the configuration, the end tokens do not fit `max_stop_tokens`, or
            `host_pages` is below 0.
        """
        refusals.check_parts(
            config, pages, forward, policy, eviction, logits_fn, speculation
        )
        if host_pages is None:
            host_pages = config.num_pages
        host_pages = validation.integer("host_pages", host_pages)
        keep_trace = validation.boolean("keep_trace", keep_trace)
        ends = refusals.end_tokens(eos_ids, tokenizer, config)
        self.params, self.config, self.tokenizer = params, config, tokenizer
        self.policy = fcfs.fcfs() if policy is None else policy
        self.trace: list[step.StepInfo] = []
        """Step infos of the calls read so far, as NumPy arrays."""
        self._keep_trace = keep_trace
        self._asked = False  # by the device, to move swapped pages
        self._static = {
            "config": config,
            "forward": forward,
            "logits_fn": logits_fn,
            "speculation": speculation,
        }
        self._eviction = eviction
        self._eos_ids, self._vocab_size = ends, vocab_size
        memory = None if speculation is None else speculation.drafter.init(config)
        state = init(config, pages, memory)
        self._programs, self._state = _programs(params, state, mesh)
        self._host = host_swap.HostSpace(host_pages, self._programs.move)
        self._started = time.perf_counter()
        self._ids = itertools.count()
        self._tracker = RequestTracker(config)
        self._unread: collections.deque[_Call] = collections.deque()
        self._num_steps = 0  # read so far
        # Never held while the device is waited for, nor by a stream that was left.
        self._lock = threading.RLock()
        self._compiled: set[Any] = set()  # kinds of policies
        self._lost: BaseException | None = None

    @classmethod
    def load(
        cls,
        folder: Any,
        *,
        dtype: str = "float32",
        scan_layers: bool = False,
        speculate: str | None = None,
        draft_folder: Any = None,
        draft_layers: int | tuple[int, ...] | None = None,
        heads_folder: Any = None,
        adaptive: bool = False,
        mesh: Mesh | None = None,
        **fields: Any,
    ) -> "Engine":
        """Serves a Hugging Face folder.

        Args:
          folder: with config.json, safetensors and, for text, tokenizer.json.
          dtype: of weights and pages.
          scan_layers: whether to stack the weights and scan over the layers, see
            `transformer.stack_layers`, rather than to unroll them: the same answers,
            compiled sooner where the layers are many, but slower on a CPU, and on a GPU
            the host takes part in every step.
          speculate: one of `speculation.methods.METHODS`, with `max_drafts` tokens
            guessed in a step; the answers are the same, mostly sooner. None guesses
            nothing.
          draft_folder: of the smaller model that "draft-model" guesses by.
          draft_layers: the model's layers that "early-exit" guesses by, such as
            `layer_search.search` finds, or how many of the first; None means half.
          heads_folder: of the heads that "medusa" and "eagle" guess by, trained for
            this model.
          adaptive: whether no more is guessed than pays, see `speculation.Adaptive`;
            the engine is then tuned.
          mesh: devices to divide the model and its pages over, see
            `parallel.make_mesh`; each reads its part of the weights. None means one.
          **fields: of `EngineConfig`; `policy`, `eviction`, `logits_fn`, `keep_trace`
            and `host_pages` go to the engine.

        Raises:
          ValueError: the folder or a field is not usable; the message says why.
        """
        own = ("policy", "eviction", "logits_fn", "keep_trace", "host_pages")
        rest = {name: fields.pop(name) for name in own if name in fields}
        # Flax and tokenizers load only here.
        from jaxkv.serving import loading

        scan_layers = validation.boolean("scan_layers", scan_layers)
        adaptive = validation.boolean("adaptive", adaptive)
        config = loading.bounds(fields, speculate=speculate, adaptive=adaptive)
        model = loading.read(folder, dtype=dtype, mesh=mesh)
        served = loading.serve(
            *(folder, model, config),
            dtype=dtype,
            scan_layers=scan_layers,
            speculate=speculate,
            draft_folder=draft_folder,
            draft_layers=draft_layers,
            heads_folder=heads_folder,
            adaptive=adaptive,
            mesh=mesh,
        )
        engine = cls(
            served.params,
            served.forward,
            served.pages,
            config,
            speculation=served.speculation,
            tokenizer=model.tokenizer,
            eos_ids=model.eos_ids,
            vocab_size=model.config.vocab_size,
            mesh=mesh,
            **rest,
        )
        if adaptive:
            engine.tune()
        return engine

    def tune(self, context: int | None = None) -> None:
        """Measures what drafts cost here, for `Adaptive` speculation to decide by.

        Takes as long as batches of 1, 2, 4, ... sequences of `context` tokens need to
        be read, and a few calls to the device for each.

        Args:
          context: tokens of every sequence; None means half of `max_length`.

        Raises:
          ValueError: requests wait or run, the drafter is not `Adaptive`, or answers
            have no room for the calls.
        """
        config, clock = self.config, from_seconds(0.0)
        if self._tracker.records or self._unread:
            raise ValueError("an engine must be idle to be tuned")
        plan = tuning.plan(self._state, config, context)

        def run(state: EngineState) -> EngineState:
            rules = self._rules() | self._static
            return self._programs.run_steps(self.params, state, clock, **rules)[0]

        programs = tuning.Programs(
            run,
            lambda state, requests: self._programs.submit(
                state, requests, config=config
            )[0],
            lambda state, ids: self._programs.drain(
                *(state, ids, np.full_like(ids, -1), self._eviction)
            )[0],
        )
        self._compile()
        with self._lock, self._all_or_lost():
            self._state = tuning.tune(self._state, programs, config, plan)

    def now(self) -> float:
        """Seconds since the engine was made."""
        return time.perf_counter() - self._started

    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        request_id: int | None = None,
        arrival_s: float | None = None,
    ) -> int:
        """Takes a request; it runs while `stream` or `generate` does.

        Any number of requests may wait on the host: those that the device has no room
        for yet are kept here, never dropped.

        Args:
          prompt: text, or token ids.
          sampling: how to draw; None means the defaults.
          request_id: the caller's name for it, in [0, 2**31), which also keys its draws
            if it brings no seed; None takes the next unused number.
          arrival_s: when it may be admitted, in seconds since the engine was made; None
            means now.

        Returns:
          The request id.

        Raises:
          ValueError: the request cannot be served; the message says why.
        """
        # All is checked before anything is taken, be it the next unused number.
        ask = Sampling() if sampling is None else sampling
        tokens = self._checked(prompt, ask)
        if arrival_s is not None:
            arrival_s = validation.seconds("arrival_s", arrival_s)
        if request_id is not None:
            request_id = refusals.request_name("request_id", request_id)
        else:
            request_id = self._next_id()
        self._add([self._record(request_id, tokens, ask, arrival_s)])
        return request_id

    def take_prefix(self, tokens: Sequence[int], *, salt: int = 0) -> tuple[Any, int]:
        """Copies the cached pages that tokens begin with, for another engine's pool.

        Args:
          tokens: of a prompt, at most `max_length`.
          salt: as in `Sampling`.

        Returns:
          The K and V arrays, those of as many pages, NumPy's; and how many there are.

        Raises:
          ValueError: there is no prefix cache, or there are too many tokens.
        """
        prefix = prefixes.of_tokens(tokens, salt, self.config)
        with self._lock:
            self._refuse_if_lost()
            found, num = self._programs.take_out(self._state, prefix)
        num = int(num)
        return jax.tree.map(lambda x: np.asarray(x)[:, :num], found), num

    def bring_prefix(self, tokens: Sequence[int], pages: Any, *, salt: int = 0) -> int:
        """Puts pages into the prefix cache, as another engine's `take_prefix` gave.

        Both engines serve the same parameters, which nobody checks here.

        Args:
          tokens: those whose K and V the pages hold, and perhaps more.
          pages: the K and V arrays.
          salt: as in `Sampling`.

        Returns:
          How many pages of the prefix are cached now.

        Raises:
          ValueError: there is no prefix cache, or the arrays do not fit this engine's.
        """
        prefix, whole = prefixes.padded(
            prefixes.of_tokens(tokens, salt, self.config),
            *(pages, self._state.pages, self.config),
        )
        with self._lock, interrupts.signals():
            self._refuse_if_lost()
            with self._all_or_lost():
                self._state, cached = self._programs.bring_in(
                    self._state, prefix, whole, self._eviction
                )
        return int(cached)

    def cancel(self, request_id: int) -> None:
        """Ends a request with what it has; names of nobody are ignored.

        Raises:
          ValueError: it is no name, which is a whole number in [0, 2**31).
        """
        name = refusals.request_name("request_id", request_id)
        with self._lock, interrupts.signals():
            self._tracker.cancel(name, self.now())

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
    ) -> list[Completion]:
        """Answers prompts, together with whatever else runs.

        Returns when these are done: other requests may still wait or run, and go on
        with the next call. If it is interrupted, its own requests are withdrawn.

        Args:
          prompts: texts, or lists of token ids.
          sampling: for all of them, or one each.

        Returns:
          The completions, in the order of the prompts.

        Raises:
          ValueError: a request cannot be served; none is then submitted.
        """
        asks, encoded = refusals.one_each(prompts, sampling), []
        for i, (prompt, ask) in enumerate(zip(prompts, asks, strict=True)):
            try:
                encoded.append(self._checked(prompt, ask))
            except ValueError as error:
                raise ValueError(f"prompts[{i}]: {error}") from None
        records = [
            self._record(self._next_id(), *pair, is_quiet=True)
            for pair in zip(encoded, asks, strict=True)
        ]
        try:
            self._add(records)
            while not all(record.completion for record in records):
                self._turn()
            while self._unread and not self._tracker.has_work(self.now()):
                self._turn()  # nobody needs what is under way: leave nothing
        except BaseException:
            self._withdraw(records)
            raise
        return [record.completion for record in records if record.completion]

    def stream(self) -> Iterator[Event]:
        """Runs until no request is left, telling what happens as it does.

        A stream may be left at any event; the next one goes on with the event after.
        """
        tracker = self._tracker
        while tracker.events or tracker.records or self._unread:
            with contextlib.suppress(IndexError):  # another thread was quicker
                # One step of the interpreter takes an event and hands it out: no signal
                # comes between the two.
                while True:
                    yield from map(collections.deque.popleft, [tracker.events])
            self._turn()

    def _next_id(self) -> int:
        return next(name for name in self._ids if name not in self._tracker.records)

    def _record(
        self,
        request_id: int,
        tokens: list[int],
        ask: Sampling,
        arrival_s: float | None = None,
        *,
        is_quiet: bool = False,
    ) -> Record:
        """Makes what the host will keep of a request."""
        return Record(
            request_id=request_id,
            prompt=tokens,
            sampling=ask,
            arrival_s=self.now() if arrival_s is None else arrival_s,
            end_tokens=ask.stop_tokens + (() if ask.ignore_eos else self._eos_ids),
            parts=[
                Part(stream=None if self.tokenizer is None else self.tokenizer.stream())
                for _ in range(ask.num_sequences)
            ],
            is_quiet=is_quiet,
        )

    def _add(self, records: Sequence[Record]) -> None:
        """Takes requests."""
        with self._lock, interrupts.signals():
            self._refuse_if_lost()
            for record in records:
                self._tracker.add(record)

    def _withdraw(self, records: Sequence[Record]) -> None:
        """Cancels those of the requests that were taken and are not complete."""
        with self._lock, interrupts.signals():
            for record in records:
                if self._tracker.records.get(record.request_id) is record:
                    self._tracker.cancel(record.request_id, self.now())

    def _turn(self) -> None:
        """Starts the next steps if there is work, and reads those before."""
        tracker, call = self._tracker, None
        with self._lock:
            self._refuse_if_lost()
            if tracker.withdrawn:
                with interrupts.signals():
                    tracker.tell_withdrawn()
            if tracker.has_work(self.now()) and len(self._unread) < 2:
                self._dispatch()
            # One call is always under way while the one before is read.
            if len(self._unread) > tracker.has_work(self.now()):
                call = self._unread[0]
            wait_s = 0.0 if self._unread else tracker.next_arrival_s() - self.now()
        if call is not None:
            self._read(call)
        elif 0 < wait_s < math.inf:
            time.sleep(min(wait_s, _IDLE_S))

    def _dispatch(self) -> None:
        """Hands over what there is room for, then starts the next steps."""
        self._compile()
        if self._asked:
            # Rare, so it is done with nothing under way, where all is known.
            while self._unread:
                self._read(self._unread[0])
            self._host.compile(self._state)
            with interrupts.signals(), self._all_or_lost():
                self._state, self._asked = self._host.exchange(self._state), False
        tracker, config = self._tracker, self.config
        with interrupts.signals():
            batch = tracker.next_batch(self.now())
            requests = self._requests(batch) if batch else None
            with self._all_or_lost():
                if requests is not None:
                    self._state, _ = self._programs.submit(
                        self._state, requests, config=config
                    )
                    tracker.hand_over(batch)
                clock = from_seconds(self.now())
                self._state, info = self._programs.run_steps(
                    self.params, self._state, clock, **self._rules(), **self._static
                )
                self._unread.append(call := _Call(info=info))
                if self._keep_trace:
                    call.num_pending = tracker.num_pending(self.now())
                if (named := tracker.next_cancels()) is not None:
                    names, samples = named[:, 0], named[:, 1]
                    args = (self._state, names, samples, self._eviction)
                    self._state, call.drained = self._programs.drain(*args)

    def _rules(self) -> dict[str, Any]:
        """What the steps decide by."""
        return {"policy": self.policy, "eviction": self._eviction}

    def _compile(self) -> None:
        """Makes the programs, all before one of them consumes the state.

        So whatever ends this, Ctrl-C or a model that cannot be traced, costs nothing.
        """
        kind = jax.tree.structure(self.policy)
        if kind in self._compiled:
            return
        state, config, clock = self._state, self.config, from_seconds(0.0)
        blank = self._record(0, [0], Sampling.greedy())
        names = np.full(config.max_sequences, -1, np.int32)
        programs = (
            self._programs.submit.lower(state, self._requests([blank]), config=config),
            self._programs.run_steps.lower(
                self.params, state, clock, **self._rules(), **self._static
            ),
            self._programs.drain.lower(state, names, names, self._eviction),
        )
        for program in programs:
            program.compile()
        self._compiled.add(kind)

    def _requests(self, batch: list[Record]) -> Requests:
        """Lines up what is to be handed over."""
        return outputs.make_requests(
            [record.prompt for record in batch],
            [record.sampling for record in batch],
            config=self.config,
            request_ids=[record.request_id for record in batch],
            arrivals_s=[record.arrival_s for record in batch],
            eos_ids=self._eos_ids,
            width=max(self.config.submit_width, self.config.max_slots),
        )

    def _read(self, call: _Call) -> None:
        """Notes what a call emitted, then which requests are complete."""
        try:  # here the host waits; Ctrl-C ends it with nothing noted
            info = jax.tree.map(np.asarray, call.info)
            if call.drained is not None:
                call.drained.status.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            self._lost = error
            raise
        with self._lock, interrupts.signals(), self._all_or_lost():
            if not self._unread or self._unread[0] is not call:
                return  # another thread was quicker
            if info.violations is not None:
                invariants.refuse(info.violations, first_step=self._num_steps)
            self._num_steps += len(info.enough)
            self._asked |= bool(info.asks_host[-1])
            if self._keep_trace:
                waiting = info.num_waiting + call.num_pending
                self.trace.append(info._replace(num_waiting=waiting))
            self._tracker.read(info, self.now())
            if call.drained is not None:
                self._tracker.collect(call.drained, self.now())
            self._unread.popleft()

    @contextlib.contextmanager
    def _all_or_lost(self) -> Generator[None]:
        """Notes that the engine cannot go on if what it holds fails half-way."""
        try:
            yield
        except BaseException as error:
            self._lost = error
            raise

    def _refuse_if_lost(self) -> None:
        if self._lost is not None:
            kind, said = type(self._lost).__name__, str(self._lost).partition("\n")[0]
            raise RuntimeError(
                f"this engine is lost, make a new one; {kind}: {said}"
            ) from self._lost

    def _checked(self, prompt: object, ask: object) -> list[int]:
        """The tokens of a prompt, after all of the request was checked."""
        tokens = prompt
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("there is no tokenizer; give token ids, not text")
            tokens = self.tokenizer.encode(prompt)
        ignores = isinstance(ask, Sampling) and ask.ignore_eos
        return refusals.check(
            *(tokens, ask),
            config=self.config,
            num_eos=0 if ignores else len(self._eos_ids),
            vocab_size=self._vocab_size,
            has_text=self.tokenizer is not None,
            has_logits_fn=self._static["logits_fn"] is not None,
        )


def _programs(
    params: Any, state: EngineState, mesh: Mesh | None
) -> tuple[programs.Programs, EngineState]:
    """The programs, and the state where they take it.

    Raises:
      ValueError: parameters are not on the mesh, or it does not divide pages.
    """
    if mesh is None:
        return programs.LOCAL, state
    specs = layout.specs_on(params, mesh)
    state = layout.place_state(state, mesh)
    divided = programs.divided(mesh, specs, layout.state_specs(state))
    return programs.on_mesh(divided), state
