"""The facade `Engine`: prompts in, answers out, over the engine's core."""

import collections
import contextlib
import copy
import dataclasses
import inspect
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from jax.sharding import Mesh

from jaxkv import scheduling, validation
from jaxkv.engine import EngineConfig, EngineFields, LogitsFn, Speculation
from jaxkv.memory import Eviction, Pages, PageTableView
from jaxkv.models import EndTokens, Forward
from jaxkv.parallel import check_mesh
from jaxkv.sampling import Sampling
from jaxkv.scheduling import Policy, RequestAttributes
from jaxkv.serving import compilation_cache, outputs, refusals, request_batch
from jaxkv.serving.core import EngineCore
from jaxkv.serving.outputs import Completion, Event
from jaxkv.serving.requests import PartialAnswer, RequestRecord
from jaxkv.speculation import Method, SpeculationConfig, parse_speculation

if TYPE_CHECKING:
    from jaxkv.serving.loading import Origin


class Engine:
    """Serves a model; see `EngineCore` for its operation.

    Ctrl-C, or any other exception of a signal handler, leaves the engine as it was
    between two device calls: submitted requests continue with the next `stream` or
    `generate`, and the requests of an interrupted `generate` are withdrawn.

    Threads may share an engine. A thread that waits for a result runs the device for
    all threads, one call at a time; if several threads iterate over `stream`, each
    event is delivered to one of them.

    If an error occurs inside a device call, or an invariant is violated in debug mode,
    the engine is lost: every later use raises a `RuntimeError` with the reason.
    """

    @validation.suggests_keywords
    def __init__(
        self,
        params: Any,
        forward: Forward,
        pages: Pages,
        config: EngineConfig,
        *,
        tokenizer: Any = None,
        eos_ids: Sequence[int] | None = None,
        vocab_size: int | None = None,
        policy: Policy | None = None,
        eviction: Eviction | None = None,
        logits_fn: LogitsFn | None = None,
        speculation: Speculation | None = None,
        keep_trace: bool = False,
        host_pages: int | None = None,
        mesh: Mesh | None = None,
    ):
        """Makes an idle engine; compiles no program.

        Args:
          params: parameters, as `forward` takes them.
          forward: the model.
          pages: its K and V arrays; consumed.
          config: the bounds.
          tokenizer: a `text.Tokenizer` or `text.ByteTokenizer`, or an object with their
            `encode`, `stream`, `stop_search` and `eos_ids`; needed for text.
          eos_ids: tokens that end an answer; None takes the tokenizer's.
          vocab_size: bound on token ids; None does not check them.
          policy: scheduling policy; None means `fcfs()`.
          eviction: eviction rule of the prefix cache; None means
            `prefix_eviction.LRU()`.
          logits_fn: changes logits before a token is sampled; a plain function,
            compiled once for each function object.
          speculation: drafter and verifier, see `jaxkv.speculation`, with a draft
            length of at most `config.max_drafts`. None decodes without drafts.
          keep_trace: True to collect step infos in `trace`.
          host_pages: swap space in host memory, in pages, in addition to the staging
            buffer of `max_swap_pages`; None means the size of the pool.
          mesh: devices to divide the model and its pages over, see
            `parallel.make_mesh`; the parameters must be those that
            `parallel.tensor.place_params` returns. None means one device.

        Raises:
          ValueError: an argument has another type, the pages do not fit the
            configuration, the end tokens do not fit `max_stop_tokens`, or `host_pages`
            is below 0.
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
        self._eos_ids = refusals.resolve_end_tokens(
            eos_ids, tokenizer, config, vocab_size
        )
        self._vocab_size = vocab_size
        self._changes_logits = logits_fn is not None
        self._ids = itertools.count()
        self.core = EngineCore(
            params,
            forward,
            pages,
            config,
            policy=scheduling.fcfs() if policy is None else policy,
            eviction=eviction,
            logits_fn=logits_fn,
            speculation=speculation,
            eos_ids=self._eos_ids,
            host_pages=validation.integer("host_pages", host_pages),
            keep_trace=validation.boolean("keep_trace", keep_trace),
            mesh=mesh,
        )
        """The core that runs on the device, for measurements."""
        self.origin: Origin | None = None
        """Source of the engine; None unless `load` made it."""

    @classmethod
    def load(
        cls,
        folder: Any,
        *,
        loaded: Any = None,
        dtype: str = "float32",
        scan_layers: bool = False,
        speculate: Method | SpeculationConfig | None = None,
        mesh: Mesh | None = None,
        end_tokens: EndTokens = "union",
        policy: Policy | None = None,
        eviction: Eviction | None = None,
        logits_fn: LogitsFn | None = None,
        keep_trace: bool = False,
        host_pages: int | None = None,
        **bounds: Unpack[EngineFields],
    ) -> "Engine":
        """Serves a Hugging Face folder, or a bundled model.

        Compiled programs are stored in the user's cache folder for the next process,
        unless JAX's persistent compilation cache is configured already;
        `JAX_ENABLE_COMPILATION_CACHE=false` disables that.

        Args:
          folder: path of a folder with config.json, safetensors and, for text,
            tokenizer.json; or the name of a bundled model, such as "stdlib-bytes".
          loaded: result of `loading.read_model_folder` for this folder, `dtype`,
            `mesh` and `end_tokens`; None reads it.
          dtype: type of weights and pages.
          scan_layers: True to stack the weights and scan over the layers, see
            `param_forms.stack_layers`; False to unroll them. A scan gives the same
            answers and compiles faster with many layers, but is slower on a CPU, and on
            a GPU the host takes part in every step.
          speculate: speculation method with at most `max_drafts` drafts per step: a
            `speculation.SpeculationConfig`, or the name of a method that needs no
            further field. The answers are the same, mostly sooner. None decodes without
            drafts.
          mesh: devices to divide the model and its pages over, see
            `parallel.make_mesh`; each reads its part of the weights. None means one.
          end_tokens: "union" of the end tokens of the configuration and of the
            tokenizer, or "generation_config" for the rule of transformers, see
            `load_model`.
          policy: as in the constructor, as are the next four.
          eviction: see there.
          logits_fn: see there.
          keep_trace: see there.
          host_pages: see there.
          **bounds: fields of `EngineConfig`. By default `max_stop_tokens` has room for
            the model's end tokens and 3 of a request.

        Raises:
          ValueError: the folder or a field is not usable; the message has the reason.
        """
        names = [field.name for field in dataclasses.fields(EngineConfig)]
        names += inspect.signature(cls.load).parameters
        validation.check_keywords("Engine.load", bounds, names)
        # Flax and tokenizers load only here.
        from jaxkv.models import LoadedModel
        from jaxkv.serving import loading

        folder = loading.find_model_folder("folder", folder)
        validation.instance("loaded", loaded, LoadedModel, type(None))
        check_mesh(mesh)
        compilation_cache.keep_programs()
        scan_layers = validation.boolean("scan_layers", scan_layers)
        speculation = parse_speculation(speculate)
        config = loading.make_engine_config(bounds, speculation)
        model = loaded
        if model is None:
            model = loading.read_model_folder(
                folder, dtype=dtype, mesh=mesh, end_tokens=end_tokens
            )
        if "max_stop_tokens" not in bounds:
            num = max(config.max_stop_tokens, len(model.eos_ids) + 3)
            config = dataclasses.replace(config, max_stop_tokens=num)
        served = loading.build_engine_parts(
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
        name = np.dtype(dtype).name
        engine.origin = loading.Origin(
            folder, served.draft_folder, name, scan_layers, mesh
        )
        if speculation is not None and speculation.adaptive:
            engine.tune()
        return engine

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
        self.core.tune(context)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return self._eos_ids

    @property
    def params(self) -> Any:
        """The model's parameters, as `forward` takes them."""
        return self.core.params

    @property
    def config(self) -> EngineConfig:
        """The bounds."""
        return self.core.config

    @property
    def policy(self) -> Policy:
        """Scheduling policy; may be replaced at any time."""
        return self.core.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        """Sets the policy of the next steps; None means `fcfs()`.

        Raises:
          ValueError: it is not a policy.
        """
        policy = scheduling.fcfs() if policy is None else policy
        scheduling.check_policy(policy)
        self.core.policy = policy

    @property
    def trace(self) -> outputs.Trace:
        """Step infos of the calls read so far, as NumPy arrays, if they are kept."""
        return self.core.trace

    @property
    def compile_s(self) -> float:
        """Seconds of compilation so far, including tracing."""
        return self.core.compile_s

    def save(self, folder: Any, *, overwrite: bool = False) -> Path:
        """Writes the state of an idle engine: pages, prefix cache, drafter state.

        Args:
          folder: target folder, as `restore` reads it.
          overwrite: True to replace an existing snapshot.

        Raises:
          ValueError: requests are not complete, or as `save_state`.
        """
        overwrite = validation.boolean("overwrite", overwrite)
        return self.core.save(folder, overwrite=overwrite)

    def restore(self, folder: Any) -> None:
        """Replaces the state of an idle engine by a saved one, any number of times.

        The engine must serve the same parameters with the same bounds as the saved one.
        It then gives the same answers, bit for bit, to requests with the same ids or
        seeds.

        Raises:
          ValueError: requests are not complete, or as `load_state`.
        """
        self.core.restore(folder)

    def fork(self, *, policy: Policy | None = None) -> "Engine":
        """Copies the engine with all requests, which continue in both copies.

        Parameters and compiled programs are shared; the pages are copied.

        Args:
          policy: policy of the copy; None keeps this engine's.

        Raises:
          ValueError: `policy` is not a policy.
        """
        other = copy.copy(self)
        # A bound method of the tokenizer is part of every decoder of text.
        memo = {} if self.tokenizer is None else {id(self.tokenizer): self.tokenizer}
        other.core = self.core.fork(memo)
        first = self._next_id()
        self._ids = itertools.count(first)
        other._ids = itertools.count(first)
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
        config = self.config
        num = len(self.core.tracker.records)
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
        """Adds a request; it runs while `stream` or `generate` does.

        Any number of requests may wait on the host; requests for which the device has
        no room are kept there, never dropped.

        Args:
          prompt: text, or token ids.
          sampling: sampling parameters; None means the defaults.
          request_id: the caller's id in [0, 2**31), which also keys the samples of a
            request without a seed; None takes the next unused number.
          arrival_s: earliest admission, in seconds since the engine was made; None
            means now.
          attributes: attributes for the policy, such as the priority; None means the
            defaults.
          key_id: number in [0, 2**31) that keys the samples if `sampling.seed` is None.
            Requests that run at the same time may share it. None means `request_id`.

        Returns:
          The request id.

        Raises:
          ValueError: the request cannot be served; the message has the reason.
        """
        # All arguments are checked before a request id is assigned.
        ask = Sampling() if sampling is None else sampling
        tokens = self._validate(prompt, ask)
        if arrival_s is not None:
            arrival_s = validation.seconds("arrival_s", arrival_s)
        if key_id is not None:
            key_id = refusals.check_request_id("key_id", key_id)
        attributes = scheduling.check_attributes(attributes)
        if request_id is not None:
            request_id = refusals.check_request_id("request_id", request_id)
        else:
            request_id = self._next_id()
        record = self._make_record(request_id, tokens, ask, arrival_s, key_id=key_id)
        record.attributes = attributes
        self.core.add([record])
        return request_id

    @validation.suggests_keywords
    def take_prefix(self, tokens: Sequence[int], *, salt: int = 0) -> tuple[Any, int]:
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
        return self.core.take_prefix(prefix)

    @validation.suggests_keywords
    def bring_prefix(self, tokens: Sequence[int], pages: Any, *, salt: int = 0) -> int:
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
        return self.core.bring_prefix(prefix, pages)

    def cancel(self, request_id: int) -> None:
        """Ends a request with its tokens so far; unknown ids are ignored.

        Raises:
          ValueError: `request_id` is not an integer in [0, 2**31).
        """
        self.core.cancel(refusals.check_request_id("request_id", request_id))

    @validation.suggests_keywords
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
    ) -> list[Completion]:
        """Answers prompts, together with all other requests of the engine.

        Returns when these prompts are answered; other requests may still wait or run,
        and continue with the next call. If it is interrupted, its own requests are
        withdrawn.

        Args:
          prompts: texts, or lists of token ids.
          sampling: sampling parameters of all prompts, or a list with one for each.

        Returns:
          The completions, in the order of the prompts.

        Raises:
          ValueError: a request cannot be served; then none is submitted.
        """
        asks = refusals.pair_samplings(prompts, sampling)
        encoded = []
        for i, (prompt, ask) in enumerate(zip(prompts, asks, strict=True)):
            try:
                encoded.append(self._validate(prompt, ask))
            except ValueError as error:
                raise ValueError(f"prompts[{i}]: {error}") from None
        records = [
            self._make_record(self._next_id(), *pair, is_quiet=True)
            for pair in zip(encoded, asks, strict=True)
        ]
        try:
            self.core.add(records)
            while not all(record.completion for record in records):
                self.core.step()
            self.core.flush()
        except BaseException:
            self.core.withdraw(records)
            raise
        return [record.completion for record in records if record.completion]

    def stream(self) -> Iterator[Event]:
        """Runs until no request is left, and yields events.

        A stream may be abandoned at any event; the next stream continues with the
        following event.
        """
        events = self.core.tracker.events
        while self.core.has_pending():
            with contextlib.suppress(IndexError):  # another thread took the event
                # One bytecode takes an event and yields it, so that no signal handler
                # runs between the two.
                while True:
                    yield from map(collections.deque.popleft, [events])
            self.core.step()

    def _next_id(self) -> int:
        return next(name for name in self._ids if name not in self.core.tracker.records)

    def _make_record(
        self,
        request_id: int,
        tokens: list[int],
        ask: Sampling,
        arrival_s: float | None = None,
        *,
        key_id: int | None = None,
        is_quiet: bool = False,
    ) -> RequestRecord:
        """Makes the host's record of a request."""
        return RequestRecord(
            request_id=request_id,
            key_id=key_id,
            prompt=tokens,
            sampling=ask,
            arrival_s=self.now() if arrival_s is None else arrival_s,
            end_tokens=ask.stop_tokens + (() if ask.ignore_eos else self._eos_ids),
            answers=[self._make_answer(tokens, ask) for _ in range(ask.num_sequences)],
            is_quiet=is_quiet,
        )

    def _make_answer(self, tokens: list[int], ask: Sampling) -> PartialAnswer:
        """Makes the host's record of a sequence; its text continues the prompt's."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return PartialAnswer(stream=None)
        search = tokenizer.stop_search(ask.stop, tokens) if ask.stop else None
        return PartialAnswer(stream=tokenizer.stream(tokens), search=search)

    def _validate(self, prompt: object, ask: object) -> list[int]:
        """Returns the token ids of a prompt, after all arguments were validated."""
        tokens = prompt
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("there is no tokenizer; give token ids, not text")
            tokens = self.tokenizer.encode(prompt)
        ignores = isinstance(ask, Sampling) and ask.ignore_eos
        return refusals.check_request(
            tokens,
            ask,
            config=self.config,
            num_eos=0 if ignores else len(self._eos_ids),
            vocab_size=self._vocab_size,
            has_text=self.tokenizer is not None,
            has_logits_fn=self._changes_logits,
        )
