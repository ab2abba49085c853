"""The loop of an engine: dispatches steps to the device and reads their results later.

Each call of `StepLoop.step` submits waiting requests, dispatches the next steps, and
only then reads the outputs of the previous ones, so the device never waits for Python.
The loop does not read the state; its tracker counts all that it needs.
"""

import collections
import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxkv import scheduling
from jaxkv.clock import from_seconds
from jaxkv.engine import (
    ALL_KINDS,
    DrainedSequences,
    EngineParts,
    EngineRules,
    EngineState,
    RequestKinds,
    Requests,
    StepInfo,
)
from jaxkv.memory import (
    raise_if_violated,
    to_host,
)
from jaxkv.sampling import Grammar, load_grammar, make_grammar_tables
from jaxkv.scheduling import MAX_STALLED_STEPS, Policy, StepCounter
from jaxkv.serving import (
    compiling,
    host_swap,
    interrupts,
    outputs,
    refusals,
    request_batch,
)
from jaxkv.serving.request_tracker import RequestTracker
from jaxkv.serving.requests import RequestRecord

_IDLE_POLL_S = 0.01
"""Longest sleep in s: another thread may submit a request."""


@dataclasses.dataclass(kw_only=True, eq=False)
class DispatchedCall:
    """A dispatched call whose results have not been read."""

    info: StepInfo
    policy: Policy
    num_submitted: int
    """Sequences that were submitted just before the call."""
    now_s: float = 0.0
    """Clock of the call, in seconds since the engine was made."""
    may_draft: bool = True
    """False if the steps ran without drafts."""
    batch: Sequence[RequestRecord] = ()
    """Requests that were submitted just before the call."""
    cancels: tuple[np.ndarray, np.ndarray] | None = None
    """Ids and samples that were cancelled just after the call."""
    drained: DrainedSequences | None = None
    table: Any = None
    """Copies of the slots' page ids, lengths and sequences after the last step."""
    num_pending: int = 0
    """Requests that waited on the host during the call, if a trace is kept."""


