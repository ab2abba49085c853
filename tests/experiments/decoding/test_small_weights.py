"""Bytes and rounding of weights, recomputed by slow methods."""

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.decoding.small_weights import experiment
from jaxkv import models, scoring
from jaxkv.models import load_model, quantize_params
from jaxkv.models.layers import inputs_axis
from jaxkv.progress import Quiet
from tests.support import engines


def params_by_path(params: Any) -> dict[tuple[Any, ...], np.ndarray]:
    pairs = jax.tree_util.tree_leaves_with_path(params)
    return {tuple(key.key for key in path): np.asarray(x) for path, x in pairs}


@pytest.mark.parametrize("name", ["stdlib-bytes", "stdlib-bytes-deepseek"])
def test_bytes_are_those_of_codes_and_scales(name: str) -> None:
    model = load_model(name)
    arrays = params_by_path(model.params)
    # Codes and scales by the definitions of int8 and mxfp4.
    for weights, scale_bytes, code_bytes in (("int8", 4, 1), ("mxfp4", 1, 0.5)):
        stored = read = quantized = num_weights = 0.0
        for path, array in arrays.items():
            num_bytes = float(array.nbytes)
            if (axis := inputs_axis(path)) is not None:
                num_inputs = array.shape[axis]
                block = num_inputs if weights == "int8" else np.gcd(32, num_inputs)
                num_bytes = array.size * code_bytes + array.size / block * scale_bytes
                quantized += num_bytes
                num_weights += array.size
            stored += num_bytes
            if path[0] == "ahead":
                continue
            if path[-3:-1] in (("mixture", "up"), ("mixture", "down")):
                num_bytes *= 4 / 16
            elif path[0] == "embed" and ("head", "weight") in arrays:
                num_bytes = 128 * 4
            read += num_bytes
        small = quantize_params(model.params, weights)
        counted = experiment.count_weight_bytes(model.config, small)
        assert counted == pytest.approx((8 * quantized / num_weights, stored, read))
        # The claims: at most 1.05 times Q8_0, and at most Q4_0.
        other = 34 / 32 * 1.05 if weights == "int8" else 18 / 32
        assert quantized / num_weights <= other


def test_blocks_of_llama_cpp() -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(3, 5, 48)).astype(np.float32)
    weight[0, 0] = 0
    for name, step in (("Q8_0", 1 / 127), ("Q4_0", 1 / 8)):
        rounded = experiment.round_to_blocks(weight, name)
        for place in np.ndindex(3, 5):
            for start in (0, 32):
                block = weight[place][start : start + 32]
                size = step * float(max(abs(block)))
                if name == "Q4_0" and block[np.argmax(abs(block))] > 0:
                    size = -size
                low, high = (-127, 127) if name == "Q8_0" else (-8, 7)
                # The nearest of the integers that the format has.
                grid = np.arange(low, high + 1) * size
                nearest = grid[np.abs(grid[:, None] - block).argmin(0)]
                bound = 2e-3 * max(abs(block)) + 1e-12  # the scale is a float16
                assert (
                    abs(rounded[place][start : start + 32] - nearest) <= bound
                ).all()


class Stopped(Quiet):
    """Progress of a run that was stopped before its first model."""

    def track[T](self, items: Iterable[T], label: str, unit: str) -> Iterator[T]:
        return iter(())


def test_a_stopped_run_has_no_claims() -> None:
    result = experiment.run(experiment.CONFIGS["smoke"], Stopped())
    assert len(result.runs) == 0
    assert experiment.claims(result) == []


@pytest.mark.slow
def test_the_loss_is_that_of_the_library(tmp_path: Path) -> None:
    config = dataclasses.replace(
        experiment.CONFIGS["smoke"],
        models=(engines.save_tiny_model(tmp_path / "model", max_positions=64),),
        formats=("int8",),
    )
    runs = experiment.run(config).runs
    assert runs.weights.tolist() == ["float32", "int8"]
    assert (runs.loss[0], runs.ratio[0]) == (0, 1)
    model = models.load_model(config.models[0])
    tokens = np.concatenate(experiment.cut_pieces(config, model))
    cost = scoring.weights_cost(
        config.models[0], tokens, weights="int8", max_length=config.sequence_tokens
    )
    assert runs.loss[1] == pytest.approx(cost.loss, abs=1e-9)
    assert runs.stored_bytes.tolist() == [cost.model_bytes, cost.quantized_bytes]
