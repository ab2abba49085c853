"""A model and what it is asked for: the settings that all formulas share."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from scaling.costs import Attention, Device, Layout, activations, devices
from scaling.costs.devices import Precision
from scaling.costs.flops import Checkpointing
from scaling.costs.memory import MIXED, SINGLE, Bytes
from scaling.shapes import Description


class CostCase(NamedTuple):
    """A model and what it is asked for, looked up and checked.

    Attributes:
      model: its shape.
      batch: sequences.
      sequence: tokens of each.
      device: the accelerator.
      layout: how the model is divided.
      dtype: of weights, keys and values.
      checkpointing: what training keeps.
      attention: how pairs of query and key are counted.
      flash: whether attention works in tiles.
      dropout: whether training drops out.
    """

    model: Description
    batch: int
    sequence: int
    device: Device
    layout: Layout
    dtype: Precision
    checkpointing: Checkpointing
    attention: Attention
    flash: bool
    dropout: bool

    @property
    def number_bytes(self) -> int:
        """Of a weight, and of a number of K or V, when serving."""
        return devices.BYTES[self.dtype]

    @property
    def bytes_per_param(self) -> Bytes:
        """Of weights, gradients and optimizer when training."""
        return SINGLE if self.dtype == "float32" else MIXED

    @property
    def ridge(self) -> float:
        """Operations per byte from which on products take the device's time."""
        return self.device.ridge(self.dtype)

    @property
    def stored(self) -> tuple[activations.Stored, ...]:
        """Tensors that a layer keeps for the backward pass."""
        return self.evaluate(
            activations.stored, number_bytes=self.bytes_per_param.weight
        )

    def evaluate[T](self, formula: Callable[..., T], **change: Any) -> T:
        """What a formula of `scaling.costs` gives for this case.

        Args:
          formula: is given those settings that it has parameters for.
          change: other settings, and what it needs beside them.
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
        given = {name: settings[name] for name in settings if name in takes}
        return formula(**given | change)
