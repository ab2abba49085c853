"""Ways to speculate by name: what a method makes of a model that is to be served."""

import dataclasses
from typing import Any, Literal, NamedTuple, get_args

import jax
from jax.sharding import SingleDeviceSharding

from jaxkv import validation
from jaxkv.engine.drafting import REPRODUCIBLE_TREES, Speculation
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

METHODS: tuple[str, ...] = get_args(Method.__value__)
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


def serve(
    model: Model,
    bounds: Any,
    *,
    dtype: str,
    method: str | None = None,
    draft: Model | None = None,
    layers: int | tuple[int, ...] | None = None,
    heads: head_folders.Loaded | None = None,
    adaptive: bool = False,
) -> Served:
    """Makes what serves a model, and speculates by a method.

    Every method keeps all tokens, drawn ones too (`Coupled`).

    Args:
      model: the target.
      bounds: the engine's, with `max_drafts` above 0 where there is a method.
      dtype: of the pages.
      method: one of `METHODS`; None decodes plainly.
      draft: the model that drafts, for "draft-model" alone.
      layers: those that "early-exit" runs, or how many of the first; None means half.
      heads: what drafts for "medusa" and "eagle" alone.
      adaptive: whether no more is guessed than pays.

    Raises:
      ValueError: the method is none, or something is missing, or does not fit.
    """
    if method is not None:
        validation.choice("speculate", method, METHODS)
    if (draft is not None) != (method == "draft-model"):
        raise ValueError(
            "a draft model goes with the method 'draft-model', and only it"
        )
    if layers is not None:
        if method != "early-exit":
            raise ValueError(
                f"draft_layers={validation.shown(layers)} goes with the method "
                "'early-exit' alone"
            )
        layers = _layers(layers, model.config.num_layers)
    kind = None if heads is None else head_folders.kind_of(heads.config)
    if kind is None and method in head_folders.KINDS:
        raise ValueError(f"speculate={method!r} needs heads that were trained for it")
    if kind is not None and kind != method:
        raise ValueError(f"{kind} heads do not go with speculate={method!r}")
    if method is None and adaptive:
        raise ValueError(f"{adaptive=} goes with a method to speculate")
    model = _for_few_rows(model, bounds)
    if heads is not None:
        served = _with_heads(model, heads, bounds, dtype)
    else:
        forward = paged.PagedForward(model.config, bounds.numerics)
        pages = paged.make_pages(model.config, bounds, dtype=dtype)
        served = Served(forward, model.params, pages)
        if method is None:
            return served
        served = _speculating(served, method, model, draft, bounds, dtype, layers)
    speculation = served.speculation
    if adaptive and speculation is not None:
        speculation = speculation._replace(drafter=Adaptive(speculation.drafter))
    return dataclasses.replace(served, speculation=speculation)


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
        devices.current().platform == "cpu"
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


def _speculating(
    served: Served,
    method: str,
    model: Model,
    draft: Model | None,
    bounds: Any,
    dtype: str,
    layers: tuple[int, ...] | None,
) -> Served:
    """Has a method guess."""
    if draft is not None:
        return _beside(served, model, draft, bounds, dtype)
    if method == "early-exit":
        if param_forms.is_stacked(model.params):
            raise ValueError("'early-exit' needs layers that are not stacked")
        if layers is None:
            layers = tuple(range(max(1, model.config.num_layers // 2)))
        own = paged.PagedForward(model.config, bounds.numerics)
        drafter = draft_model.self_speculative(own, layers)
    elif method == "lookahead":
        if bounds.numerics == "reproducible":
            raise ValueError(REPRODUCIBLE_TREES)
        drafter = lookahead.sized(bounds.max_drafts)
    else:
        drafter = NGram() if method == "ngram" else Jacobi()
    return dataclasses.replace(served, speculation=Speculation(drafter, Coupled()))


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


def _beside(
    served: Served, model: Model, draft: Model, bounds: Any, dtype: str
) -> Served:
    """Has another model draft."""
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
