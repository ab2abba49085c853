"""Memory for 10^6 requests: reading, prefix caches and simulation."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

NUM = 10**6
MEASURE = """
import resource, sys
from pathlib import Path
import jax, jax.numpy as jnp
import numpy as np
from jaxkv import scheduling, simulation, workloads

def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def cost(work):
    return 1e-3 + 1e-6 * jnp.float32(work.num_decodes + work.num_prompt_rows)

def simulate(num):
    rng = np.random.default_rng(0)
    load = workloads.make_workload(
        np.cumsum(rng.exponential(1e-4, num)),
        rng.integers(1, 17, num),
        rng.integers(1, 4, num),
    )
    capacity = simulation.Capacity.of(num_pages=4096, token_budget=4096)
    member = simulation.SimulationMember(load, capacity, scheduling.fcfs(), cost)
    return simulation.simulate(simulation.stack([member]), max_slots=128, head=16)

if sys.argv[1] == "simulate":
    simulate(1000)
    before = peak_mb()
    num = int(np.isfinite(simulate(10**6).finish_s).sum())
else:
    before = peak_mb()
    found = workloads.read_recording(Path(sys.argv[1]))
    num = found.prompt.size
print(num, peak_mb() - before)
"""


def measure(case: str | Path) -> tuple[int, float]:
    """Runs a case in a process of its own.

    Returns:
      The number of requests, and MB of memory in use at most, beyond those before.
    """
    command = [sys.executable, "-c", MEASURE, str(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    num, peak = done.stdout.split()
    return int(num), float(peak)


@pytest.mark.slow
def test_a_million_rows_of_csv_take_250_mb(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "requests.csv"
    times = np.cumsum(rng.exponential(0.01, NUM)).tolist()
    lengths = rng.integers(1, 2000, (NUM, 2)).tolist()
    with path.open("w") as file:
        file.write("arrival_s,prompt_tokens,output_tokens\n")
        for time, (prompt, output) in zip(times, lengths, strict=True):
            file.write(f"{time:.6f},{prompt},{output}\n")
    num, peak = measure(path)
    assert num == NUM
    assert peak < 250


@pytest.mark.slow
def test_a_million_rows_of_ten_chunks_take_400_mb(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "requests.jsonl"
    sizes = rng.integers(5, 16, NUM).tolist()
    with path.open("w") as file:
        for i, size in enumerate(sizes):
            ids = [i % 1000, *range(1000 + 16 * i, 999 + 16 * i + size)]
            row = {"timestamp": 10 * i, "input_length": 512 * size - i % 512}
            file.write(json.dumps(row | {"output_length": 9, "hash_ids": ids}) + "\n")
    num, peak = measure(path)
    assert num == NUM
    assert peak < 400


@pytest.mark.slow
def test_a_million_requests_are_simulated_in_500_mb() -> None:
    num, peak = measure("simulate")
    assert num == NUM
    assert peak < 500
