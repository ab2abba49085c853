"""Other simulators of vLLM servers, for `peer_main`.

A question is a load stage: `{"model", "config", "device", "tensor_parallel",
"max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size", "num_prompts",
"rate_per_s", "requests"}`. `config` is the model's config.json. A request is
`[arrival in us, prompt tokens, cached prompt tokens, answer tokens, is measured]`;
requests repeat the distinct prompts in turn. The answer is `{"seconds", "cpu_s",
"end_to_end_s", "first_token_s"}`: wall-clock and processor time, and the mean
end-to-end and the median first-token time of the measured requests.
"""

import contextlib
import csv
import importlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from importlib import metadata
from pathlib import Path

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_TRACE_COLUMNS = (
    *("request_id", "client_id", "tenant_id", "slo_class", "session_id"),
    *("round_index", "prefix_group", "prefix_length", "streaming", "input_tokens"),
    *("output_tokens", "text_tokens", "image_tokens", "audio_tokens"),
    *("video_tokens", "reason_ratio", "model", "deadline_us", "server_input_tokens"),
    *("arrival_time_us", "send_time_us", "first_chunk_time_us", "last_chunk_time_us"),
    *("num_chunks", "status", "error_message", "finish_reason"),
)
"""Columns of BLIS's trace, version 2."""
_MAX_TURNS = 50


class Blis:
    """BLIS, a discrete-event simulator with coefficients fitted to vLLM servers.

    It replays the requests of the stage. Each distinct prompt is a prefix group, whose
    blocks are cached after its first request.

    Source: github.com/inference-sim/inference-sim.

    Args:
      folder: checkout with the built program, `go build -o blis main.go`.
      model: `trained-physics` (its default) or `roofline`.
      num_threads: ignored; the program has one thread.

    Raises:
      ValueError: the folder has no such program.
    """

    version = "trained-physics of defaults.yaml"

    def __init__(self, folder, model, num_threads=""):
        self._folder = Path(folder).resolve()
        self._model = model
        if not (self._folder / "blis").is_file():
            raise ValueError(f"{folder}: no program blis")
        self.version = f"{model} of defaults.yaml"

    def answer(self, question):
        """Runs the program once.

        Raises:
          ValueError: it failed, with its last line; or it did not finish a request.
        """
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_trace(folder, question)
            write_config(folder / "model", question)
            options = {
                "model": question["model"],
                "model-config-folder": folder / "model",
                "hardware": question["device"].upper(),
                "tp": question["tensor_parallel"],
                "latency-model": self._model,
                "max-model-len": question["max_model_len"],
                "max-num-seqs": question["max_num_seqs"],
                "max-num-batched-tokens": question["max_num_batched_tokens"],
                "block-size-in-tokens": question["block_size"],
                "trace-header": folder / "trace.yaml",
                "trace-data": folder / "trace.csv",
                "results-path": folder / "results.json",
            }
            words = [f"--{name}={value}" for name, value in options.items()]
            call = [str(self._folder / "blis"), "replay", *words]
            with timed() as taken:
                ran = subprocess.run(
                    call, cwd=self._folder, capture_output=True, text=True, check=False
                )
            if ran.returncode:
                last = (ran.stderr.strip() or ran.stdout.strip()).split("\n")[-1]
                raise ValueError(f"blis: {last}")
            results = json.loads((folder / "results.json").read_text("utf-8"))
        result_by_id = {int(x["request_id"]): x for x in results}
        indices = [i for i, x in enumerate(question["requests"]) if x[4]]
        if missing := [i for i in indices if i not in result_by_id]:
            raise ValueError(f"blis: {len(missing)} requests without an answer")
        return {
            **taken,
            "end_to_end_s": statistics.fmean(result_by_id[i]["e2e_us"] for i in indices)
            / 1e6,
            "first_token_s": statistics.median(
                result_by_id[i]["ttft_us"] for i in indices
            )
            / 1e6,
        }


