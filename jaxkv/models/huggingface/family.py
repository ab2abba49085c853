"""What a table says about a model family: keys of its configuration, names of tensors.

`configs.py` and `tensors.py` read the families that are served; `scaling.shapes`
computes the size of all families.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from jaxkv.models.config import ModelConfig

type RawConfig = dict[str, Any]
"""A parsed `config.json`."""
type PartRows = Callable[["ModelConfig"], Mapping[str, Sequence[int]]]
"""From a model to the rows of each part of a tensor."""

type KeyForm = Literal[
    "same", "inverse", "inverse_root", "parallel", "approximate", "doubled", "range"
]
"""Relations of a key's value to that of its fields: see `Key.form`."""

type Windows = Literal[
    "never", "always", "flagged", "off", "listed", "even", "pattern", "nope"
]
"""Rules of the layers with a window: see `Family.windows`."""


class Key(NamedTuple):
    """Meaning of one key of a `config.json`."""

    fields: tuple[str, ...]
    """Fields that the key sets."""
    default: object = None
    """Value of a missing key; None if the key is required or derived."""
    form: KeyForm = "same"
    """From the value x of the key to that of the field: x, 1 / x, x ** -0.5, "parallel"
    for true and "serial" for false, "gelu_tanh" for "gelu", 2 for true and 1 for false,
    or a list [low, high] to two fields."""


class Family(NamedTuple):
    """Configuration keys and tensor names of a family.

    Fields are those of `ModelConfig`, or of `scaling.shapes.ModelShape` if
    `ModelConfig` lacks one; a field of their experts is written `experts.size`.
    """

    architecture: str
    """Name in `architectures`."""
    keys: Mapping[str, Key]
    """Hugging Face's key -> the fields that it sets, and its default."""
    implied: Mapping[str, object]
    """Fields with a fixed value in this family."""
    derived: tuple[str, ...]
    """Fields that are derived from other fields if their key is missing or null."""
    base: str
    """Prefix of every tensor but the head's; some files omit it."""
    layer: str
    """Prefix of a layer's tensors, with a placeholder for its number."""
    modules: Mapping[str, tuple[str, ...]]
    """Module of this package -> the modules of the folder that it joins. Modules of a
    layer start with a dot.

    Several are joined in the order of `qkv` (query, key, value) or of `up` (gate, up).
    Modules of an expert have a placeholder for its number; without one, a tensor has
    all experts. An entry for one parameter of a module, such as ".sinks.bias", has the
    whole names of tensors. Empty for a family that is not served."""
    servable: bool = True
    """True if the engine serves this family; False if only its size is computed."""
    only: Mapping[str, object] = {}
    """Keys that change shapes, with the only supported value."""
    only_served: Mapping[str, object] = {}
    """Keys with the only value that is served; other values affect sizes only. It is
    the default, or the only value for which the family's implementations agree."""
    equal: Mapping[str, str] = {}
    """Keys that must have the value of another key."""
    aliases: Mapping[str, str] = {}
    """Alias -> key, `attribute_map` in transformers."""
    harmless: tuple[str, ...] = ()
    """Keys that change no logit of this family, besides `harmless.HARMLESS_KEYS`."""
    windows: Windows = "never"
    """Layers with the sliding window `sliding_window`, if `layer_types` is absent:
    `never`: none; `always`: all; `flagged`: those from `max_window_layers` on, if
    `use_sliding_window`; `off`: sized as `flagged`, but with another order of layers,
    so that only false is served; `listed`: as `off`, but layers in `layer_types` are
    served; `even`: layers 0, 2, ...; `pattern`: all but every
    `sliding_window_pattern`-th; `nope`: those without positions, if
    `use_sliding_window`."""
    window_period: int = 6
    """`sliding_window_pattern` of a file without that key."""
    default_window: int | None = None
    """`sliding_window` of a file without that key."""
    default_positions: int | None = None
    """`max_positions` of a file without its key; serving requires the key."""
    mixture_stride: tuple[str, int] | None = None
    """A key with a stride, and an offset: only layers whose number plus offset is a
    multiple of the stride are mixtures."""
    is_conv1d: bool = False
    """True if a layer's matrices are stored `[in, out]` (and q, k, v as one)."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies of a file without one."""
    local_theta: float | None = None
    """That base in layers with a window, if they have rotary keys of their own."""
    rope_kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    """Rotary kinds that are read."""
    rope: Mapping[str, object] | None = None
    """Rotary keys of a file without any."""
    rope_aliases: Mapping[str, str] = {}
    """Alias -> rotary key."""
    rope_share: float = 1.0
    """Part of a head that is rotary, of a file without `partial_rotary_factor`."""
    has_partial_rope: bool = False
    """True if a part of a head may be rotary."""
    rope_order: Literal["halves", "pairs", "swapped"] = "halves"
    """Place of the two features of rotary pair i of n in a head: i and i + n; 2 i and
    2 i + 1; or i + n and i."""
    position_keys: tuple[str, ...] = ()
    """Keys of positions of this family alone."""
    is_fused_by_head: bool = False
    """True if query, key and value of each head follow each other in one tensor."""
    interleaved: tuple[str, ...] = ()
    """Modules of experts whose last axis alternates between gate and up."""
    skips_ahead: bool = False
    """True if layers after the model's, for multi-token prediction, are not read."""
    rewrite: Callable[[RawConfig], RawConfig] | None = None
    """Replaces other forms of keys, nested ones for example, by those of the tables."""
    further_keys: Callable[["ModelConfig"], RawConfig] | None = None
    """Function from a `ModelConfig` to keys that other software needs in addition."""
    adapt: Callable[["ModelConfig", Mapping[str, Any]], "ModelConfig"] | None = None
    """Function from a model and its file to the model with sizes that differ by layer.
    """
    recurrent_modules: Mapping[str, tuple[str, ...]] = {}
    """As `modules`, where recurrent layers differ."""
    recurrent_norm_places: Literal["before", "after", "both"] | None = None
    """`AttentionKind.norm_places` of recurrent layers."""
    packed: Mapping[str, PartRows] = {}
    """Module of the folder whose tensors have the rows of several parts -> a function
    from a `ModelConfig` to the rows of each. `modules` has the parts as `module:part`.
    """
    other_names: Mapping[str, str] = {}
    """Module of the folder -> its name in some folders."""
    wrapper: str | None = None
    """Model type of files of a model with images whose `text_config` is of this
    family."""
    text_prefix: str | None = None
    """First part of the names of tensors in folders of such a model, for `base`."""
    ignored: tuple[str, ...] = ()
    """First parts of the names of tensors that are not read."""
    has_optional_experts: bool = False
    """True if 0 experts mean an MLP."""
    layer_types_key: str = "layer_types"
    """Key of a saved file with the types of its layers."""
    ignored_rope: tuple[str, ...] = ()
    """Rotary keys without effect."""

    @property
    def has_recurrence(self) -> bool:
        """True if some layers may be recurrent."""
        return "recurrence.kind" in self.implied

    @property
    def has_single_branches(self) -> bool:
        """True if a layer has one branch, see `ModelConfig.residual`."""
        return self.implied.get("residual") == "single"


def key(
    *fields: str,
    default: object = None,
    form: KeyForm = "same",
) -> Key:
    """Returns a key that sets fields."""
    return Key(fields, default, form)


def keys_of(
    keys: Mapping[str, Key], *without: str, **defaults: str | bool | int | float | None
) -> dict[str, Key]:
    """Returns a family's keys without some of them, and with other defaults."""
    return {
        key: value._replace(default=defaults.get(key, value.default))
        for key, value in keys.items()
        if key not in without
    }
