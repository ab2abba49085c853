"""The engine's core: dispatches steps to the device and reads their results later.

`EngineCore` has the state and its compiled programs; `Engine` adds prompts and text.
Each call of `step` submits waiting requests, dispatches the next steps, and only then
reads the outputs of the previous ones, so the device never waits for Python. The core
does not read the state; its tracker counts all that it needs.
"""

import collections
import contextlib
import copy
import dataclasses
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Array, PyTree

from jaxkv import scheduling, validation
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
    load_state,
    save_state,
)
from jaxkv.memory import (
    NO_PAGE,
    PageTableView,
    SlotPages,
    raise_if_violated,
    to_host,
)
from jaxkv.parallel import place_state
from jaxkv.scheduling import MAX_STALLED_STEPS, Policy, StepCounter
from jaxkv.serving import (
    compiling,
    host_swap,
    interrupts,
    outputs,
    refusals,
    request_batch,
    tuning,
    weights,
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
    drained: DrainedSequences | None = None
    table: Any = None
    """Copies of the slots' page ids, lengths and sequences after the last step."""
    num_pending: int = 0
    """Requests that waited on the host during the call, if a trace is kept."""


class EngineCore:
    """The part of an `Engine` that owns its state and runs requests on the device."""

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
        self._keep_trace = keep_trace
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

    @validation.suggests_keywords
    def take_prefix(
        self, tokens: Sequence[int], *, salt: int = 0
    ) -> tuple[PyTree[np.ndarray], int]:
        """Copies the cached pages of a token prefix, for another engine's pool.

        Args:
          tokens: token ids of a prompt, at most `max_length`.
          salt: as in `Sampling`.

        Returns:
          NumPy arrays of K and V of the cached pages, and the number of pages.

        Raises:
          ValueError: there is no prefix cache, there are too many tokens, a token is
            not in the vocabulary, or the salt is out of range.
        """
        prefix = request_batch.prefix_of(tokens, salt, self.config, self._vocab_size)
        with self._lock:
            self._refuse_if_lost()
            pages, num = self._programs.jitted.take_out(self.state, prefix)
        num = int(num)
        return to_host(pages, slice(num)), num

    @validation.suggests_keywords
    def bring_prefix(
        self, tokens: Sequence[int], pages: PyTree[Array | np.ndarray], *, salt: int = 0
    ) -> int:
        """Writes the pages of another engine's `take_prefix` to the prefix cache.

        Both engines must serve the same parameters; this is not checked.

        Args:
          tokens: token ids whose K and V the pages contain, perhaps followed by more.
          pages: the K and V arrays.
          salt: as in `Sampling`.

        Returns:
          Number of pages of the prefix that are cached now.

        Raises:
          ValueError: there is no prefix cache, the arrays do not fit this engine's, a
            token is not in the vocabulary, or the salt is out of range.
        """
        prefix = request_batch.prefix_of(tokens, salt, self.config, self._vocab_size)
        prefix, slot_pages = request_batch.pad_pages(
            prefix, pages, self.state.pages, self.config
        )
        with self._lock, interrupts.defer_signals():
            self._refuse_if_lost()
            with self._lost_on_error():
                self.state, cached = self._programs.jitted.bring_in(
                    self.state, prefix, slot_pages, self.rules.eviction
                )
        return int(cached)

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Writes the state of an idle engine: pages, prefix cache, drafter state.

        Args:
          folder: target folder, as `restore` reads it.
          overwrite: True to replace an existing snapshot.

        Raises:
          ValueError: requests are not complete, or as `save_state`.
        """
        overwrite = validation.boolean("overwrite", overwrite)
        with self._lock:
            self._refuse_if_lost()
            self._refuse_if_busy("saved")
            return save_state(folder, self.state, self.config, overwrite=overwrite)

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Replaces the state of an idle engine by a saved one, any number of times.

        The engine must serve the same parameters with the same bounds as the saved one.
        It then gives the same answers, bit for bit, to requests with the same ids or
        seeds.

        Raises:
          ValueError: requests are not complete, or as `load_state`.
        """
        with self._lock:
            self._refuse_if_lost()
            self._refuse_if_busy("restored")
            old = self.state
            new = load_state(folder, self.config, old.pages, old.memory)
            if self._mesh is not None:
                new = place_state(new, self._mesh)
            self.state = new
            self._table = None
            self._skips_drafts = False

    @validation.suggests_keywords
    def set_params(
        self,
        params: PyTree[Array | np.ndarray],
        *,
        in_flight: Literal["finish", "recompute", "refuse"] = "finish",
    ) -> None:
        """Replaces the model's parameters, for example after a step of training.

        The steps are not compiled again. K and V of the old parameters are not used
        any more: the prefix cache is emptied. Drafts are proposed with the new
        parameters wherever they are proposed with the model's; a draft model, and the
        heads of "medusa" and "eagle", keep theirs.

        Args:
          params: parameters as `models.load_model` and `init_params` return them, or in
            the form of `params`, with equal shapes, types and shardings. They are not
            copied, so they must not be donated or deleted while the engine uses them.
          in_flight: treatment of the requests that were submitted to the device.
            "finish" first completes them with the old parameters, while later requests
            wait; "recompute" preempts them, and they continue from their tokens so far
            with K and V of the new parameters; "refuse" raises an error if a request is
            not complete.

        Raises:
          ValueError: the parameters differ from the engine's in a shape, a type or a
            sharding, or `in_flight` is "refuse" and requests are not complete.
        """
        choices = ("finish", "recompute", "refuse")
        validation.choice("in_flight", in_flight, choices)
        with self._lock:
            self._refuse_if_lost()
            forward = self.static["forward"]
            new = weights.convert_params(self.params, params, forward, self._mesh)
            if in_flight == "refuse":
                self._refuse_if_busy("given other parameters")
            elif in_flight == "finish":
                self._may_submit = False
                try:
                    while self.tracker.has_submitted():
                        self.step()
                finally:
                    self._may_submit = True
            while self.unread:
                self.read(self.unread[0])
            is_idle = not self.tracker.has_submitted()
            options = {"eviction": self.rules.eviction}
            if not is_idle:
                self._programs.compile("forget_kv", self.state, **options)
            with interrupts.defer_signals(), self._lost_on_error():
                if not is_idle:
                    self.state = self._programs["forget_kv"](self.state, **options)
                elif self._empty_cache is not None:
                    old = self.state.pool, self.state.prefixes
                    places = jax.tree.map(lambda x: x.sharding, old)
                    pool, prefixes = jax.device_put(
                        self._empty_cache, places, may_alias=False
                    )
                    self.state = self.state._replace(pool=pool, prefixes=prefixes)
                self.params = new

    def fork[E: "EngineCore"](self: E, *, policy: Policy | None = None) -> E:
        """Copies the engine with all requests, which continue in both copies.

        Parameters and compiled programs are shared; the pages are copied.

        Args:
          policy: policy of the copy; None keeps this engine's.

        Raises:
          ValueError: `policy` is not a policy.
        """
        # A bound method of the tokenizer is part of every decoder of text.
        memo = {} if self.tokenizer is None else {id(self.tokenizer): self.tokenizer}
        with self._lock:
            self._refuse_if_lost()
            while self.unread:
                self.read(self.unread[0])
            other = copy.copy(self)
            with interrupts.defer_signals():
                other.state = jax.device_put(self.state, may_alias=False)
                other.tracker = copy.deepcopy(self.tracker, memo)
            other.trace = outputs.Trace(self.trace)
            other.unread = collections.deque()
            other._lock = threading.RLock()
            other._programs = self._programs.copy()
            other.on_dispatch = None
            other._host = self._host.copy()
        if policy is not None:
            other.policy = policy
        return other

    def _refuse_if_busy(self, use: str) -> None:
        if self.tracker.records or self.unread:
            num = len(self.tracker.records)
            raise ValueError(
                f"{num} requests are not complete; an engine must be idle to be {use}"
            )

    def tune(self, context: int | None = None) -> None:
        """Measures step costs with drafts on this machine, for `Adaptive` speculation.

        Takes the time to prefill batches of 1, 2, 4, ... sequences of `context` tokens,
        and a few device calls for each.

        Args:
          context: tokens of every sequence; None means half of `max_length`.

        Raises:
          ValueError: requests wait or run, the drafter is not `Adaptive`, or sequences
            have no room for the calls.
        """
        if self.tracker.records or self.unread:
            raise ValueError("an engine must be idle to be tuned")
        plan = tuning.plan_measurement(self.state, self.config, context)

        def submit(state: EngineState, requests: Requests) -> EngineState:
            return self._programs["submit"](state, requests)[0]

        def withdraw(state: EngineState, ids: np.ndarray) -> EngineState:
            all_samples = np.full_like(ids, -1)
            cancelled = self._programs["cancel"](
                state, ids, all_samples, eviction=self.rules.eviction
            )
            return self._programs["drain"](cancelled)[0]

        def run(state: EngineState, may_draft: bool) -> EngineState:
            return self.run_steps(state, may_draft=may_draft)[0]

        self.compile()
        with self._lock, self._lost_on_error():
            measured = tuning.TuningPrograms(run, submit, withdraw)
            self.state = tuning.tune(self.state, measured, self.config, plan)
            self._skips_drafts = False

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
            batch = tracker.next_batch(self.now()) if self._may_submit else []
            requests = self._pack_requests(batch) if batch else None
            with self._lost_on_error():
                if requests is not None:
                    self.state, _ = self._programs["submit"](self.state, requests)
                    tracker.mark_submitted(batch)
                self.state, info = self._programs.run_steps(
                    self.params,
                    self.state,
                    self.now(),
                    self.rules,
                    kinds,
                    not self._skips_drafts,
                )
                call = DispatchedCall(
                    info=info,
                    policy=self.policy,
                    num_submitted=sum(len(record.answers) for record in batch),
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
                    names, samples = tracker.next_cancels()
                    self.state = self._programs["cancel"](
                        self.state, names, samples, eviction=self.rules.eviction
                    )
                if tracker.needs_drain():
                    tracker.mark_drained()
                    self.state, call.drained = self._programs["drain"](self.state)
        if self.on_dispatch is not None:
            self.on_dispatch(call)

    def _pack_requests(self, batch: list[RequestRecord]) -> Requests:
        """Makes the arrays of a batch of requests."""
        return request_batch.make_requests(
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
        )

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
                self.trace.append(info._replace(num_waiting=waiting))
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

    def page_table(self) -> PageTableView:
        """Returns the page table as of the last call whose events were delivered.

        The device may be two calls ahead: the view shows it when those calls are read,
        so that in a `stream` tables and events belong together. It prints as text, and
        as a table in notebooks.
        """
        slots = []
        call = self._table
        if call is not None and call.table is None:
            raise ValueError("a page table needs all devices to be of this process")
        if call is not None:
            page_ids, lengths, sequences = map(np.asarray, call.table)
            names, samples = (
                np.asarray(x)[-1] for x in (call.info.request_id, call.info.sample)
            )
            for slot in np.flatnonzero(sequences >= 0).tolist():
                pages = page_ids[slot][page_ids[slot] != NO_PAGE]
                slots.append(
                    SlotPages(
                        slot,
                        int(names[slot]),
                        int(samples[slot]),
                        int(lengths[slot]),
                        tuple(pages.tolist()),
                    )
                )
        config = self.config
        return PageTableView(tuple(slots), config.page_size, config.num_pages)

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
