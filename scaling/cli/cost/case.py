"""A model with the settings that all cost formulas share."""

import inspect
from collections.abc import Callable
from typing import NamedTuple

from scaling.costs import (
    BYTES_PER_NUMBER,
    MIXED,
    SINGLE,
    Attention,
    BytesPerParam,
    Checkpointing,
    Device,
    Layout,
    Precision,
    StoredTensor,
    stored_tensors,
)
from scaling.shapes import ModelShape


class CostCase(NamedTuple):
    """A model with the settings of the formulas, validated.

    Attributes:
      model: shape of the model.
      batch: number of sequences.
      sequence: tokens per sequence.
      device: accelerator.
      layout: parallel layout.
      dtype: type of weights, keys and values.
      checkpointing: activation checkpointing in training.
      attention: pairs of query and key that are counted.
      flash: True for tiled attention.
      dropout: True if training uses dropout.
      weights: format of the layers' weights in serving.
    """

    model: ModelShape
    batch: int
    sequence: int
    device: Device
    layout: Layout
    dtype: Precision
    checkpointing: Checkpointing
    attention: Attention
    flash: bool
    dropout: bool
    weights: str = "model"

    @property
    def number_bytes(self) -> int:
        """Bytes of a weight, and of a number in K or V, in serving."""
        return BYTES_PER_NUMBER[self.dtype]

    @property
    def bytes_per_param(self) -> BytesPerParam:
        """Bytes of weights, gradients and optimizer state per parameter in training."""
        return SINGLE if self.dtype == "float32" else MIXED

    @property
    def ridge(self) -> float:
        """Operations per byte above which the device is compute-bound."""
        return self.device.ridge(self.dtype)

    @property
    def has_activations(self) -> bool:
        """True if activations of the model, and its training memory, are counted."""
        return not self.model.layer_sizes

    @property
    def stored(self) -> tuple[StoredTensor, ...]:
        """Tensors that a layer keeps for the backward pass."""
        return self.evaluate(stored_tensors, number_bytes=self.bytes_per_param.weight)

    def evaluate[T](self, formula: Callable[..., T], **change: object) -> T:
        """Returns the value of a formula of `scaling.costs` for this case.

        Args:
          formula: function that gets the settings it has parameters for.
          change: replacements of settings, and further arguments.
        """
        settings = self._asdict() | {
            "context": self.sequence,
            "prompt": self.sequence,
            "precision": self.dtype,
            "num_devices": self.layout.sharing,
            "weight_bytes": self.number_bytes,
            "kv_bytes": self.number_bytes,
            "bytes_per_param": self.bytes_per_param,
        }
        takes = inspect.signature(formula).parameters
        arguments = {name: settings[name] for name in settings if name in takes}
        return formula(**arguments | change)
