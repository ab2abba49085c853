"""Servers and their loads."""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxkv import clock, validation
from jaxkv.workloads import Workload, make_workload
from scaling.calibration.server_cost import (
    ServerCoefficients,
    ServerCost,
    make_server_cost,
)
from scaling.costs import (
    Device,
    count_parameters,
    kv_bytes_per_token,
    sequence_state_bytes,
)
from scaling.shapes import HeadAttention, ModelShape

type ArrivalProcess = Literal["constant", "poisson"]

WARM_UP_S = 8.0
WINDOW_S = 25.0
"""Least seconds of load before the window, and length of the window."""
_ANSWERS_IN_WARM_UP = 1.2
_JITTER_S = 5e-3
"""Largest delay of an arrival of a "constant" load, in s."""
_TAIL_S_PER_TOKEN = 0.02
_MAX_TAIL_S = 30.0
"""Load after the window: seconds per token of an answer, and limit in s."""
RESERVED_BYTES = 0.57e9
RESERVED_BYTES_PER_WORD = 1e4
"""Memory of a device without weights and blocks: a constant, and bytes for each entry
of the vocabulary, since vLLM samples from float32 logits when it measures its peak.

Calibrated: fitted to the blocks that vLLM 0.15 reported for Llama-2-7B, Llama-3.1-70B
on four H100s, and Mistral-Nemo on one and two. The four counts are within 0.3 %. The
constant includes the memory that nvidia-smi reports and CUDA does not offer.
"""