class AIConfigurator:
    """AIConfigurator, a steady state from tables of measured kernels.

    It predicts a batch, not a load: the batch is the number of requests in the system
    by Little's law, rate times latency.

    Source: github.com/ai-dynamo/aiconfigurator.

    Args:
      num_threads: ignored.

    Raises:
      ImportError: the package is missing.
    """

    def __init__(self, num_threads=""):
        self._estimate = importlib.import_module("aiconfigurator.cli.api").cli_estimate
        self.version = metadata.version("aiconfigurator")

    def answer(self, question):
        """Estimates batches up to the fixed point of Little's law."""
        requests = [x for x in question["requests"] if x[4]]
        prompt, cached, output = (
            round(statistics.fmean(x[i] for x in requests)) for i in (1, 2, 3)
        )
        degree = question["tensor_parallel"]
        how = {}
        if "num_local_experts" in question["config"]:
            how["moe_tp_size"] = degree
        with tempfile.TemporaryDirectory() as name:
            write_config(Path(name), question)

            def estimate(batch):
                latencies = self._estimate(
                    name,
                    question["device"] + "_sxm",
                    backend_name="vllm",
                    isl=prompt,
                    osl=output,
                    prefix=cached,
                    batch_size=batch,
                    ctx_tokens=question["max_num_batched_tokens"],
                    tp_size=degree,
                    **how,
                )
                return latencies.request_latency / 1e3, latencies.ttft / 1e3

            with timed() as taken:
                whole_s, first_s = settle(
                    estimate, question["rate_per_s"], question["max_num_seqs"]
                )
        return {**taken, "end_to_end_s": whole_s, "first_token_s": first_s}


@contextlib.contextmanager
def timed():
    """Yields a dict that has the times of the context, children included, after it."""
    taken = {}
    start = time.perf_counter()
    cpu = sum(os.times()[:4])
    yield taken
    taken["seconds"] = time.perf_counter() - start
    taken["cpu_s"] = sum(os.times()[:4]) - cpu


def settle(estimate, rate_per_s, max_batch):
    """Returns the estimate at the batch b with b = rate times latency at b.

    The iteration starts at 1; as latency grows with the batch, it approaches the
    smallest such batch from below.

    Args:
      estimate: function from a batch to the latency in s, and further numbers.
      rate_per_s: requests per second.
      max_batch: largest batch.
    """
    batch = 1
    for _ in range(_MAX_TURNS):
        latencies = estimate(batch)
        after = min(max(round(rate_per_s * latencies[0]), 1), max_batch)
        if after == batch:
            break
        batch = after
    return latencies


def write_config(folder, question):
    """Writes the model's config.json with the names that both programs look for."""
    kind = question["config"]["model_type"]
    if kind not in _CLASSES:
        raise ValueError(f"model_type={kind!r} must be one of {', '.join(_CLASSES)}")
    config = {
        **question["config"],
        "architectures": [_CLASSES[kind]],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


def write_trace(folder, question):
    """Writes the requests as a trace of BLIS, with the prompts' whole blocks shared."""
    (folder / "trace.yaml").write_text(
        "trace_version: 2\ntime_unit: us\nmode: generated\n", "utf-8"
    )
    size = question["block_size"]
    is_cached = any(x[2] for x in question["requests"])
    with (folder / "trace.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _TRACE_COLUMNS, restval="0")
        writer.writeheader()
        for i, (arrival_us, prompt, _, output, _) in enumerate(question["requests"]):
            # The last token is always fed.
            shared = (prompt - 1) // size * size if is_cached else 0
            group = f"prompt-{i % question['num_prompts']}" if shared else ""
            row = {
                "request_id": i,
                "client_id": "0",
                "slo_class": "standard",
                "session_id": "",
                "prefix_group": group,
                "prefix_length": shared,
                "streaming": "true",
                "input_tokens": prompt - shared,
                "output_tokens": output,
                "text_tokens": prompt - shared,
                "model": "",
                "arrival_time_us": arrival_us,
                "send_time_us": arrival_us,
                "status": "ok",
                "error_message": "",
                "finish_reason": "",
            }
            writer.writerow(row)
