"""Layouts of a model over devices: degrees of each kind of parallelism."""

import dataclasses
import math
from typing import Annotated, Any

from jaxkv import validation
from jaxkv.validation import ConfigRecord, PositiveInt, Range
from scaling.shapes import LatentAttention, ModelShape


class Layout(ConfigRecord):
    """Degrees of parallelism; 1 means no division of that kind.

    Devices are `tensor x pipeline x ring x ulysses x data x pages`. Experts are divided
    over devices that replicate the other weights: `expert` divides
    `data x ring x ulysses`.
    """

    tensor: PositiveInt = 1
    """Tensor parallelism: heads, FFN columns and vocabulary are divided."""
    sequence: bool = False
    """True for Megatron's sequence parallelism: norms and dropout between
    tensor-parallel products are divided by sequence."""
    pipeline: PositiveInt = 1
    """Pipeline parallelism: number of stages into which layers are divided."""
    ulysses: PositiveInt = 1
    """DeepSpeed-Ulysses: the sequence is divided; attention exchanges it for heads."""
    ring: PositiveInt = 1
    """Ring attention: the sequence is divided; keys and values pass round the ring."""
    pages: PositiveInt = 1
    """Decode context parallelism, for serving only: every page is divided, each device
    attends over its part, and the states are merged."""
    expert: PositiveInt = 1
    """Expert parallelism: experts are divided."""
    capacity: Annotated[float | None, Range(0, ends="(]")] = None
    """GShard's capacity factor: largest number of rows that a device sends to an
    expert, over the even share; further choices are dropped. None: no limit."""
    gather: bool = False
    """True if devices that divide experts gather all their tokens, instead of sending
    each token to its experts."""
    data: PositiveInt = 1
    """Data parallelism: batches are divided."""
    zero: int = 0
    """ZeRO stage: data-parallel devices divide 1 optimizer state, 2 also gradients, 3
    also weights (Rajbhandari et al. 2019, arXiv:1910.02054)."""

    def __post_init__(self) -> None:
        """Validates the degrees."""
        super().__post_init__()
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero={self.zero} must be 0, 1, 2 or 3")
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "sequence (sp) divides the sequence over the devices of tensor (tp), "
                "and tensor=1: ulysses or ring divide it without"
            )
        how = [x for x in ("capacity", "gather") if getattr(self, x)]
        if how and self.expert == 1:
            raise ValueError(f"{how[0]} is for expert parallelism, and expert=1")
        if len(how) > 1:
            raise ValueError(f"capacity={self.capacity} and gather exclude each other")
        if self.copies % self.expert:
            raise ValueError(
                f"expert={self.expert} must divide data x ring x ulysses={self.copies}"
            )

    def places(self, num_rows: int, *, top_k: int, num_experts: int) -> int:
        """Returns the most rows that a device with `num_rows` rows sends to an expert.

        `capacity` times the even share, rounded up, and at most `num_rows`, since a row
        chooses an expert once.
        """
        if self.capacity is None:
            return num_rows
        even = num_rows * top_k / num_experts
        return min(num_rows, math.ceil(self.capacity * even))

    @property
    def num_devices(self) -> int:
        """Total number of devices."""
        return self.tensor * self.pipeline * self.copies * self.pages

    @property
    def copies(self) -> int:
        """Devices that replicate weights outside experts, which ZeRO divides."""
        return self.data * self.context

    @property
    def sharing(self) -> int:
        """Devices of one copy of the model in serving."""
        spread = max(self.context, self.expert)
        return self.tensor * self.pipeline * spread * self.pages

    @property
    def context(self) -> int:
        """Number of parts of a sequence."""
        return self.ring * self.ulysses


_AXIS_NAMES = {
    "tp": "tensor",
    "sp": "sequence",
    "pp": "pipeline",
    "cp": "pages",
    "ep": "expert",
    "dp": "data",
}


