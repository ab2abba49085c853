"""Speculation methods by name: builds drafter, forward pass and pages for a model."""

import dataclasses
import os
from typing import Literal, NamedTuple, get_args

import jax
from jax.sharding import SingleDeviceSharding

from jaxkv import validation
from jaxkv.engine import (
    REPRODUCIBLE_TREES,
    Drafter,
    EngineConfig,
    EngineParts,
    Speculation,
)
from jaxkv.models import (
    FEW_ROWS,
    ModelConfig,
    PagedForward,
    Params,
    add_transposed_weights,
    is_stacked,
    make_model_pages,
)
from jaxkv.speculation import (
    draft_model,
    eagle_drafting,
    head_folders,
    lookahead,
    static_tree,
)
from jaxkv.speculation.adaptive import Adaptive
from jaxkv.speculation.eagle import MTPConfig
from jaxkv.speculation.eagle_drafting import TargetWithEagle
from jaxkv.speculation.jacobi import Jacobi
from jaxkv.speculation.medusa import Medusa, MedusaConfig, TargetWithHeads
from jaxkv.speculation.ngram import NGram
from jaxkv.speculation.verifiers import SharedNoiseVerifier
from pallas_kernels import devices

type Method = Literal[
    "ngram",
    "jacobi",
    "lookahead",
    "early-exit",
    "draft-model",
    "medusa",
    "eagle",
    "mtp",
]

METHOD_NAMES: tuple[Method, ...] = get_args(Method.__value__)
"""Prompt lookup; Jacobi and lookahead decoding; early exit after the first layers; a
smaller draft model; two kinds of trained heads; the model's own modules for multi-token
prediction."""

MAX_DRAFTS = 3
"""Default draft length: 3 drafts and the token before them are 4 rows, which CPUs
multiply at once."""
MAX_ADAPTIVE_DRAFTS = 7
"""Default of the largest draft length if it adapts: 8 rows."""
NUM_DRAFT_BUCKETS = 2
"""Default number of draft lengths above 0 to choose from if the length adapts."""


CACHED_BYTES = 16 * 1024**2
"""Bytes of weights that fit into the caches of most CPUs."""


