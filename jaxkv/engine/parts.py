"""What an engine is made of: `EngineParts`, and the `EngineRules` of its steps."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh
from jaxtyping import PyTree

from jaxkv import validation
from jaxkv.arrays import ArrayOrShape
from jaxkv.engine.drafting import Speculation
from jaxkv.engine.emitting import LogitsFn
from jaxkv.engine.state import EngineConfig
from jaxkv.memory import Eviction, Pages
from jaxkv.models import Forward
from jaxkv.sampling import GrammarTables
from jaxkv.scheduling import Policy, fcfs


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True, eq=False)
class EngineParts:
    """A model with its memory, bounds and text, as an `Engine` serves it."""

    params: PyTree[ArrayOrShape]
    """Parameters, as `forward` takes them."""
    forward: Forward
    """The model."""
    pages: Pages
    """Its K and V arrays; an engine consumes them."""
    config: EngineConfig
    """The bounds."""
    tokenizer: Any = None
    """A `text.Tokenizer` or `text.ByteTokenizer`, or an object with their `encode`,
    `stream`, `stop_search` and `eos_ids`; needed for text."""
    eos_ids: Sequence[int] | None = None
    """Tokens that end an answer; None takes the tokenizer's."""
    vocab_size: int | None = None
    """Bound on token ids; None does not check them."""
    mesh: Mesh | None = None
    """Devices to divide the model and its pages over, see `parallel.make_mesh`; the
    parameters must be those that `parallel.tensor.place_params` returns. None means one
    device."""
    adapters: Sequence[str] = ()
    """Names of the adapters in the parameters, see `models.load_adapters`, for
    `Sampling.adapter`."""


@validation.suggests_keywords
@dataclasses.dataclass(frozen=True, eq=False)
class EngineRules:
    """Rules of an engine's steps; the fields are arguments of `step`."""

    policy: Policy = dataclasses.field(default_factory=fcfs)
    """Scheduling policy."""
    eviction: Eviction | None = None
    """Eviction rule of the prefix cache; None means `prefix_eviction.LRU()`."""
    logits_fn: LogitsFn | None = None
    """Changes logits before a token is sampled; a plain function, compiled once for
    each function object."""
    speculation: Speculation | None = None
    """Drafter and verifier, see `jaxkv.speculation`, with a draft length of at most
    `EngineConfig.max_drafts`. None decodes without drafts."""
    grammars: GrammarTables | None = None
    """Grammars of the running requests, which an `Engine` loads; None without them."""
