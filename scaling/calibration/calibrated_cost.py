"""The published posterior of vLLM servers as a cost model of steps."""

import jax
import jax.numpy as jnp

from jaxkv import validation
from scaling.calibration.posterior_files import load_posterior
from scaling.calibration.server_cost import (
    ServerCost,
    draw_coefficients,
    make_server_cost,
)
from scaling.costs import CostModel, Device
from scaling.shapes import ModelShape


@validation.checks_numbers()
def make_calibrated_cost(
    model: ModelShape,
    device: Device,
    *,
    num_devices: int = 1,
    name: str = "calibrated",
) -> CostModel[ServerCost]:
    """Returns the cost model of a vLLM server at the mode of the published posterior.

    The coefficients were fitted to servers on H100s. For another device they are
    assumed to be the same shares of its data sheet, and the same overheads in s. The
    delays of a request outside the steps are not included.

    Args:
      model: shape of the model.
      device: accelerator.
      num_devices: degree of tensor parallelism.
      name: name of the cost model.

    Raises:
      ValueError: the degree does not divide the model, or the model has windows.
    """
    posterior = load_posterior()
    coefficients = jax.tree.map(jnp.float32, draw_coefficients(posterior.mode))
    return CostModel(
        name=name,
        cost=make_server_cost(model, device, coefficients, tensor_parallel=num_devices),
        source=f"scaling.calibration, fitted to {len(posterior.stages)} load stages of "
        "vLLM servers on H100s",
        validity="16 bits on H100s; other devices that reach the same shares of their "
        "data sheets",
        error=None,
    )
