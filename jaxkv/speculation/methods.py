"""Ways to speculate by name: what a method makes of a model that is to be served."""

import dataclasses
from typing import Any, Literal, NamedTuple, get_args

import jax
from jax.sharding import SingleDeviceSharding

from jaxkv import validation
from jaxkv.engine.drafting import REPRODUCIBLE_TREES, Drafter, Speculation
from jaxkv.memory import Pages
from jaxkv.models import Forward, ModelConfig, Params, paged, param_forms
from jaxkv.models.layers import FEW
from jaxkv.speculation import (
    draft_model,
    eagle_drafting,
    head_folders,
    lookahead,
    static_tree,
)
from jaxkv.speculation.adaptive import Adaptive
from jaxkv.speculation.eagle_drafting import Followed
from jaxkv.speculation.jacobi import Jacobi
from jaxkv.speculation.medusa import Medusa, MedusaConfig, WithHeads
from jaxkv.speculation.ngram import NGram
from jaxkv.speculation.verifiers import Coupled
from pallas_kernels import devices

type Method = Literal[
    "ngram", "jacobi", "lookahead", "early-exit", "draft-model", "medusa", "eagle"
]

METHODS: tuple[Method, ...] = get_args(Method.__value__)
"""Prompt lookup; Jacobi and lookahead decoding; the first layers of the model; a
smaller model; heads that were trained for the model, of two kinds."""

MAX_DRAFTS = 3
"""Drafts of a sequence in a step where nobody says how many: with the token before them
4 rows, as many as CPUs multiply at once."""
MAX_ADAPTIVE_DRAFTS = 7
"""The same where their number adapts: to 8 rows, to 4 or to one."""
NUM_LENGTHS = 2
"""Numbers of drafts above 0 to choose from, where it adapts and nobody says."""


CACHED_BYTES = 16 * 1024**2
"""Of weights that lie in the caches of most CPUs."""


class Model(NamedTuple):
    """A model, as its checkpoint has it."""

    config: ModelConfig
    params: Params