class StepLoop:
    """The part of an engine that owns its state and runs requests on the device."""

    def __init__(
        self,
        parts: EngineParts,
        rules: EngineRules,
        *,
        host_pages: int = 0,
        keep_trace: bool = False,
    ):
        """Makes an idle core; compiles no program. Arguments are those of `Engine`.

        Raises:
          ValueError: the pages do not fit the configuration, or the mesh.
        """
        config = parts.config
        self.params = parts.params
        """The model's parameters, as `forward` takes them."""
        self.config = config
        """The bounds."""
        self.tokenizer = parts.tokenizer
        """The tokenizer; None without text."""
        self.eos_ids = tuple(parts.eos_ids or ())
        """Tokens that end an answer."""
        self.adapters = tuple(parts.adapters)
        """Names of the adapters, in the order of their numbers from 1 on."""
        self.rules = rules
        """The rules of the next steps."""
        self.trace = outputs.Trace()
        """Step infos of the calls read so far, as NumPy arrays, if they are kept."""
        self._vocab_size = parts.vocab_size
        self._table: DispatchedCall | None = None  # of the last call that was read
        speculation = rules.speculation
        memory = None if speculation is None else speculation.drafter.init(config)
        state = compiling.make_state(config, parts.pages, memory)
        programs, self.state = compiling.select_programs(
            parts.params, state, parts.mesh
        )
        self._empty_cache = None
        if config.prefix_cache:  # on the host, since the state is consumed
            self._empty_cache = to_host((self.state.pool, self.state.prefixes))
        static = {"config": config, "forward": parts.forward}
        self._programs = compiling.EnginePrograms(programs, config, static)
        self._mesh = parts.mesh
        self._host = host_swap.HostSpace(host_pages, programs.move)
        self._grammars: list[Grammar | None] = [None] * config.max_grammars
        if config.max_grammars:
            assert parts.vocab_size is not None  # see `refusals.check_parts`
            tables = make_grammar_tables(
                config.max_grammars, parts.vocab_size, config.max_grammar_cells
            )
            self.rules = dataclasses.replace(rules, grammars=tables)
        self.tracker = RequestTracker(config)
        self.unread: collections.deque[DispatchedCall] = collections.deque()
        """Dispatched calls that were not read yet; at most two."""
        self.on_dispatch: Callable[[DispatchedCall], object] | None = None
        """Called with every dispatched call, for example to measure times."""
        self._idle = StepCounter()
        self._may_submit = True  # False while submitted requests are finished
        self._needs_host_swap = False  # the device asks the host to move pages
        self._skips_drafts = False  # as of the last call read
        self._num_steps = 0  # read so far
        self._keep_trace = keep_trace or config.record_pages
        self._started = time.perf_counter()
        # Not held while waiting for the device, nor by an abandoned stream.
        self._lock = threading.RLock()
        self._lost: BaseException | None = None

    def now(self) -> float:
        """Seconds since the engine was made."""
        return time.perf_counter() - self._started

    @property
    def policy(self) -> Policy:
        """Scheduling policy; may be replaced at any time."""
        return self.rules.policy

    @policy.setter
    def policy(self, policy: Policy | None) -> None:
        """Sets the policy of the next steps; None means `fcfs()`.

        Raises:
          ValueError: it is not a policy.
        """
        policy = scheduling.fcfs() if policy is None else policy
        scheduling.check_policy(policy)
        self.rules = dataclasses.replace(self.rules, policy=policy)

    def _has_work(self) -> bool:
        """True if the device must run."""
        return self.tracker.has_work(self.now())

    def _add(self, records: Sequence[RequestRecord]) -> None:
        """Adds requests.

        Raises:
          ValueError: a request id is that of a request that still runs.
        """
        with self._lock, interrupts.defer_signals():
            self._refuse_if_lost()
            for record in records:
                self.tracker.add(record)

    def cancel(self, request_id: int) -> None:
        """Ends a request with its tokens so far; unknown ids are ignored.

        Raises:
          ValueError: `request_id` is not an integer in [0, 2**31).
        """
        request_id = refusals.check_request_id("request_id", request_id)
        with self._lock, interrupts.defer_signals():
            self.tracker.cancel(request_id, self.now())

    def _withdraw(self, records: Sequence[RequestRecord]) -> None:
        """Cancels those of the given requests that were added and are not complete."""
        with self._lock, interrupts.defer_signals():
            for record in records:
                if self.tracker.records.get(record.request_id) is record:
                    self.tracker.cancel(record.request_id, self.now())

    def step(self) -> None:
        """Dispatches the next steps if there is work, and reads the previous ones."""
        tracker = self.tracker
        call = None
        with self._lock:
            self._refuse_if_lost()
            if tracker.withdrawn:
                with interrupts.defer_signals():
                    tracker.close_withdrawn()
            if self._has_work() and len(self.unread) < 2:
                self.dispatch()
            # The next call runs while the previous one is read.
            if len(self.unread) > self._has_work():
                call = self.unread[0]
            wait_s = 0.0 if self.unread else tracker.next_arrival_s() - self.now()
        if call is not None:
            self.read(call)
        elif 0 < wait_s < math.inf:
            time.sleep(min(wait_s, _IDLE_POLL_S))

    def has_pending(self) -> bool:
        """True if there are open requests, undelivered events or unread calls."""
        return bool(self.tracker.events or self.tracker.records or self.unread)

    def _flush(self) -> None:
        """Reads the calls that run although no request needs them."""
        while self.unread and not self._has_work():
            self.step()

    def run_steps(
        self, state: EngineState, now: float = 0.0, *, may_draft: bool = True
    ) -> tuple[EngineState, StepInfo]:
        """Runs the steps of a call on a state, which is consumed."""
        self._compile_steps(ALL_KINDS)
        return self._programs.run_steps(
            self.params, state, now, self.rules, ALL_KINDS, may_draft
        )

    def lower(self, *, may_draft: bool = True) -> Any:
        """Returns the traced program of the steps."""
        arguments = {**self.static, **vars(self.rules), "may_draft": may_draft}
        return self._programs.jitted.run_steps.lower(
            self.params, self.state, from_seconds(0.0), **arguments
        )

    def compile(self, kinds: RequestKinds = ALL_KINDS) -> None:
        """Compiles all programs, for requests of all kinds or of some.

        Without it, each program is compiled before its first use, and requests get the
        smallest program that serves all requests which are not complete.
        """
        self._compile_steps(kinds)
        self._compile_drain(cancels=True)

    def _compile_steps(self, kinds: RequestKinds) -> None:
        """Compiles the steps and `submit` before one of them consumes the state.

        An interrupt, or a model that cannot be traced, then leaves the state intact.
        """
        self._programs.compile("submit", self.state, self._pack_requests([]))
        self._programs.compile_steps(self.params, self.state, self.rules, kinds)

    def _compile_drain(self, *, cancels: bool) -> None:
        if cancels:
            names = np.full(self.config.max_sequences, -1, np.int32)
            eviction = self.rules.eviction
            self._programs.compile(
                "cancel", self.state, names, names, eviction=eviction
            )
        self._programs.compile("drain", self.state)

    @property
    def static(self) -> Mapping[str, Any]:
        """Static arguments of the compiled steps, besides the rules."""
        return self._programs.static

    @static.setter
    def static(self, static: Mapping[str, Any]) -> None:
        """Replaces the arguments, for example the forward pass to be timed."""
        self._programs.static = static

    @property
    def compile_s(self) -> float:
        """Seconds of compilation so far, including tracing."""
        return self._programs.compile_s

    def _kinds_to_run(self) -> RequestKinds:
        """Returns the kinds of the next steps, preferring compiled programs."""
        needed = self.tracker.request_kinds()
        if self._programs.has_steps(self.rules, needed):
            return needed
        if self._programs.has_steps(self.rules, ALL_KINDS):
            return ALL_KINDS
        return needed

    def dispatch(self) -> None:
        """Submits the requests that fit, then dispatches the next steps."""
        kinds = self._kinds_to_run()
        self._compile_steps(kinds)
        if self._needs_host_swap:
            # Rare, so all dispatched calls are read first.
            while self.unread:
                self.read(self.unread[0])
            self._host.compile(self.state)
            with interrupts.defer_signals(), self._lost_on_error():
                self.state = self._host.exchange(self.state)
                self._needs_host_swap = False
        tracker = self.tracker
        if tracker.has_cancels() or tracker.needs_drain():
            self._compile_drain(cancels=tracker.has_cancels())
        with interrupts.defer_signals():
            now_s = self.now()
            batch = tracker.next_batch(now_s) if self._may_submit else []
            batch = self._load_grammars(batch)
            requests = self._pack_requests(batch) if batch else None
            with self._lost_on_error():
                if requests is not None:
                    self.state, _ = self._programs["submit"](self.state, requests)
                    tracker.mark_submitted(batch)
                may_draft = not self._skips_drafts
                self.state, info = self._programs.run_steps(
                    self.params, self.state, now_s, self.rules, kinds, may_draft
                )
                call = DispatchedCall(
                    info=info,
                    policy=self.policy,
                    num_submitted=sum(len(record.answers) for record in batch),
                    now_s=now_s,
                    may_draft=may_draft,
                    batch=batch,
                )
                self.unread.append(call)
                # For `page_table`, before the next call consumes the state.
                table = self.state.table
                table = table.page_ids, table.length, self.state.slots.sequence
                if all(x.is_fully_addressable for x in table):
                    # Neither compiles a program nor waits for the device.
                    call.table = jax.device_put(table, may_alias=False)
                if self._keep_trace:
                    call.num_pending = tracker.num_pending(self.now())
                if tracker.has_cancels():
                    call.cancels = names, samples = tracker.next_cancels()
                    self.state = self._programs["cancel"](
                        self.state, names, samples, eviction=self.rules.eviction
                    )
                if tracker.needs_drain():
                    tracker.mark_drained()
                    self.state, call.drained = self._programs["drain"](self.state)
        if self.on_dispatch is not None:
            self.on_dispatch(call)

    def _load_grammars(self, batch: list[RequestRecord]) -> list[RequestRecord]:
        """Loads the grammars of requests; returns those whose grammars have room.

        Grammars of requests on the device stay.
        """
        grammars = [record.sampling.grammar for record in batch]
        if not any(grammars):
            return batch
        in_use = self.tracker.submitted_grammars() - {None}
        for num, grammar in enumerate(grammars):
            if grammar is not None and grammar not in self._grammars:
                free = [i for i, x in enumerate(self._grammars) if x not in in_use]
                if not free:
                    return batch[:num]
                # Empty places first.
                index = min(free, key=lambda i: self._grammars[i] is not None)
                tables = self.rules.grammars
                assert tables is not None
                tables = load_grammar(tables, index, grammar, end_tokens=self.eos_ids)
                self.rules = dataclasses.replace(self.rules, grammars=tables)
                self._grammars[index] = grammar
            if grammar is not None:
                in_use.add(grammar)
        return batch

    def _pack_requests(self, batch: list[RequestRecord]) -> Requests:
        """Makes the arrays of a batch of requests."""
        requests = request_batch.make_requests(
            [record.prompt for record in batch],
            [record.sampling for record in batch],
            config=self.config,
            request_ids=[record.request_id for record in batch],
            key_ids=[
                record.request_id if record.key_id is None else record.key_id
                for record in batch
            ],
            arrivals_s=[record.arrival_s for record in batch],
            attributes=[record.attributes for record in batch],
            eos_ids=self.eos_ids,
            width=max(self.config.submit_width, self.config.max_slots),
            adapters=self.adapters,
        )
        row = 0
        for record in batch:
            end = row + len(record.answers)
            if (grammar := record.sampling.grammar) is not None:
                index = self._grammars.index(grammar)
                assert requests.grammar_state is not None
                first = index * self.config.max_grammar_cells
                np.asarray(requests.grammar_state)[row:end] = first
            row = end
        return requests

    def read(self, call: DispatchedCall) -> None:
        """Processes the outputs of a call, and completes requests.

        Raises:
          StallError: the policy makes no progress; the engine can continue with another
            policy, or without the request.
        """
        try:  # the host waits here; Ctrl-C leaves all records unchanged
            info = jax.tree.map(np.asarray, call.info)
            if call.drained is not None:
                call.drained.is_final.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            self._lost = error
            raise
        with self._lock, interrupts.defer_signals(), self._lost_on_error():
            if not self.unread or self.unread[0] is not call:
                return  # another thread has read it
            if info.violations is not None:
                raise_if_violated(info.violations, first_step=self._num_steps)
            self._num_steps += len(info.enough)
            self._needs_host_swap |= bool(info.asks_host[-1])
            self._skips_drafts = info.is_disabled is not None and bool(
                info.is_disabled[-1]
            )
            if self._keep_trace:
                waiting = info.num_waiting + call.num_pending
                requests = (record.to_prompt() for record in call.batch)
                trace_call = outputs.TraceCall(call.now_s, self.now(), tuple(requests))
                self.trace.add(info._replace(num_waiting=waiting), trace_call)
            self.tracker.read(info, self.now())
            if call.drained is not None:
                self.tracker.collect(call.drained, self.now())
            self.unread.popleft()
            self._table = call
        with self._lock:
            self._refuse_stall(call, info)

    def _refuse_stall(self, call: DispatchedCall, info: Any) -> None:
        """Raises a `StallError` after too many steps without progress."""
        idle = self._idle
        now = self.now()
        draws = (info.num_emitted > 0).any(axis=1) | (info.reason > 0).any(axis=1)
        if draws[-1]:
            idle.reset()
            return
        is_changed = call.policy is not self.policy or any(
            other_call.drained is not None for other_call in (call, *self.unread)
        )
        # By the host's count, so that sequences lost on the device are a stall too.
        is_busy = self.tracker.num_unfinished > sum(
            x.num_submitted for x in self.unread
        )
        # A policy may wait for requests with a later arrival time.
        waits = now < self.tracker.next_arrival_s() < math.inf
        if is_changed or waits or not is_busy:
            idle.reset()
            return
        # A call that ends with a request for host swap counts as one step.
        last = slice(-1, None) if info.asks_host[-1] else slice(None)
        num_rows = info.num_rows.sum(axis=1)
        idle.count(draws[last], num_rows[last], num_tokens=self.tracker.num_tokens)
        record = self.tracker.oldest(now)
        if idle.num_steps < MAX_STALLED_STEPS or record is None:
            return
        idle.reset()
        name = record.request_id
        request = f"request_id={name}, {len(record.prompt)} prompt tokens,"
        has_pages = bool(info.enough[-1])
        raise scheduling.stall_error(
            call.policy,
            request,
            has_pages=has_pages,
            preempts=bool(info.num_preempted.any()),
            request_id=name,
        )

    @contextlib.contextmanager
    def _lost_on_error(self) -> Generator[None]:
        """Marks the engine as lost if the block fails half-way."""
        try:
            yield
        except BaseException as error:
            self._lost = error
            raise

    def _refuse_if_lost(self) -> None:
        if self._lost is not None:
            kind = type(self._lost).__name__
            line = str(self._lost).partition("\n")[0]
            raise RuntimeError(
                f"this engine is lost, make a new one; {kind}: {line}"
            ) from self._lost
