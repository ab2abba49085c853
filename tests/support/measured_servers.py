"""A measured server for tests of fits to tables."""

import dataclasses

from scaling.calibration import MeasuredServer
from scaling.costs import find_device
from scaling.shapes import describe


def make_server(model: str = "qwen3-8b", **changes: object) -> MeasuredServer:
    """Returns a server of one H100 with 16 requests at a time, changed by fields."""
    server = MeasuredServer(
        name="row",
        engine="vllm",
        checkpoint=f"owner/{model}",
        model=describe(model),
        device=find_device("h100"),
        weight_format="bf16",
        num_devices=1,
        data_parallel=1,
        expert_parallel=1,
        concurrency=16.0,
        prompt_tokens=512.0,
        answer_tokens=128.0,
        token_s=0.01,
    )
    return dataclasses.replace(server, **changes)
