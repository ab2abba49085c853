"""Operations on the whole state of an engine, between its calls.

`EngineCore` saves, restores, forks and tunes an engine, moves prefixes, and replaces
its parameters. `StepLoop` runs it; `Engine` adds prompts and text.
"""

import collections
import copy
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from jaxtyping import Array, PyTree

from jaxkv import validation
from jaxkv.engine import (
    EngineState,
    Requests,
    load_state,
    save_state,
)
from jaxkv.memory import (
    NO_PAGE,
    PageTableView,
    SlotPages,
    to_host,
)
from jaxkv.parallel import place_state
from jaxkv.scheduling import Policy
from jaxkv.serving import (
    interrupts,
    outputs,
    refusals,
    request_batch,
    tuning,
    weights,
)
from jaxkv.serving.step_loop import StepLoop


class EngineCore(StepLoop):
    """A `StepLoop` whose state can be saved, copied and changed as a whole."""

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
          ValueError: there is no prefix cache, the model has recurrent layers, there
            are too many tokens, a token is not in the vocabulary, or the salt is out of
            range.
        """
        refusals.check_prefixes_move(self.state)
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
          ValueError: there is no prefix cache, the model has recurrent layers, the
            arrays do not fit this engine's, a token is not in the vocabulary, or the
            salt is out of range.
        """
        refusals.check_prefixes_move(self.state)
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
            other._grammars = [*self._grammars]
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
