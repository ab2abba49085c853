"""The facade `Engine`: prompts in, answers out, over the engine's core."""

import collections
import contextlib
import dataclasses
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from jax.sharding import Mesh

from jaxkv import scheduling, validation
from jaxkv.engine import (
    Drafter,
    EngineConfig,
    EngineFields,
    EngineParts,
    EngineRules,
    LogitsFn,
)
from jaxkv.memory import Eviction, KVLayout
from jaxkv.models import EndTokens, WeightFormat
from jaxkv.parallel import check_mesh
from jaxkv.sampling import Sampling
from jaxkv.scheduling import Policy, RequestAttributes
from jaxkv.serving import compiling, refusals
from jaxkv.serving.core import EngineCore
from jaxkv.serving.outputs import Completion, Event
from jaxkv.serving.requests import PartialAnswer, RequestRecord
from jaxkv.speculation import Method, SpeculationConfig, parse_speculation

if TYPE_CHECKING:
    from jaxkv.serving.loading import Origin


def _reads_former_arguments[T: Callable[..., None]](init: T) -> T:
    """Decorates `Engine.__init__` to take the fields of parts and rules as arguments.

    They are read with a `DeprecationWarning`.
    """
    part_names = {field.name for field in dataclasses.fields(EngineParts)}
    rule_names = {field.name for field in dataclasses.fields(EngineRules)}

    def make(self: Any, *args: Any, **options: Any) -> None:
        if len(args) > 2 or part_names & options.keys():
            warnings.warn(
                "Engine(params, forward, pages, config, ...) is now called "
                "Engine(EngineParts(params, ...), EngineRules(...))",
                DeprecationWarning,
                stacklevel=2,
            )
            fields = {name: options.pop(name) for name in part_names & options.keys()}
            rules = {name: options.pop(name) for name in rule_names & options.keys()}
            rules = {name: x for name, x in rules.items() if x is not None}
            args = EngineParts(*args, **fields), EngineRules(**rules)
        init(self, *args, **options)

    decorated: Any = functools.wraps(init)(make)
    return decorated


