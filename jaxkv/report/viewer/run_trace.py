"""The trace of a run: every step with its page tables, and the file `trace.npz`.

The file has a version, the step infos by the names of their fields, and the requests
as JSON in UTF-8. It is read without unpickling.
"""

import html
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxkv import files, validation
from jaxkv.engine import EngineConfig, StepInfo, StepPages

if TYPE_CHECKING:
    from jaxkv.serving import Engine

VERSION = 2
"""Version of the file; readers refuse others."""
FILE_NAME = "trace.npz"
"""Name of the file in a run folder."""
_PAGES = "pages."
_OMITTED_FIELDS = {"violations", "is_disabled"}
"""Fields of a `StepInfo` that a trace does not keep."""


class TraceRequest(NamedTuple):
    """A request of a run. Texts are data of a user, never markup."""

    request_id: int
    arrival_s: float
    """Arrival time, in seconds since the engine was made."""
    num_prompt_tokens: int
    prompt: str
    """Text of the prompt, or its token ids without a tokenizer."""
    answers: list[str]
    """Text that each sequence emitted; of a beam search, the tokens of each beam."""


class RunTrace(NamedTuple):
    """All steps of a run. In a notebook it is shown as the viewer's page."""

    start_s: Float[np.ndarray, " steps"]
    """Start of each step, in seconds since the engine was made. Within a call of the
    device, steps are taken to have equal durations."""
    info: StepInfo
    """Step infos with a leading axis of steps, as NumPy arrays."""
    page_size: int
    """Tokens of a page."""
    num_pages: int
    """Pages of the pool."""
    requests: tuple[TraceRequest, ...]
    """The requests in the order of their submission."""
    token_texts: dict[str, str]
    """Texts of the drafts by token id in decimal; empty without drafts or tokenizer."""

    @classmethod
    def of_engine(cls, engine: "Engine") -> "RunTrace":
        """Returns the trace of the steps that an engine has run so far.

        Idle steps at the end are left out. A request whose id was used before replaces
        the text of the earlier one.

        Raises:
          ValueError: the engine does not record pages, or has run no step with a
            request.
        """
        trace = engine.trace
        run = cls.of_steps(trace, engine.config)
        start_s = []
        for call, info in zip(trace.calls, trace, strict=True):
            num = len(info.enough)
            part = np.arange(num) / num
            start_s.append(call.dispatch_s + (call.read_s - call.dispatch_s) * part)
        submitted = {x.request_id: x for call in trace.calls for x in call.requests}
        requests = tuple(
            TraceRequest(
                name,
                x.arrival_s,
                len(x.prompt),
                _text_of(engine, x.prompt),
                [
                    _text_of(engine, _emitted_tokens(run.info, name, sample))
                    for sample in range(x.num_sequences)
                ],
            )
            for name, x in submitted.items()
        )
        texts = {}
        if (drafts := run.pages.draft_tokens) is not None and engine.tokenizer:
            texts = {
                str(x): engine.tokenizer.decode([x])
                for x in np.unique(drafts[drafts >= 0])
            }
        return run._replace(
            start_s=np.concatenate(start_s)[: run.num_steps],
            requests=requests,
            token_texts=texts,
        )

    @classmethod
    def of_steps(cls, infos: Sequence[StepInfo], config: EngineConfig) -> "RunTrace":
        """Returns the trace of calls of `run_steps`, or of a branch of `jaxkv.branch`.

        A step takes 1 s, and requests have token ids in place of texts.

        Raises:
          ValueError: the engine does not record pages, or no step has a request.
        """
        if not config.record_pages:
            raise ValueError(
                "record_pages=False must be True for a trace: "
                "Engine.load(..., record_pages=True)"
            )
        busy = [(np.asarray(info.request_id) >= 0).any(1) for info in infos]
        steps = np.flatnonzero(np.concatenate(busy)) if busy else np.zeros(0, int)
        if not steps.size:
            raise ValueError("trace=[] must have a step with a request")
        start_s = np.arange(steps[-1] + 1.0)
        info = jax.tree.map(lambda *x: np.concatenate(x)[: len(start_s)], *infos)
        info = info._replace(**dict.fromkeys(_OMITTED_FIELDS))
        requests = []
        for name in np.unique(info.request_id[info.request_id >= 0]).tolist():
            num_samples = 1 + int(info.sample[info.request_id == name].max())
            tokens = [_emitted_tokens(info, name, x) for x in range(num_samples)]
            answers = [" ".join(map(str, x)) for x in tokens]
            requests.append(TraceRequest(name, 0.0, 0, "", answers))
        sizes = config.page_size, config.num_pages
        return cls(start_s, info, *sizes, (*requests,), {})

    @property
    def pages(self) -> StepPages:
        """Page tables, pool and queue of the steps."""
        assert self.info.pages is not None  # `of_engine` and `read` make sure
        return self.info.pages

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return len(self.start_s)

    @property
    def num_drafts(self) -> Int[np.ndarray, "steps slots"]:
        """Drafts that each slot fed; 0 without speculation."""
        drafts = self.info.num_drafts
        return np.asarray(self.info.num_rows * 0 if drafts is None else drafts)

    @property
    def is_prefill(self) -> Bool[np.ndarray, "steps slots"]:
        """True if a slot fed several tokens that are no drafts."""
        return np.asarray(self.info.num_rows) - self.num_drafts > 1

    @property
    def expert_loads(self) -> Int[np.ndarray, "steps mixtures experts"] | None:
        """Tokens that each expert was chosen for in each step; None without routes.

        Experts are counted up to the last one that any token chose.
        """
        if (routes := self.pages.routes) is None:
            return None
        num_steps, _, num_mixtures, _ = routes.shape
        shape = num_steps, num_mixtures, int(routes.max(initial=0)) + 1
        step = np.arange(num_steps)[:, None, None, None]
        mixture = np.arange(num_mixtures)[:, None]
        index = (step * num_mixtures + mixture) * shape[2] + routes
        loads = np.bincount(index[routes >= 0], minlength=int(np.prod(shape)))
        return loads.reshape(shape)

    @property
    def has_tables(self) -> bool:
        """False for a simulated run, which counts pages and has no page tables."""
        return self.pages.page_ids.shape[2] > 0

    def part(self, first: int, last: int) -> "RunTrace":
        """Returns steps `first` to `last`, both included.

        Raises:
          ValueError: the steps are not in the trace, or not in order.
        """
        validation.integer("last", last, below=self.num_steps)
        validation.integer("first", first, below=last + 1)
        steps = slice(first, last + 1)
        info = jax.tree.map(lambda x: x[steps], self.info)
        return self._replace(start_s=self.start_s[steps], info=info)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file `trace.npz`.

        Raises:
          ValueError: the file cannot be written.
        """
        content: dict[str, Any] = {
            "version": VERSION,
            "page_size": self.page_size,
            "num_pages": self.num_pages,
            "start_s": self.start_s,
        }
        fields = self.info._asdict()
        content |= {name: x for name, x in fields.items() if isinstance(x, np.ndarray)}
        fields = self.pages._asdict()
        content |= {_PAGES + k: x for k, x in fields.items() if x is not None}
        requests = [x._asdict() for x in self.requests]
        for name, values in (("requests", requests), ("token_texts", self.token_texts)):
            content[name] = np.frombuffer(json.dumps(values).encode(), np.uint8)
        files.write_atomically(
            validation.path("path", path),
            lambda file: np.savez_compressed(file, **content),
        )

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "RunTrace":
        """Reads a trace, from its file or from a folder that has a `trace.npz`.

        Raises:
          ValueError: the file cannot be read, has another version, or its arrays do
            not fit together.
        """
        path = validation.path("path", path)
        path = path / FILE_NAME if path.is_dir() else path
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            if arrays["version"] != VERSION:
                version = arrays["version"]
                raise ValueError(f"{path}: {version=!s} must be {VERSION}")
            texts = json.loads(arrays["requests"].tobytes())
            requests = tuple(TraceRequest(**fields) for fields in texts)
            optional = StepPages._field_defaults
            fields = {
                x: arrays[_PAGES + x]
                for x in StepPages._fields
                if _PAGES + x in arrays or x not in optional
            }
            pages = StepPages(**fields)
            optional = StepInfo._field_defaults
            names = {*StepInfo._fields} - _OMITTED_FIELDS - {"pages"}
            fields = {x: arrays[x] for x in names if x in arrays or x not in optional}
            trace = cls(
                arrays["start_s"],
                StepInfo(**fields, violations=None, pages=pages),
                int(arrays["page_size"]),
                int(arrays["num_pages"]),
                requests,
                json.loads(arrays["token_texts"].tobytes()),
            )
        except (OSError, EOFError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: is not a trace: {error}") from None
        except ValueError as error:
            line = str(error)
            if line.startswith(f"{path}: "):
                raise
            raise ValueError(f"{path}: is not a trace: {line}") from None
        _check(trace, path)
        return trace

    def __repr__(self) -> str:
        """One line with the sizes."""
        slots = self.info.request_id.shape[1]
        return (
            f"RunTrace({self.num_steps} steps, {len(self.requests)} requests, "
            f"{slots} slots, {self.num_pages} pages of {self.page_size})"
        )

    def _repr_html_(self) -> str:
        """Returns the viewer for notebooks, in a frame without access to the page."""
        from jaxkv.report.viewer.page import MAX_PAGE_STEPS, render_viewer

        if self.num_steps > MAX_PAGE_STEPS:
            return f"<code>{html.escape(repr(self))}</code>"
        content = html.escape(render_viewer(self), quote=True)
        look = "width:100%;height:760px;border:1px solid #888"
        return (
            f'<iframe title="{html.escape(repr(self))}" sandbox="allow-scripts" '
            f'style="{look}" srcdoc="{content}"></iframe>'
        )


def _text_of(engine: "Engine", tokens: list[int]) -> str:
    if engine.tokenizer is None:
        return " ".join(map(str, tokens))
    return engine.tokenizer.decode(tokens)


def _emitted_tokens(info: StepInfo, request: int, sample: int) -> list[int]:
    """Returns the tokens that a sequence emitted, in order."""
    steps, slots = np.nonzero((info.request_id == request) & (info.sample == sample))
    return [
        token
        for step, slot in zip(steps.tolist(), slots.tolist(), strict=True)
        for token in info.tokens[step, slot, : info.num_emitted[step, slot]].tolist()
    ]


def _check(trace: RunTrace, path: Path) -> None:
    """Raises a ValueError if arrays do not fit together, or ids are out of range."""
    info = trace.info
    pages = trace.pages
    shape = info.request_id.shape
    leaves = [trace.start_s, *jax.tree.leaves(info)]
    per_slot = [info.sample, info.num_rows, info.num_emitted, info.reason, info.held]
    per_slot += [pages.length, pages.copied_from, pages.copied_to, pages.num_cached]
    per_slot += [x for x in (info.num_drafts, pages.state_ids) if x is not None]
    drafts = pages.draft_tokens, pages.draft_parents, pages.draft_path
    drafts = [x for x in drafts if x is not None]
    ids = pages.page_ids, pages.copied_from, pages.copied_to
    fits = len(shape) == 2 and trace.page_size >= 1
    fits = fits and all(x.shape[:1] == shape[:1] for x in leaves)
    fits = fits and all(x.shape == shape for x in per_slot)
    fits = fits and pages.page_ids.shape[:2] == shape
    fits = fits and pages.ref.shape == pages.is_cached.shape
    fits = fits and pages.ref.shape[1] == trace.num_pages * trace.has_tables
    fits = fits and all(x.shape[:2] == shape for x in drafts)
    fits = fits and len({x.shape for x in drafts}) <= 1
    if fits and pages.draft_parents is not None:
        place = np.arange(pages.draft_parents.shape[2])
        fits = bool(((pages.draft_parents >= 0) & (pages.draft_parents <= place)).all())
    per_place = [pages.queue_swapped, pages.is_on_host]
    fits = fits and all(x is None or x.shape == pages.queue.shape for x in per_place)
    fits = fits and all((-1 <= x).all() and (x < trace.num_pages).all() for x in ids)
    if not (fits and trace.num_steps):
        raise ValueError(f"{path}: arrays of the trace do not fit together")