class ModelWeights(NamedTuple):
    """Shape and parameters of a model."""

    config: ModelConfig
    params: Params


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True)
class SpeculationConfig:
    """Speculative decoding method. All methods use `SharedNoiseVerifier`.

    With it the answers are those of plain decoding, sampled ones included.

    Raises:
      ValueError: the method is unknown, or a field belongs to another method.
    """

    method: Method | Drafter
    """One of `METHOD_NAMES`, or a drafter."""
    draft_folder: str | os.PathLike[str] | None = None
    """Folder, or name of a bundled model, of the draft model of "draft-model"."""
    draft_layers: int | tuple[int, ...] | None = None
    """Layers of the model that "early-exit" runs, for example those found by
    `search_layers`, or the number of first layers; None means half of the layers."""
    heads_folder: str | os.PathLike[str] | None = None
    """Folder of the heads of "medusa" or "eagle", trained for this model."""
    adaptive: bool = False
    """True if the draft length adapts to what pays, see `Adaptive`; `Engine.load` then
    measures step costs."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        if isinstance(self.method, str):
            validation.choice("method", self.method, METHOD_NAMES)
        else:
            validation.instance("method", self.method, Drafter)
        validation.boolean("adaptive", self.adaptive)
        for name, methods in (
            ("draft_folder", ("draft-model",)),
            ("draft_layers", ("early-exit",)),
            ("heads_folder", head_folders.HEAD_KINDS),
        ):
            value = getattr(self, name)
            if value is not None and self.method not in methods:
                raise ValueError(
                    f"{name}={validation.format_value(value)} needs the method "
                    f"{' or '.join(map(repr, methods))}, not {self.method!r}"
                )


def parse_speculation(speculate: object) -> SpeculationConfig | None:
    """Returns a configuration; a string or a drafter is its method.

    Raises:
      ValueError: the argument has another type, or the method is unknown.
    """
    if speculate is None or isinstance(speculate, SpeculationConfig):
        return speculate
    if isinstance(speculate, str):
        method = validation.choice("speculate", speculate, METHOD_NAMES)
        return SpeculationConfig(method)
    validation.instance("speculate", speculate, str, SpeculationConfig, Drafter)
    assert isinstance(speculate, Drafter)
    return SpeculationConfig(speculate)


def build_speculative(
    model: ModelWeights,
    bounds: EngineConfig,
    speculation: SpeculationConfig | None = None,
    *,
    dtype: str,
    draft: ModelWeights | None = None,
    heads: head_folders.LoadedHeads | None = None,
) -> tuple[EngineParts, Speculation | None]:
    """Builds forward pass, parameters, pages and speculation of a model.

    Args:
      model: the target.
      bounds: engine config with `max_drafts` above 0 if there is a method.
      speculation: the method and its fields; None decodes without drafts. Models in
        folders are passed as `draft` and `heads`.
      dtype: type of the pages.
      draft: model of "draft-model".
      heads: heads of "medusa" or "eagle".

    Returns:
      The parts of an engine without a tokenizer, and the drafter with
      `SharedNoiseVerifier`; None without a method.

    Raises:
      ValueError: a model, heads, modules or drafts are missing, or do not fit the
        method or the target.
    """
    method = None if speculation is None else speculation.method
    if method is not None and bounds.max_drafts < 1:
        raise ValueError(
            f"max_drafts={bounds.max_drafts} must be at least 1 with "
            f"speculate={method!r}"
        )
    if (draft is not None) != (method == "draft-model"):
        raise ValueError(
            "draft must be given if, and only if, the method is 'draft-model'"
        )
    kind = None if heads is None else head_folders.heads_kind(heads.config)
    if kind is None and method in head_folders.HEAD_KINDS:
        raise ValueError(
            f"speculate={method!r} needs trained heads: "
            f"SpeculationConfig({method!r}, heads_folder=...)"
        )
    if kind is not None and kind != method:
        raise ValueError(f"{kind} heads do not go with speculate={method!r}")
    layers = None if speculation is None else speculation.draft_layers
    if layers is not None:
        layers = _check_layers(layers, model.config.num_layers)
    model = _add_few_row_weights(model, bounds)
    if heads is not None:
        parts, drafter = _build_with_heads(model, heads, bounds, dtype)
    elif method == "mtp":
        parts, drafter = _build_with_modules(model, bounds, dtype)
    else:
        forward = PagedForward(model.config, bounds.numerics)
        pages = make_model_pages(
            model.config, bounds, dtype=dtype, record_routes=bounds.record_routes
        )
        parts = EngineParts(model.params, forward, pages, bounds)
        if method is None:
            return parts, None
        if draft is not None:
            parts, drafter = _build_with_draft_model(parts, model, draft, dtype)
        elif method == "early-exit":
            if is_stacked(model.params):
                raise ValueError("'early-exit' needs layers that are not stacked")
            if layers is None:
                layers = tuple(range(max(1, model.config.num_layers // 2)))
            drafter = draft_model.build_self_speculative(forward, layers)
        elif method == "lookahead":
            if bounds.numerics == "reproducible":
                raise ValueError(REPRODUCIBLE_TREES)
            drafter = lookahead.build_lookahead(bounds.max_drafts)
        elif isinstance(method, Drafter):
            drafter = method
        else:
            drafter = NGram() if method == "ngram" else Jacobi()
    if speculation is not None and speculation.adaptive:
        drafter = Adaptive(drafter)
    return parts, Speculation(drafter, SharedNoiseVerifier())


def _check_layers(layers: object, num_layers: int) -> tuple[int, ...]:
    """Returns the layers that draft, given as indices or as a number of first layers.

    Raises:
      ValueError: the indices are not the model's, or not ascending.
    """
    try:
        number = validation.integer("", layers, low=1, below=num_layers + 1)
        return tuple(range(number))
    except ValueError:
        pass
    try:
        indices = validation.integers("", layers, below=num_layers)
    except ValueError:
        indices = ()
    if not indices or list(indices) != sorted({*indices}):
        raise ValueError(
            f"draft_layers={validation.format_value(layers)} must be "
            f"in [1, {num_layers}], a "
            f"number of layers, or some of the layers [0, {num_layers - 1}] in order"
        )
    return indices


def _add_few_row_weights(model: ModelWeights, bounds: EngineConfig) -> ModelWeights:
    """Adds transposed copies of small weights where a CPU multiplies few rows."""
    numbers = [bounds.max_slots * (1 + length) for length in (0, *bounds.draft_buckets)]
    leaves = jax.tree.leaves(model.params)
    pays = (
        devices.current_target().platform == "cpu"
        and any(number in FEW_ROWS for number in numbers)
        and bounds.numerics == "fast"
        and model.config.experts is None
        and all(
            isinstance(getattr(leaf, "sharding", None), SingleDeviceSharding)
            for leaf in leaves
        )
        and sum(leaf.nbytes for leaf in leaves) <= CACHED_BYTES
    )
    if not pays:
        return model
    return model._replace(params=jax.jit(add_transposed_weights)(model.params))


def _keeping_windows(bounds: EngineConfig) -> EngineConfig:
    """Returns bounds for pages of a drafter, which have the first page table only."""
    return dataclasses.replace(bounds, release_window_pages=False)


def _build_with_heads(
    model: ModelWeights,
    heads: head_folders.LoadedHeads,
    bounds: EngineConfig,
    dtype: str,
) -> tuple[EngineParts, Drafter]:
    """Builds the parts and the drafter of "medusa" or "eagle".

    The drafts are a tree, or a chain under reproducible numerics.
    """
    config = heads.config
    num = bounds.max_drafts
    if config.target != model.config:
        raise ValueError("the heads must be those of the model served")
    target = PagedForward(model.config, bounds.numerics, taps=config.taps)
    pages = make_model_pages(
        model.config,
        bounds,
        dtype=dtype,
        taps=config.taps,
        record_routes=bounds.record_routes,
    )
    shares = heads.acceptance
    if bounds.numerics == "reproducible":
        shares = tuple(depth[:1] for depth in shares)
    if isinstance(config, MedusaConfig):
        forward = TargetWithHeads(target)
        drafter = Medusa(config, static_tree.build(shares, num))
    else:
        forward = TargetWithEagle(target, config)
        drafter = eagle_drafting.build_eagle_drafter(config, shares, num)
        draft_pages = make_model_pages(
            config.layer, _keeping_windows(bounds), dtype=dtype
        )
        pages = pages._replace(draft_pages=draft_pages)
    params = draft_model.TargetAndDraftParams(model.params, heads.params)
    return EngineParts(params, forward, pages, bounds), drafter


def _build_with_modules(
    model: ModelWeights, bounds: EngineConfig, dtype: str
) -> tuple[EngineParts, Drafter]:
    """Builds the parts and the drafter of "mtp": a chain of the model's own modules."""
    if not (num := model.config.num_ahead_layers):
        raise ValueError(
            f"speculate='mtp' needs a model with modules for multi-token prediction, "
            f"not num_ahead_layers={num}"
        )
    config = MTPConfig(target=model.config)
    target = PagedForward(model.config, bounds.numerics, taps=config.taps)
    pages = make_model_pages(
        model.config,
        bounds,
        dtype=dtype,
        taps=config.taps,
        record_routes=bounds.record_routes,
    )
    # The states of all modules but the last are features of the drafter's pages.
    taps = (0,) * (num - 1)
    draft_pages = make_model_pages(
        config.layer, _keeping_windows(bounds), dtype=dtype, taps=taps
    )
    drafter = eagle_drafting.build_eagle_drafter(config, [[1.0]], bounds.max_drafts)
    target_params = {
        name: model.params[name] for name in model.params if name != "ahead"
    }
    params = draft_model.TargetAndDraftParams(target_params, model.params["ahead"])
    pages = pages._replace(draft_pages=draft_pages)
    return EngineParts(params, TargetWithEagle(target, config), pages, bounds), drafter


def _build_with_draft_model(
    target: EngineParts, model: ModelWeights, draft: ModelWeights, dtype: str
) -> tuple[EngineParts, Drafter]:
    """Adds a draft model with its own pages to the parts of a target."""
    if draft.config.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"the draft model's {draft.config.vocab_size=} must be the served model's "
            f"{model.config.vocab_size}"
        )
    if draft.config.recurrence is not None:
        raise ValueError(
            "a draft model must have no recurrent layers: its states would have to "
            "follow accepted drafts"
        )
    bounds = target.config
    draft = _add_few_row_weights(draft, bounds)
    draft_forward = PagedForward(draft.config, bounds.numerics)
    draft_pages = make_model_pages(draft.config, _keeping_windows(bounds), dtype=dtype)
    parts = dataclasses.replace(
        target,
        params=draft_model.TargetAndDraftParams(target.params, draft.params),
        forward=draft_model.TargetWithDraft(target.forward, draft_forward),
        pages=target.pages._replace(draft_pages=draft_pages),
    )
    return parts, draft_model.DraftModel(draft_forward, has_own_model=True)
