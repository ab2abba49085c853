"""Systems of the training benchmark: jaxkv, and PyTorch in a separate process."""

import functools
import math
import tempfile
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import PeerProcess, time_call
from jaxkv.models import ModelConfig
from scaling.corpora import draw_windows
from scaling.costs import find_device
from scaling.training import (
    LearningRateSchedule,
    OptimizerConfig,
    StepConfig,
    compiled_steps,
    init_train_state,
    training_flops,
)

PEER_SCRIPT = Path(__file__).with_name("peer_script.py")
PEERS = {
    "PyTorch": (PEER_SCRIPT, "EagerTrainer"),
    "PyTorch, compiled": (PEER_SCRIPT, "CompiledTrainer"),
}
"""File and class of each peer, by name."""
NUM_CHECKED = 4
"""Steps whose losses are compared."""
CALL_STEPS = 10
"""Fewest steps per call in a turn: the default of `TrainConfig.report_every`."""
LEARNING_RATE = 1e-3
OPTIMIZER = OptimizerConfig(kind="adamw", max_grad_norm=math.inf)
_PROBE = 2048


class JaxkvTrainer:
    """Training steps of jaxkv, many per call. The constructor compiles.

    Args:
      model: model to train.
      batch_size: windows per step.
      seq_len: predictions per window.
      dtype: type of the forward and backward pass.
    """

    name = "jaxkv"
    version = f"jax {jax.__version__}"
    optimizer = "optax"

    def __init__(
        self,
        model: ModelConfig,
        batch_size: int,
        seq_len: int,
        dtype: Literal["float32", "bfloat16"] = "float32",
    ):
        self.model = model
        self._dtype = dtype
        self._shape = {"batch_size": batch_size, "seq_len": seq_len}
        self._tokens = batch_size * seq_len
        step_flops = training_flops(model, batch=batch_size, sequence=seq_len)
        self.flops_per_token = step_flops / self._tokens
        self._seed = jnp.int32(0)
        num = max(100_000, 2 * seq_len + 2)
        text = np.random.default_rng(0).integers(0, model.vocab_size, num, np.uint16)
        self._stream = jnp.asarray(text)
        how = StepConfig(dtype=dtype)
        self._call = compiled_steps(model, OPTIMIZER, batch_size, seq_len, how)
        self._state = init_train_state(model, OPTIMIZER, self._seed)
        self.params = self._state.params
        first_s, first = time_call(self._train, 1)
        later_steps = range(NUM_CHECKED - 1)
        later_s, later = time_call(lambda: [self._train(1) for _ in later_steps])
        self.losses = [first, *later]
        self._step_s = later_s / len(later_steps)
        self.compile_s = max(0.0, first_s - self._step_s)

    def windows(self) -> np.ndarray:
        """Returns the text of the compared steps, [steps, batch, seq_len + 1]."""
        draw = functools.partial(draw_windows, self._stream, self._seed, **self._shape)
        return np.asarray(jax.vmap(draw)(jnp.arange(NUM_CHECKED, dtype=jnp.int32)))

    def rate(self, seconds: float) -> float:
        """Returns the training rate in tokens/s, in calls of a tenth of the time.

        A call has `CALL_STEPS` steps at least: its first step also touches new memory.
        """
        taken_s = 0.0
        num = 0
        while taken_s < seconds:
            num_steps = max(CALL_STEPS, round(seconds / 10 / self._step_s))
            some_s, _ = time_call(self._train, num_steps)
            self._step_s = some_s / num_steps
            taken_s += some_s
            num += num_steps
        return num * self._tokens / taken_s

    def utilisation(self, rate: float) -> float | None:
        """Returns the share of the accelerator's peak rate; None on a CPU."""
        if jax.default_backend() == "cpu":
            return None
        kind = jax.local_devices()[0].device_kind
        try:
            device = find_device(kind.removeprefix("NVIDIA "))
        except ValueError:  # an unknown device
            return None
        return rate * self.flops_per_token / device.rate(self._dtype)

    def _train(self, num_steps: int) -> float:
        schedule = LearningRateSchedule.constant(LEARNING_RATE)
        self._state, info = self._call(
            self._state, self._stream, schedule, self._seed, jnp.int32(num_steps)
        )
        return float(info.loss)


class PyTorchTrainer(PeerProcess):
    """PyTorch in a separate process, as a context; leaving it ends the process."""

    def prepare(self, trainer: JaxkvTrainer, seconds: float) -> None:
        """Makes the peer build the same model, and train the first steps."""
        arrays: dict[str, Any] = {"windows": trainer.windows()}
        for path, leaf in jax.tree.leaves_with_path(trainer.params):
            name = ".".join(str(getattr(x, "key", getattr(x, "idx", ""))) for x in path)
            arrays[name] = np.asarray(leaf)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "start.npz")
            np.savez(file, **arrays)
            reply = self.ask(
                {
                    "file": str(file),
                    "num_heads": trainer.model.num_q_heads,
                    "eps": trainer.model.norm_eps,
                    "learning_rate": LEARNING_RATE,
                    "betas": [OPTIMIZER.beta1, OPTIMIZER.beta2],
                    "weight_decay": OPTIMIZER.weight_decay,
                    "trial_s": seconds / 4,
                }
            )
        self.losses = reply["losses"]
        self.compile_s = reply["compile_s"]
        self.optimizer = f"AdamW, {reply['optimizer']}"

    def rate(self, seconds: float) -> float:
        """Returns the tokens per second of continued training.

        Raises:
          ValueError: the peer failed, with its last error line.
        """
        return self.ask({"seconds": seconds})["tokens_per_s"]


def product_rate(dtype: str) -> float:
    """Returns the operations per second of square matrix products, the best of 8."""
    x = jnp.ones((_PROBE, _PROBE), dtype)
    product = jax.jit(jnp.matmul)

    def multiply() -> jax.Array:
        return jax.block_until_ready(product(x, x))

    multiply()
    return 2 * _PROBE**3 / min(time_call(multiply)[0] for _ in range(8))
