"""Memory of training on the device with the most, term by term.

Weights, gradients and optimizer state: Rajbhandari et al. 2019 (ZeRO),
arXiv:1910.02054, sections 3.1 and 5. Activations: `activations`, with
checkpoints after Chen et al. 2016, arXiv:1604.06174, and Korthikanti et al. 2022,
arXiv:2205.05198, section 5. Stages in flight: Narayanan et al. 2021, arXiv:2104.04473,
section 2.2.
"""

from collections import Counter
from typing import NamedTuple

from jaxkv import validation
from jaxkv.validation import ConfigRecord, NonNegativeInt
from scaling.costs import activations as costs_activations
from scaling.costs import parallelism, parameters
from scaling.costs.activations import layer_bytes
from scaling.costs.flops import Checkpointing
from scaling.costs.parallelism import Layout
from scaling.shapes import ModelShape


class BytesPerParam(ConfigRecord):
    """Bytes per parameter; the defaults are mixed-precision Adam's 16."""

    weight: NonNegativeInt = 2
    gradient: NonNegativeInt = 2
    master: NonNegativeInt = 4
    """Bytes of the float32 copy that is updated; 0 if the weights are updated."""
    moments: NonNegativeInt = 8
    """Bytes of Adam's two moments in float32; 0 for plain gradient descent."""


MIXED = BytesPerParam()
"""bfloat16 weights and gradients, float32 master copy and moments."""
MIXED_WIDE = BytesPerParam(gradient=4)
"""As `MIXED`, with gradients accumulated in float32: 18 bytes."""
SINGLE = BytesPerParam(weight=4, gradient=4, master=0, moments=8)
"""Everything in float32."""


class DeviceParams(NamedTuple):
    """Parameters on one device.

    Attributes:
      shared: parameters that `Layout.copies` devices replicate.
      experts: parameters of routed experts, which fewer devices replicate.
    """

    shared: int
    experts: int


class TrainingMemory(NamedTuple):
    """Peak bytes on one device during a training step.

    Attributes:
      weights: weights in the type of the computation.
      gradients: gradients of all weights.
      master: float32 copy of the weights.
      moments: optimizer state.
      activations: tensors that layers keep, of all micro-batches in flight.
      recomputed: tensors of one layer during its recomputation.
      ends: inputs of the final norm and of the head, and an embedding's dropout mask.
      logits: logits in float32.
      logits_gradient: gradient of the logits.
    """

    weights: float
    gradients: float
    master: float
    moments: float
    activations: float
    recomputed: float
    ends: float
    logits: float
    logits_gradient: float

    @property
    def model_state(self) -> float:
        """Bytes that do not depend on the batch."""
        return self.weights + self.gradients + self.master + self.moments

    @property
    def total(self) -> float:
        """Sum of all terms."""
        return sum(self)


@validation.checks_numbers(batch=validation.SIZES, sequence=validation.SIZES)
def training_memory(
    model: ModelShape,
    *,
    batch: int = 1,
    sequence: int,
    layout: Layout | None = None,
    bytes_per_param: BytesPerParam = MIXED,
    checkpointing: Checkpointing = "none",
    flash: bool = True,
    dropout: bool = False,
    micro_batches: int | None = None,
) -> TrainingMemory:
    """Returns the memory of one device, of the pipeline stage with the most.

    Llama-2-7B on one device: 107.81 GB of weights, gradients and optimizer.

    Args:
      model: shape of the model.
      batch: sequences of a micro-batch on one data-parallel device, at least 1.
      sequence: tokens of each sequence, at least 1.
      layout: division over devices; one device by default.
      bytes_per_param: bytes of weights, gradients and optimizer state.
      checkpointing: `none` keeps all; `selective` all but attention's weights, masks
        or log-sum-exp; `full` the input of every layer; `boundary` the same, plus the
        tensors of the layer that is recomputed.
      flash: True for flash attention.
      dropout: True if the model has dropout.
      micro_batches: micro-batches of a step, at least 1; `layout.pipeline` by default.
        The first stage keeps activations of up to `pipeline` of them.

    Raises:
      ValueError: a size is out of range, or a degree does not divide its size.
    """
    layout = layout or Layout()
    parallelism.check_layout(model, layout, sequence=sequence)
    micro_batches = layout.pipeline if micro_batches is None else micro_batches
    how = {"flash": flash, "dropout": dropout, "number_bytes": bytes_per_param.weight}
    sizes = batch, sequence, micro_batches
    stages = [
        _stage(model, stage, sizes, layout, bytes_per_param, checkpointing, how)
        for stage in range(layout.pipeline)
    ]
    return max(stages, key=lambda memory: memory.total)