@validation.checks_numbers(
    memory_share="(0, 1]", reserved_bytes="[0, 1e18]", num_sequences=(0, 2**31 - 1)
)
def num_kv_blocks(
    model: ModelShape,
    device: Device,
    *,
    tensor_parallel: int = 1,
    block_size: int = 16,
    memory_share: int | float = 0.9,
    reserved_bytes: int | float | None = None,
    num_sequences: int = 0,
) -> int:
    """Returns the blocks of the KV cache of a vLLM server in 16 bits.

    Each device has `memory_share` of its memory for its part of the weights, for
    activations and runtime, and for blocks of all layers. Llama-2-7B on an H100: (77.0
    - 13.5 - 0.9) GB / 8.4 MB = 7,465 blocks; vLLM 0.15 reports 7,463.

    Args:
      model: shape of the model.
      device: accelerator.
      tensor_parallel: number of devices.
      block_size: tokens of a block.
      memory_share: vLLM's `gpu_memory_utilization`, in (0, 1].
      reserved_bytes: activations of the largest step and runtime, per device, which
        vLLM measures when it starts. None means `RESERVED_BYTES` and
        `RESERVED_BYTES_PER_WORD` for each entry of the vocabulary. Steps of more than
        2,048 tokens or 256 sequences need more.
      num_sequences: sequences whose states of recurrent layers are kept outside of the
        blocks.

    Raises:
      ValueError: the model does not fit, or a share is out of range. The message names
        a degree of tensor parallelism and a share that fit.
    """
    if not 0 < memory_share <= 1:
        raise ValueError(f"{memory_share=} must be in (0, 1]")
    if reserved_bytes is None:
        reserved_bytes = RESERVED_BYTES + RESERVED_BYTES_PER_WORD * model.vocab_size
    weights = 2 * count_parameters(model).total
    block_bytes = block_size * kv_bytes_per_token(model)
    state_bytes = num_sequences * sequence_state_bytes(model)

    def count(degree: int, share: int | float) -> int:
        heads = 1
        if isinstance(model.attention, HeadAttention):
            heads = min(degree, model.attention.num_kv_heads)
        room = share * device.memory_bytes - reserved_bytes
        room -= (weights + state_bytes) / degree
        return int(room // (block_bytes / heads))

    if (blocks := count(tensor_parallel, memory_share)) >= 1:
        return blocks
    degrees = (2**k for k in range(1, 11) if 2**k > tensor_parallel)
    degree = next((x for x in degrees if count(x, memory_share) >= 1), None)
    ways = ["a device with more memory"]
    if degree is not None:
        ways = [f"a tensor-parallel degree of {degree}"]
    shares = (k / 100 for k in range(1, 100) if k / 100 > memory_share)
    share = next((x for x in shares if count(tensor_parallel, x) >= 1), None)
    if share is not None:
        ways.append(f"a memory utilization of {share:g}")
    raise ValueError(
        f"{model.name} does not fit into {tensor_parallel} {device.name}: "
        f"{weights / tensor_parallel / 1e9:.1f} GB of 16-bit weights each and "
        f"{reserved_bytes / 1e9:.1f} GB of activations leave no block in "
        f"{memory_share:g} of {device.memory_bytes / 1e9:.1f} GB; {' or '.join(ways)} "
        "is enough"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSetup:
    """A vLLM server in 16 bits; settings have vLLM's names."""

    model: ModelShape
    """Shape of the model."""
    device: Device
    """Accelerator."""
    tensor_parallel: int = 1
    """Devices that divide the model."""
    max_model_len: int
    """Largest length of a sequence in tokens, at least 2."""
    max_num_batched_tokens: int = 2048
    """Largest number of tokens fed in a step."""
    max_num_seqs: int = 128
    """Largest number of running sequences."""
    block_size: int = 16
    """Tokens of a block of the KV cache."""
    gpu_memory_utilization: float = 0.9
    """Share of the devices' memory that the server uses, in (0, 1]."""
    num_blocks: int | None = None
    """Blocks of the KV cache; None if they follow from the devices' memory."""

    @property
    def num_kv_blocks(self) -> int:
        """Blocks of the KV cache.

        Raises:
          ValueError: the weights do not fit into the devices.
        """
        if self.num_blocks is not None:
            return self.num_blocks
        return num_kv_blocks(
            self.model,
            self.device,
            tensor_parallel=self.tensor_parallel,
            block_size=self.block_size,
            memory_share=self.gpu_memory_utilization,
            num_sequences=self.max_num_seqs,
        )

    def cost(self, coefficients: ServerCoefficients) -> ServerCost:
        """Returns the cost of a step with coefficients, see `make_server_cost`."""
        return make_server_cost(
            self.model,
            self.device,
            jax.tree.map(jnp.float32, coefficients),
            tensor_parallel=self.tensor_parallel,
            max_length=self.max_model_len,
        )


class ServerLoad(NamedTuple):
    """Requests of a server, and the window in which they are measured."""

    workload: Workload
    warm_up_s: float
    """Start of the window in s."""
    window_s: float
    """Length of the window in s."""
    resident_blocks: int = 0
    """Blocks of the prompts in the prefix cache."""

    @property
    def is_measured(self) -> Bool[np.ndarray, " requests"]:
        """True for requests that arrive in the window, or wait for others' answers."""
        arrival_s = clock.to_seconds(np.asarray(self.workload.arrival))
        end_s = self.warm_up_s + self.window_s
        is_measured = (arrival_s >= self.warm_up_s) & (arrival_s < end_s)
        if (dependencies := self.workload.dependencies) is not None:
            is_measured = is_measured | (np.asarray(dependencies.lane) >= 0)
        return is_measured


@validation.checks_numbers(end_to_end_s=validation.SECONDS)
def choose_warm_up_s(end_to_end_s: float) -> float:
    """Returns a warm-up in s after which about as many requests run as later.

    Args:
      end_to_end_s: expected mean end-to-end time of the requests in s.
    """
    return max(WARM_UP_S, _ANSWERS_IN_WARM_UP * end_to_end_s)


@validation.checks_numbers(
    warm_up_s=validation.SECONDS, window_s=validation.SECONDS, answer_tokens="[0, 1e15]"
)
def load_duration_s(
    warm_up_s: float, window_s: float, answer_tokens: int | float
) -> float:
    """Returns the seconds of load that a window needs: requests arrive after it, too.

    Args:
      warm_up_s: start of the window in s.
      window_s: length of the window in s.
      answer_tokens: tokens of an answer.
    """
    tail_s = min(_TAIL_S_PER_TOKEN * answer_tokens, _MAX_TAIL_S)
    return warm_up_s + window_s + tail_s


@validation.checks_numbers(rate_per_s="[1e-9, 1e9]", num=0)
def draw_arrivals(
    rng: np.random.Generator, kind: ArrivalProcess, *, rate_per_s: float, num: int
) -> Float[np.ndarray, " num"]:
    """Draws the arrival times of a client's requests in s.

    Args:
      rng: random generator.
      kind: "poisson", or "constant": evenly spaced, with delays of up to 5 ms.
      rate_per_s: mean requests per second.
      num: requests.
    """
    if kind == "poisson":
        return np.cumsum(rng.exponential(1 / rate_per_s, num))
    return np.sort(np.arange(num) / rate_per_s + _JITTER_S * rng.random(num))


@validation.checks_numbers(
    warm_up_s=validation.SECONDS, window_s=validation.SECONDS, resident_blocks=0
)
def make_server_load(
    arrival_s: Float[np.ndarray, " requests"],
    prompt: Int[np.ndarray, " requests"],
    answer: Int[np.ndarray, " requests"],
    *,
    prefix_tokens: Int[np.ndarray, " requests"],
    block_size: int,
    warm_up_s: float,
    window_s: float,
    resident_blocks: int = 0,
) -> ServerLoad:
    """Makes a load whose prompts begin with tokens that the server knows.

    Full blocks of the known tokens are cached; the last token of a prompt is always
    fed.

    Args:
      arrival_s: arrival times in s, ascending.
      prompt: tokens of each prompt, known ones included.
      answer: tokens of each answer.
      prefix_tokens: leading tokens of each prompt that an earlier prompt had as well;
        0 without a prefix cache.
      block_size: tokens of a block.
      warm_up_s: start of the window in s.
      window_s: length of the window in s.
      resident_blocks: blocks of the known tokens, which stay in memory.

    Raises:
      ValueError: a number is out of range, or no request arrives in the window.
    """
    cached = np.minimum(prefix_tokens, prompt - 1) // block_size * block_size
    workload = make_workload(arrival_s, prompt - cached, answer, context=cached)
    load = ServerLoad(workload, warm_up_s, window_s, resident_blocks)
    if not load.is_measured.any():
        raise ValueError(f"{window_s=} must be longer: no request arrives in it")
    return load