@dataclasses.dataclass(frozen=True)
class Served:
    """What an engine needs to serve a model."""

    forward: Forward
    params: Any
    pages: Pages
    speculation: Speculation | None = None

    def speculating(self, drafter: Drafter) -> "Served":
        """Returns the same with a drafter, and the verifier that keeps all tokens."""
        return dataclasses.replace(self, speculation=Speculation(drafter, Coupled()))


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True)
class SpeculationConfig:
    """How to speculate. Every method keeps all tokens, drawn ones too (`Coupled`).

    Raises:
      ValueError: the method is unknown, or a field belongs to another method.
    """

    method: Method
    """One of `METHODS`."""
    draft_folder: Any = None
    """Folder, or name of a bundled model, of the smaller model of "draft-model"."""
    draft_layers: int | tuple[int, ...] | None = None
    """The model's layers that "early-exit" runs, such as `layer_search.search` finds,
    or how many of the first; None means half."""
    heads_folder: Any = None
    """Folder of the heads of "medusa" or "eagle", trained for this model."""
    adaptive: bool = False
    """True if the number of drafts adapts to what pays, see `Adaptive`; the engine is
    then tuned."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        validation.choice("method", self.method, METHODS)
        validation.boolean("adaptive", self.adaptive)
        for name, methods in (
            ("draft_folder", ("draft-model",)),
            ("draft_layers", ("early-exit",)),
            ("heads_folder", head_folders.KINDS),
        ):
            value = getattr(self, name)
            if value is not None and self.method not in methods:
                raise ValueError(
                    f"{name}={validation.shown(value)} goes with the method "
                    f"{' or '.join(map(repr, methods))} alone, not {self.method!r}"
                )


def of(speculate: Any) -> SpeculationConfig | None:
    """Returns a configuration, or that of a method which is given by its name.

    Raises:
      ValueError: it is neither, nor None, or the method is unknown.
    """
    if speculate is None or isinstance(speculate, SpeculationConfig):
        return speculate
    if not isinstance(speculate, str):
        kinds = (str, SpeculationConfig, type(None))
        validation.instance("speculate", speculate, *kinds)
    return SpeculationConfig(validation.choice("speculate", speculate, METHODS))


def build_speculative(
    model: Model,
    bounds: Any,
    speculation: SpeculationConfig | None = None,
    *,
    dtype: str,
    draft: Model | None = None,
    heads: head_folders.Loaded | None = None,
) -> Served:
    """Makes forward pass, parameters, pages and drafter of a model that is served.

    Args:
      model: the target.
      bounds: the engine's, with `max_drafts` above 0 where there is a method.
      speculation: the method and its fields; None decodes plainly. Models in folders
        are given as `draft` and `heads`.
      dtype: of the pages.
      draft: the model of "draft-model".
      heads: those of "medusa" and "eagle".

    Raises:
      ValueError: a model or heads are missing, or do not fit the method or the target.
    """
    method = None if speculation is None else speculation.method
    if (draft is not None) != (method == "draft-model"):
        raise ValueError(
            "a draft model goes with the method 'draft-model', and only it"
        )
    kind = None if heads is None else head_folders.kind_of(heads.config)
    if kind is None and method in head_folders.KINDS:
        raise ValueError(f"speculate={method!r} needs heads that were trained for it")
    if kind is not None and kind != method:
        raise ValueError(f"{kind} heads do not go with speculate={method!r}")
    layers = None if speculation is None else speculation.draft_layers
    if layers is not None:
        layers = _layers(layers, model.config.num_layers)
    model = _for_few_rows(model, bounds)
    if heads is not None:
        served = _with_heads(model, heads, bounds, dtype)
    else:
        forward = paged.PagedForward(model.config, bounds.numerics)
        pages = paged.make_pages(model.config, bounds, dtype=dtype)
        served = Served(forward, model.params, pages)
        if method is None:
            return served
        if draft is not None:
            served = _with_draft_model(served, model, draft, bounds, dtype)
        elif method == "early-exit":
            if param_forms.is_stacked(model.params):
                raise ValueError("'early-exit' needs layers that are not stacked")
            if layers is None:
                layers = tuple(range(max(1, model.config.num_layers // 2)))
            own = paged.PagedForward(model.config, bounds.numerics)
            served = served.speculating(draft_model.self_speculative(own, layers))
        elif method == "lookahead":
            if bounds.numerics == "reproducible":
                raise ValueError(REPRODUCIBLE_TREES)
            served = served.speculating(lookahead.sized(bounds.max_drafts))
        else:
            served = served.speculating(NGram() if method == "ngram" else Jacobi())
    assert served.speculation is not None
    assert speculation is not None
    if speculation.adaptive:
        served = served.speculating(Adaptive(served.speculation.drafter))
    return served


def _layers(layers: object, num_layers: int) -> tuple[int, ...]:
    """Checks which layers draft, or how many of the first.

    Raises:
      ValueError: they are not the model's, or not in order.
    """
    try:
        number = validation.integer("", layers, low=1, below=num_layers + 1)
        return tuple(range(number))
    except ValueError:
        pass
    try:
        found = validation.integers("", layers, below=num_layers)
    except ValueError:
        found = ()
    if not found or list(found) != sorted({*found}):
        raise ValueError(
            f"draft_layers={validation.shown(layers)} must be in [1, {num_layers}], a "
            f"number of layers, or some of the layers [0, {num_layers - 1}] in order"
        )
    return found


def _for_few_rows(model: Model, bounds: Any) -> Model:
    """Has small weights twice, where a CPU multiplies few rows and loses none by it."""
    numbers = [bounds.max_slots * (1 + length) for length in (0, *bounds.lengths)]
    leaves = jax.tree.leaves(model.params)
    pays = (
        devices.current_target().platform == "cpu"
        and any(number in FEW for number in numbers)
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
    return model._replace(params=jax.jit(param_forms.for_few_rows)(model.params))


def _with_heads(
    model: Model, heads: head_folders.Loaded, bounds: Any, dtype: str
) -> Served:
    """Has heads draft, trees where these gain most and may be."""
    config, num = heads.config, bounds.max_drafts
    if config.target != model.config:
        raise ValueError("the heads must be those of the model served")
    target = paged.PagedForward(model.config, bounds.numerics, taps=config.taps)
    pages = paged.make_pages(model.config, bounds, dtype=dtype, taps=config.taps)
    shares = heads.acceptance
    if bounds.numerics == "reproducible":
        shares = tuple(depth[:1] for depth in shares)
    if isinstance(config, MedusaConfig):
        forward = WithHeads(target)
        drafter = Medusa(config, static_tree.build(shares, num))
    else:
        forward = Followed(target, config)
        drafter = eagle_drafting.grown(config, shares, num)
        beside = paged.make_pages(config.layer, bounds, dtype=dtype)
        pages = pages._replace(beside=beside)
    params = draft_model.Both(model.params, heads.params)
    return Served(forward, params, pages, Speculation(drafter, Coupled()))


def _with_draft_model(
    served: Served, model: Model, draft: Model, bounds: Any, dtype: str
) -> Served:
    """Adds a draft model to a target, with pages of its own."""
    if draft.config.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"the draft model's {draft.config.vocab_size=} must be the served model's "
            f"{model.config.vocab_size}"
        )
    draft = _for_few_rows(draft, bounds)
    own = paged.PagedForward(draft.config, bounds.numerics)
    beside = paged.make_pages(draft.config, bounds, dtype=dtype)
    drafter = draft_model.DraftModel(own, beside=True)
    return Served(
        draft_model.Beside(served.forward, own),
        draft_model.Both(served.params, draft.params),
        served.pages._replace(beside=beside),
        Speculation(drafter, Coupled()),
    )