def device_params(model: ModelShape, layout: Layout, *, stage: int = 0) -> DeviceParams:
    """Returns the parameters of one device, before ZeRO divides them.

    Norms, routers and biases of h numbers are replicated on all tensor-parallel
    devices; the vocabulary is rounded up to a multiple of them. Embeddings, head and
    last norm are on every pipeline stage, as in `scaling.training.pipeline`.

    Args:
      model: shape of the model.
      layout: division over devices.
      stage: index of the pipeline stage.
    """
    times = _times(model, layout, stage)
    counts: Counter[bool] = Counter()
    for weight in parameters.list_weights(model):
        is_expert = weight.split == "experts"
        counts[is_expert] += (
            _part(weight, model, layout) * weight.stored * times[weight.place]
        ) // (layout.expert if is_expert else 1)
    return DeviceParams(counts[False], counts[True])


def vocabulary_params(model: ModelShape, layout: Layout) -> int:
    """Returns the parameters of one device outside layers: tables, head, last norm."""
    return sum(
        _part(weight, model, layout) * weight.stored
        for weight in parameters.list_weights(model)
        if weight.place in ("first", "last")
    )


def max_undivided_params(model: ModelShape, layout: Layout) -> int:
    """Returns the parameters that tensor-parallel devices replicate: norms, biases.

    The number is that of the pipeline stage with the most.
    """
    weights = [
        w for w in parameters.list_weights(model) if w.split == "none" and w.stored
    ]
    stages = (_times(model, layout, stage) for stage in range(layout.pipeline))
    return max(sum(w.size * times[w.place] for w in weights) for times in stages)


def _times(model: ModelShape, layout: Layout, stage: int) -> Counter[parameters.Place]:
    """Returns the number of copies of a weight in a pipeline stage, by its place."""
    layers = _layers_of(model, layout, stage)
    times: Counter[parameters.Place] = Counter(
        {"first": 1, "every": len(layers), "last": 1}
    )
    times.update(sort for x in layers for sort in model.sorts_of(x))
    return times


def max_device_params(model: ModelShape, layout: Layout) -> DeviceParams:
    """Returns `device_params` of the device with the most."""
    stages = range(layout.pipeline)
    return max((device_params(model, layout, stage=stage) for stage in stages), key=sum)


def _stage(
    model, stage, sizes, layout, param_bytes, checkpointing, how
) -> TrainingMemory:
    batch, sequence, micro_batches = sizes
    params = device_params(model, layout, stage=stage)
    last = layout.pipeline - 1
    copies = layout.copies, layout.copies // layout.expert

    def state(size: int, divided_from: int) -> float:
        parts = copies if layout.zero >= divided_from else (1, 1)
        return size * sum(x / y for x, y in zip(params, parts, strict=True))

    tokens = batch * sequence // layout.context
    tensors = costs_activations.stored_tensors(model, sequence=sequence, **how)
    layers = _layers_of(model, layout, stage)
    full_bytes = layer_bytes(tensors, model, layers, layout)
    stored_bytes = full_bytes
    if checkpointing == "selective":
        left = tuple(tensor for tensor in tensors if tensor.part != "scores")
        stored_bytes = layer_bytes(left, model, layers, layout)
    width = model.hidden_size * param_bytes.weight
    if checkpointing in ("full", "boundary"):
        # Kept whole on every tensor-parallel device: Korthikanti et al. 2022, table 2.
        stored_bytes = [width] * len(layers)
    activations = tokens * sum(stored_bytes)
    again = tokens * max(full_bytes)
    logits = 4.0 * tokens * _vocab_part(model, layout) if stage == last else 0.0
    parts = layout.tensor if layout.sequence else 1
    ends = 2 * tokens * width / parts if stage == last else 0.0
    if how["dropout"] and stage == 0:
        ends += tokens * model.hidden_size / parts
    return TrainingMemory(
        weights=state(param_bytes.weight, 3),
        gradients=state(param_bytes.gradient, 2),
        master=state(param_bytes.master, 1),
        moments=state(param_bytes.moments, 1),
        activations=activations * min(layout.pipeline - stage, micro_batches),
        recomputed=again if checkpointing == "boundary" else 0.0,
        ends=ends,
        logits=logits,
        logits_gradient=logits,
    )


def _layers_of(model: ModelShape, layout: Layout, stage: int) -> range:
    layers_per_stage = model.num_layers // layout.pipeline
    return range(stage * layers_per_stage, (stage + 1) * layers_per_stage)


def _vocab_part(model: ModelShape, layout: Layout) -> int:
    return -(-model.vocab_size // layout.tensor)


def _part(weight: parameters.Weight, model: ModelShape, layout: Layout) -> int:
    """Returns the numbers of a weight on one tensor-parallel device."""
    if weight.split == "none":
        return weight.size
    if weight.split == "vocab":
        return _vocab_part(model, layout) * (weight.size // model.vocab_size)
    if weight.split == "kv_heads":
        return weight.size // min(layout.tensor, model.attention.num_kv_heads)
    return weight.size // layout.tensor