class Engine(EngineCore):
    """Serves a model: prompts in, answers out. See `StepLoop` for its operation.

    Ctrl-C, or any other exception of a signal handler, leaves the engine as it was
    between two device calls: submitted requests continue with the next `stream` or
    `generate`, and the requests of an interrupted `generate` are withdrawn.

    Threads may share an engine. A thread that waits for a result runs the device for
    all threads, one call at a time; if several threads iterate over `stream`, each
    event is delivered to one of them.

    If an error occurs inside a device call, or an invariant is violated in debug mode,
    the engine is lost: every later use raises a `RuntimeError` with the reason.
    """

    @_reads_former_arguments
    @validation.suggests_keywords
    def __init__(
        self,
        parts: EngineParts,
        rules: EngineRules | None = None,
        *,
        host_pages: int | None = None,
        keep_trace: bool = False,
    ):
        """Makes an idle engine; compiles no program.

        Args:
          parts: model, pages, bounds and tokenizer.
          rules: policy, eviction, logits function and speculation; None means the
            defaults.
          host_pages: swap space in host memory, in pages, in addition to the staging
            buffer of `max_swap_pages`; None means the size of the pool.
          keep_trace: True to collect step infos in `trace`; so does
            `EngineConfig.record_pages`.

        Raises:
          ValueError: a part or rule has another type, the pages do not fit the
            configuration, the end tokens do not fit `max_stop_tokens`, or `host_pages`
            is below 0.
        """
        rules = EngineRules() if rules is None else rules
        parts = refusals.check_parts(parts, rules)
        if host_pages is None:
            host_pages = parts.config.num_pages
        super().__init__(
            parts,
            rules,
            host_pages=validation.integer("host_pages", host_pages),
            keep_trace=validation.boolean("keep_trace", keep_trace),
        )
        self._next_id = 0
        self.origin: Origin | None = None
        """Source of the engine; None unless `load` made it."""

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        *,
        loaded: Any = None,
        dtype: str = "float32",
        weights: WeightFormat = "model",
        scan_layers: bool = False,
        speculate: Method | Drafter | SpeculationConfig | None = None,
        layout: KVLayout | None = None,
        mesh: Mesh | None = None,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
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
            `weights`, `mesh` and `end_tokens`; None reads it.
          dtype: type of weights and pages.
          weights: format of the weights of the layers' products, which are quantized
            while they are read: "int8", "fp8", "mxfp4" or "nvfp4", see `load_model`.
            "model" means `dtype`. A draft model has the same format. `weights_cost`
            measures the loss of log-likelihood.
          scan_layers: True to stack the weights and scan over the layers, see
            `param_forms.stack_layers`; False to unroll them. A scan gives the same
            answers and compiles faster with many layers, but is slower on a CPU, and on
            a GPU the host takes part in every step.
          speculate: speculation method with at most `max_drafts` drafts per step: a
            `speculation.SpeculationConfig`, the name of a method that needs no further
            field, or an `engine.Drafter`. The answers are the same, mostly sooner. None
            decodes without drafts.
          layout: content of the pages of K and V, see `memory.KVLayout`, whose
            `kv_dtype` is then the default of `EngineConfig.kv_dtype`; None means that
            of the model.
          mesh: devices to divide the model and its pages over, see
            `parallel.make_mesh`; each reads its part of the weights. None means one.
          adapters: folders of LoRA adapters in the form of peft by their names, for
            `Sampling.adapter`; see `models.load_adapters`.
          end_tokens: "union" of the end tokens of the configuration and of the
            tokenizer, or "generation_config" for the rule of transformers, see
            `load_model`.
          policy: as in `EngineRules`, as are the next two; None means `fcfs()`.
          eviction: see there.
          logits_fn: see there.
          keep_trace: as in the constructor.
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
        from jaxkv.models import LoadedModel, weight_format
        from jaxkv.serving import loading

        folder = loading.find_model_folder("folder", folder)
        validation.instance("loaded", loaded, LoadedModel, type(None))
        validation.instance("layout", layout, KVLayout, type(None))
        if layout is not None:
            bounds.setdefault("kv_dtype", layout.kv_dtype)
        check_mesh(mesh)
        compiling.keep_programs()
        scan_layers = validation.boolean("scan_layers", scan_layers)
        speculation_config = parse_speculation(speculate)
        folders = loading.check_adapters(adapters, bounds)
        config = loading.make_engine_config(bounds, speculation_config)
        model = loaded
        if model is None:
            model = loading.read_model_folder(
                folder,
                dtype=dtype,
                weights=weights,
                mesh=mesh,
                end_tokens=end_tokens,
            )
        if "max_stop_tokens" not in bounds:
            num = max(config.max_stop_tokens, len(model.eos_ids) + 3)
            config = dataclasses.replace(config, max_stop_tokens=num)
        origin = loading.Origin(
            folder=folder,
            draft_folder=loading.find_draft_folder(speculation_config),
            dtype=np.dtype(dtype).name,
            weights=weight_format(model.params),
            scan_layers=scan_layers,
            mesh=mesh,
            adapters=folders,
        )
        parts, speculation = loading.build_engine_parts(
            origin, model, config, speculation_config, layout
        )
        rules = EngineRules(
            policy=scheduling.fcfs() if policy is None else policy,
            eviction=eviction,
            logits_fn=logits_fn,
            speculation=speculation,
        )
        engine = cls(parts, rules, host_pages=host_pages, keep_trace=keep_trace)
        engine.origin = origin
        if speculation_config is not None and speculation_config.adaptive:
            engine.tune()
        return engine

    def __repr__(self) -> str:
        """One line with the bounds and the number of requests."""
        config = self.config
        num = len(self.tracker.records)
        return (
            f"Engine({config.num_pages} pages of {config.page_size}, "
            f"{config.max_slots} slots of {config.max_length} tokens, "
            f"{num} request{'' if num == 1 else 's'})"
        )

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
            request_id = self._assign_id()
        record = self._make_record(request_id, tokens, ask, arrival_s, key_id=key_id)
        record.attributes = attributes
        self._add([record])
        return request_id

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
            self._make_record(self._assign_id(), *pair, is_quiet=True)
            for pair in zip(encoded, asks, strict=True)
        ]
        try:
            self._add(records)
            while not all(record.completion for record in records):
                self.step()
            self._flush()
        except BaseException:
            self._withdraw(records)
            raise
        return [record.completion for record in records if record.completion]

    def stream(self) -> Iterator[Event]:
        """Runs until no request is left, and yields events.

        A stream may be abandoned at any event; the next stream continues with the
        following event.
        """
        events = self.tracker.events
        while self.has_pending():
            with contextlib.suppress(IndexError):  # another thread took the event
                # One bytecode takes an event and yields it, so that no signal handler
                # runs between the two.
                while True:
                    yield from map(collections.deque.popleft, [events])
            self.step()

    def _assign_id(self) -> int:
        """Returns the next number that is not the id of a request still running."""
        with self._lock:
            while self._next_id in self.tracker.records:
                self._next_id += 1
            self._next_id += 1
            return self._next_id - 1

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
            end_tokens=ask.stop_tokens + (() if ask.ignore_eos else self.eos_ids),
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
            num_eos=0 if ignores else len(self.eos_ids),
            vocab_size=self._vocab_size,
            has_text=self.tokenizer is not None,
            has_logits_fn=self.rules.logits_fn is not None,
            adapters=self.adapters,
        )
