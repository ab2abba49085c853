"""The facade: texts in, answers out, over the engine's core."""

import collections
import contextlib
import copy
import dataclasses
import inspect
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxkv import validation
from jaxkv.engine import EngineConfig, step
from jaxkv.engine.drafting import Speculation
from jaxkv.memory import Eviction, Pages, PageTableView
from jaxkv.models import interface as models_interface
from jaxkv.parallel import layout
from jaxkv.sampling import Sampling
from jaxkv.scheduling import attributes as request_attributes
from jaxkv.scheduling import fcfs
from jaxkv.scheduling import interface as scheduling_interface
from jaxkv.scheduling.attributes import RequestAttributes
from jaxkv.serving import compilation_cache, outputs, refusals, request_batch
from jaxkv.serving.core import EngineCore
from jaxkv.serving.outputs import Completion, Event
from jaxkv.serving.requests import Part, Record
from jaxkv.speculation import methods


class Engine:
    """Serves a model. `EngineCore` says how.

    Ctrl-C, or whatever else the handler of a signal raises, leaves it as it was between
    two calls to the device: what was submitted goes on with the next `stream` or
    `generate`, and what an interrupted `generate` had asked is withdrawn.

    Threads may share it. Whoever waits for something runs the device for all, one call
    at a time; in `stream` of several threads each event goes to one of them.

    Where something fails inside such a call, on the device say, or an invariant in
    debug mode, the engine is lost: every later use says so in a `RuntimeError`.
    """

    @validation.suggests_keywords
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
          tokenizer: a `text.Tokenizer` or `text.ByteTokenizer`, or an object with
            their `encode`, `stream`, `stop_search` and `eos_ids`; needed for text.
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
            config,
            pages,
            forward,
            policy=policy,
            eviction=eviction,
            logits_fn=logits_fn,
            speculation=speculation,
            tokenizer=tokenizer,
            mesh=mesh,
        )
        if vocab_size is not None:
            vocab_size = validation.integer("vocab_size", vocab_size, low=1)
        if host_pages is None:
            host_pages = config.num_pages
        self.tokenizer = tokenizer
        self._eos_ids = refusals.end_tokens(eos_ids, tokenizer, config, vocab_size)
        self._vocab_size, self._changes_logits = vocab_size, logits_fn is not None
        self._ids = itertools.count()
        self.core = EngineCore(
            params,
            forward,
            pages,
            config,
            policy=fcfs.fcfs() if policy is None else policy,
            eviction=eviction,
            logits_fn=logits_fn,
            speculation=speculation,
            eos_ids=self._eos_ids,
            host_pages=validation.integer("host_pages", host_pages),
            keep_trace=validation.boolean("keep_trace", keep_trace),
            mesh=mesh,
        )
        """What runs on the device, for those who measure it."""

    @classmethod
    def load(
        cls,
        folder: Any,
        *,
        loaded: Any = None,
        dtype: str = "float32",
        scan_layers: bool = False,
        speculate: methods.Method | methods.SpeculationConfig | None = None,
        mesh: Mesh | None = None,
        policy: scheduling_interface.Policy | None = None,
        eviction: Eviction | None = None,
        logits_fn: step.LogitsFn | None = None,
        keep_trace: bool = False,
        host_pages: int | None = None,
        **bounds: Any,
    ) -> "Engine":
        """Serves a Hugging Face folder, or a bundled model.

        Compiled programs are kept in the user's cache folder for the next process,
        unless JAX's persistent compilation cache is configured already;
        `JAX_ENABLE_COMPILATION_CACHE=false` disables that.

        Args:
          folder: the path of a folder with config.json, safetensors and, for text,
            tokenizer.json; or the name of a bundled model, such as "stdlib-bytes".
          loaded: what `loading.read` found there, of this `dtype` and `mesh`; None
            reads it.
          dtype: of weights and pages.
          scan_layers: whether to stack the weights and scan over the layers, see
            `param_forms.stack_layers`, rather than to unroll them: the same answers,
            compiled sooner where the layers are many, but slower on a CPU, and on a GPU
            the host takes part in every step.
          speculate: how to draft, with at most `max_drafts` tokens in a step: a
            `speculation.SpeculationConfig`, or the name of a method that needs no more.
            The answers are the same, mostly sooner. None decodes plainly.
          mesh: devices to divide the model and its pages over, see
            `parallel.make_mesh`; each reads its part of the weights. None means one.
          policy: as in the constructor, as are the next four.
          eviction: see there.
          logits_fn: see there.
          keep_trace: see there.
          host_pages: see there.
          **bounds: fields of `EngineConfig`.

        Raises:
          ValueError: the folder or a field is not usable; the message says why.
        """
        known = [field.name for field in dataclasses.fields(EngineConfig)]
        known += inspect.signature(cls.load).parameters
        validation.check_keywords("Engine.load", bounds, known)
        # Flax and tokenizers load only here.
        from jaxkv.models import checkpoints
        from jaxkv.serving import loading

        folder = loading.folder_of("folder", folder)
        validation.instance("loaded", loaded, checkpoints.LoadedModel, type(None))
        layout.check_mesh(mesh)
        compilation_cache.keep_programs()
        scan_layers = validation.boolean("scan_layers", scan_layers)
        speculation = methods.of(speculate)
        config = loading.bounds(bounds, speculation)
        model = loaded
        if model is None:
            model = loading.read(folder, dtype=dtype, mesh=mesh)
        served = loading.serve(
            folder,
            model,
            config,
            speculation,
            dtype=dtype,
            scan_layers=scan_layers,
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
            policy=policy,
            eviction=eviction,
            logits_fn=logits_fn,
            keep_trace=keep_trace,
            host_pages=host_pages,
            mesh=mesh,
        )
        if speculation is not None and speculation.adaptive:
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
        self.core.tune(context)

    @property
    def params(self) -> Any:
        """The model's parameters, as `forward` takes them."""
        return self.core.params

    @property
    def config(self) -> EngineConfig:
        """The bounds."""
        return self.core.config

    @property
    def policy(self) -> scheduling_interface.Policy:
        """Who runs; another may be set at any time."""
        return self.core.policy

    @policy.setter
    def policy(self, policy: scheduling_interface.Policy) -> None:
        """Sets the policy of the next steps; None means `fcfs.fcfs()`.

        Raises:
          ValueError: it is not a policy.
        """
        kinds = (scheduling_interface.Policy, type(None))
        policy = validation.instance("policy", policy, *kinds)
        self.core.policy = fcfs.fcfs() if policy is None else policy

    @property
    def trace(self) -> outputs.Trace:
        """Step infos of the calls read so far, as NumPy arrays, where they are kept."""
        return self.core.trace

    @property
    def compile_s(self) -> float:
        """Seconds that compilation has taken so far, tracing included."""
        return self.core.compile_s

    def save(self, folder: Any, *, overwrite: bool = False) -> Path:
        """Writes the state of an idle engine: pages, prefix cache, drafter's memory.

        Args:
          folder: where to; `restore` reads it.
          overwrite: whether to replace a snapshot that is there.

        Raises:
          ValueError: requests are not complete, or as `save_state`.
        """
        overwrite = validation.boolean("overwrite", overwrite)
        return self.core.save(folder, overwrite=overwrite)

    def restore(self, folder: Any) -> None:
        """Replaces the state of an idle engine by a saved one, as often as wished.

        The engine serves the same parameters with the same bounds as the saved one. It
        then gives the same answers, bit for bit, to requests of the same ids or seeds.

        Raises:
          ValueError: requests are not complete, or as `load_state`.
        """
        self.core.restore(folder)

    def fork(self, *, policy: scheduling_interface.Policy | None = None) -> "Engine":
        """Copies the engine with all requests, which go on in both.

        Parameters and compiled programs are shared; the pages are copied.

        Args:
          policy: of the copy; None keeps this one's.

        Raises:
          ValueError: it is not a policy.
        """
        other = copy.copy(self)
        # A bound method of the tokenizer is part of every decoder of text.
        memo = {} if self.tokenizer is None else {id(self.tokenizer): self.tokenizer}
        other.core = self.core.fork(memo)
        first = self._next_id()
        self._ids, other._ids = itertools.count(first), itertools.count(first)
        if policy is not None:
            other.policy = policy
        return other

    def page_table(self) -> PageTableView:
        """Returns the page table as of the last call whose events were delivered.

        The device may be two calls ahead: the view shows it when those calls are read,
        so that in a `stream` tables and events belong together. It prints as text, and
        as a table in notebooks.
        """
        return self.core.page_table()

    def __repr__(self) -> str:
        """One line with the bounds and the number of requests."""
        config, num = self.config, len(self.core.tracker.records)
        return (
            f"Engine({config.num_pages} pages of {config.page_size}, "
            f"{config.max_slots} slots of {config.max_length} tokens, "
            f"{num} request{'' if num == 1 else 's'})"
        )

    def now(self) -> float:
        """Seconds since the engine was made."""
        return self.core.now()

    @validation.suggests_keywords
    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        request_id: int | None = None,
        arrival_s: float | None = None,
        attributes: RequestAttributes | None = None,
        key_id: int | None = None,
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
          attributes: what the policy sees of the request, such as its priority; None
            means the defaults.
          key_id: number in [0, 2**31) that keys the draws where `sampling.seed` is
            None. Requests that run at the same time may share it. None means
            `request_id`.

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
        if key_id is not None:
            key_id = refusals.request_name("key_id", key_id)
        attributes = request_attributes.checked(attributes)
        if request_id is not None:
            request_id = refusals.request_name("request_id", request_id)
        else:
            request_id = self._next_id()
        record = self._record(request_id, tokens, ask, arrival_s, key_id=key_id)
        record.attributes = attributes
        self.core.add([record])
        return request_id

    @validation.suggests_keywords
    def take_prefix(self, tokens: Sequence[int], *, salt: int = 0) -> tuple[Any, int]:
        """Copies the cached pages that tokens begin with, for another engine's pool.

        Args:
          tokens: of a prompt, at most `max_length`.
          salt: as in `Sampling`.

        Returns:
          The K and V arrays, those of as many pages, NumPy's; and how many there are.

        Raises:
          ValueError: there is no prefix cache, there are too many tokens, one is not
            of the vocabulary, or the salt is out of range.
        """
        prefix = request_batch.prefix_of(tokens, salt, self.config, self._vocab_size)
        return self.core.take_prefix(prefix)

    @validation.suggests_keywords
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
          ValueError: there is no prefix cache, the arrays do not fit this engine's, a
            token is not of the vocabulary, or the salt is out of range.
        """
        prefix = request_batch.prefix_of(tokens, salt, self.config, self._vocab_size)
        return self.core.bring_prefix(prefix, pages)

    def cancel(self, request_id: int) -> None:
        """Ends a request with what it has; names of nobody are ignored.

        Raises:
          ValueError: it is no name, which is a whole number in [0, 2**31).
        """
        self.core.cancel(refusals.request_name("request_id", request_id))

    @validation.suggests_keywords
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
            self.core.add(records)
            while not all(record.completion for record in records):
                self.core.turn()
            self.core.settle()
        except BaseException:
            self.core.withdraw(records)
            raise
        return [record.completion for record in records if record.completion]

    def stream(self) -> Iterator[Event]:
        """Runs until no request is left, telling what happens as it does.

        A stream may be left at any event; the next one goes on with the event after.
        """
        events = self.core.tracker.events
        while self.core.owes():
            with contextlib.suppress(IndexError):  # another thread was quicker
                # One step of the interpreter takes an event and hands it out: no signal
                # comes between the two.
                while True:
                    yield from map(collections.deque.popleft, [events])
            self.core.turn()

    def _next_id(self) -> int:
        return next(name for name in self._ids if name not in self.core.tracker.records)

    def _record(
        self,
        request_id: int,
        tokens: list[int],
        ask: Sampling,
        arrival_s: float | None = None,
        *,
        key_id: int | None = None,
        is_quiet: bool = False,
    ) -> Record:
        """Makes what the host will keep of a request."""
        return Record(
            request_id=request_id,
            key_id=key_id,
            prompt=tokens,
            sampling=ask,
            arrival_s=self.now() if arrival_s is None else arrival_s,
            end_tokens=ask.stop_tokens + (() if ask.ignore_eos else self._eos_ids),
            parts=[self._part(tokens, ask) for _ in range(ask.num_sequences)],
            is_quiet=is_quiet,
        )

    def _part(self, tokens: list[int], ask: Sampling) -> Part:
        """Makes what the host will keep of an answer; its text goes on the prompt's."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return Part(stream=None)
        search = tokenizer.stop_search(ask.stop, tokens) if ask.stop else None
        return Part(stream=tokenizer.stream(tokens), search=search)

    def _checked(self, prompt: object, ask: object) -> list[int]:
        """The tokens of a prompt, after all of the request was checked."""
        tokens = prompt
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("there is no tokenizer; give token ids, not text")
            tokens = self.tokenizer.encode(prompt)
        ignores = isinstance(ask, Sampling) and ask.ignore_eos
        return refusals.check(
            tokens,
            ask,
            config=self.config,
            num_eos=0 if ignores else len(self._eos_ids),
            vocab_size=self._vocab_size,
            has_text=self.tokenizer is not None,
            has_logits_fn=self._changes_logits,
        )