@validation.checks_numbers(zero=0)
def parse_layout(text: str, *, zero: int = 0) -> Layout:
    """Parses a layout such as `tp=8,sp,pp=2,dp=4`.

    Args:
      text: names of fields, or tp, sp, pp, ep, dp and cp (pages), with degrees;
        `sequence` and `gather` have none. "" means one device. Without `data`, `expert`
        sets the number of data-parallel devices: `ep=8` alone is 8 devices.
      zero: ZeRO stage.

    Raises:
      ValueError: a name is unknown or repeated, a degree is not a whole number of at
        least 1, or `sequence` is set without `tensor`.
    """
    names = {field.name for field in dataclasses.fields(Layout)} - {"zero"}
    degrees: dict[str, Any] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = word.partition("=")
        name = _AXIS_NAMES.get(key, key)
        if name not in names:
            choices = ", ".join(sorted({*_AXIS_NAMES, *names}))
            raise ValueError(
                f"unknown parallelism {key!r} in {text!r}; one of: {choices}"
            )
        if name in degrees:
            raise ValueError(f"{name} is given twice in {text!r}")
        if name == "capacity":
            try:
                degrees[name] = float(value)
            except ValueError:
                degrees[name] = math.nan
            if not 0 < degrees[name] < math.inf:
                raise ValueError(
                    f"{word!r} in {text!r} needs a number above 0, such as 1.25"
                )
            continue
        if name in ("sequence", "gather"):
            if value:
                of = "tp's" if name == "sequence" else "ep's"
                raise ValueError(f"{word!r} in {text!r}: {key} has no degree but {of}")
            value = "1"
        if not value.isdecimal() or int(value) < 1:
            raise ValueError(f"{word!r} in {text!r} needs a degree of at least 1")
        degrees[name] = int(value)
    flags = {name: name in degrees for name in ("sequence", "gather")}
    context = degrees.get("ring", 1) * degrees.get("ulysses", 1)
    if "data" not in degrees and degrees.get("expert", 1) % context == 0:
        degrees["data"] = max(1, degrees.get("expert", 1) // context)
    return Layout(**(degrees | flags), zero=zero)


@validation.checks_numbers(sequence=validation.SIZES)
def check_layout(
    model: ModelShape, layout: Layout, *, sequence: int | None = None
) -> None:
    """Checks that a layout divides a model evenly.

    If there are fewer KV heads than devices, they are replicated, as in serving
    engines; their number must divide the degree.

    Args:
      model: shape of the model.
      layout: the degrees.
      sequence: tokens of a sequence, if the layout divides them.

    Raises:
      ValueError: a degree does not divide its size; the message has the first one.
    """
    if model.num_recurrent_layers or model.branches or model.layer_sizes:
        layers = "recurrent layers" if model.num_recurrent_layers else "single branches"
        degrees = {
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
            "ring": layout.ring,
            "ulysses": layout.ulysses,
            "pages": layout.pages,
        }
        if model.layer_sizes:
            degrees["expert"] = layout.expert
            layers = "layers with sizes of their own"
        for name, degree in degrees.items():
            if degree > 1:
                raise ValueError(
                    f"{name}={degree} must be 1: the {layers} of {model.name} "
                    "are not divided"
                )
    heads = model.attention.num_q_heads
    experts = model.experts
    kv_heads = model.attention.num_kv_heads
    divided = [
        ("tensor", layout.tensor, "query heads", heads),
        ("pipeline", layout.pipeline, "layers", model.num_layers),
        ("ulysses", layout.ulysses * layout.tensor, "query heads", heads),
    ]
    if model.num_dense_layers:
        divided.append(("tensor", layout.tensor, "FFN width", model.mlp_size))
    if experts is None and layout.expert > 1:
        raise ValueError(
            f"expert={layout.expert} needs a mixture; {model.name} is none"
        )
    if experts is not None:
        divided += [
            ("expert", layout.expert, "experts", experts.num_experts),
            ("tensor", layout.tensor, "experts' width", experts.size),
            ("tensor", layout.tensor, "shared experts' width", experts.shared_size),
        ]
    if sequence is not None:
        inside = layout.tensor if layout.sequence else 1
        names = {"ring": layout.ring, "ulysses": layout.ulysses, "tensor": inside}
        name = " x ".join(x for x, degree in names.items() if degree > 1)
        divided.append((name, layout.context * inside, "tokens", sequence))
    for name, degree, what, size in divided:
        if size % degree:
            parts = what.removesuffix("s") if size == 1 else what
            raise ValueError(f"{name}={degree} must divide the {size} {parts}")
    if isinstance(model.attention, LatentAttention):
        return
    by_heads = {"tensor": layout.tensor, "ulysses": layout.ulysses * layout.tensor}
    for name, degree in by_heads.items():
        if kv_heads % degree and degree % kv_heads:
            raise ValueError(
                f"{name}={degree} must divide the {kv_heads} KV heads, or be a "
                "multiple of them"
            )
