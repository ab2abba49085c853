"""Measures how far a sampler and a trainer disagree about the same tokens.

In reinforcement learning the engine samples answers and a trainer computes their
log-probabilities again. Three parts:

* bits: log-probabilities that reproducible engines of four families report under many
  schedules, compared with `jaxkv.score`;
* samplers: divergence and speed of a bundled model's samplers, with transformers as
  trainer and llama.cpp as sampler if an interpreter has them;
* faults: mistakes planted in sampler or trainer, each to be found by comparing bits.
"""

import contextlib
import gc
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import jax
import numpy as np
from jaxtyping import Float, Float32

from experiments import lab
from experiments.decoding.rollout_mismatch import peer_models, samplers, schedules
from experiments.decoding.rollout_mismatch.faults import FAULTS, FaultContext
from experiments.decoding.rollout_mismatch.peer_models import (
    LLAMA_ROW,
    TRANSFORMERS_ROW,
    LlamaSampler,
    ModelPeers,
)
from experiments.decoding.rollout_mismatch.samplers import SAMPLERS
from experiments.decoding.rollout_mismatch.schedules import ReportedLogprobs
from experiments.harness import (
    cut_held_out_prompts,
    load_text_model,
    measure_in_turns,
)
from jaxkv import files
from jaxkv.models import LoadedModel, load_model
from jaxkv.parallel import set_cpu_devices
from jaxkv.sampling import Sampling

DTYPES = ("float32", "bfloat16")
FAMILY_NAMES = tuple(schedules.FAMILIES)


class Config(lab.ConfigRecord):
    """Schedules, samplers and faults."""

    families: Annotated[tuple[str, ...], lab.Choices(FAMILY_NAMES, minimum=1)] = (
        FAMILY_NAMES
    )
    """Families of small random models whose bits are compared."""
    dtypes: Annotated[
        tuple[Literal["float32", "bfloat16"], ...], lab.Choices(DTYPES, minimum=1)
    ] = DTYPES
    """Types of their weights, K and V."""
    num_setups: Annotated[int, lab.Range(1, len(schedules.SETUPS))] = len(
        schedules.SETUPS
    )
    """Engines of each family, each with every load."""
    num_requests: lab.PositiveInt = 12
    """Requests of each load."""
    model: str = "stdlib-bytes"
    """Folder or bundled model of samplers and faults."""
    num_prompts: lab.PositiveInt = 32
    """Prompts that are answered at once by each sampler."""
    answer_tokens: Annotated[int, lab.Range(2, 128)] = 64
    """Tokens of each answer."""
    rounds: lab.PositiveInt = 5
    """Timed rounds of all samplers."""
    num_faults: Annotated[int, lab.Range(0, len(FAULTS))] = len(FAULTS)
    """Planted faults."""
    peer_python: Path | None = None
    """Python interpreter with transformers, or llama_cpp and gguf, or all of them: a
    trainer and a sampler of the same weights. None compares neither."""


CONFIGS = {
    "real": Config(),
    "smoke": Config(
        families=("dense",),
        dtypes=("float32",),
        num_setups=1,
        num_requests=4,
        num_prompts=2,
        answer_tokens=4,
        rounds=1,
        num_faults=2,
    ),
}


class ComparedBits(lab.ResultTable):
    """Log-probabilities of engines, compared with `jaxkv.score`."""

    family: lab.Texts = lab.column("a name in `FAMILIES`")
    dtype: lab.Texts = lab.column("type of weights, K and V")
    setup: lab.Texts = lab.column("a name in `SETUPS`")
    load: lab.Texts = lab.column("one of `LOADS`")
    num_logprobs: lab.Ints = lab.column("reported", heading="log-probabilities")
    num_different: lab.Ints = lab.column("not equal to `score`", heading="different")


class SamplerTable(lab.ResultTable):
    """Divergence and speed of the samplers."""

    sampler: lab.Texts = lab.column("a name in `SAMPLERS`, or of a peer")
    num_tokens: lab.Ints = lab.column("tokens of the answers", heading="tokens")
    different_share: lab.Floats = lab.column(
        "tokens whose log-probabilities differ", heading="different"
    )
    k1: lab.Floats = lab.column("mean of log p - log q", form="{:.1e}")
    k3: lab.Floats = lab.column("mean of r - 1 - log r", form="{:.1e}")
    largest_logprob: lab.Floats = lab.column(
        "largest difference", heading="largest |Δ log p|", form="{:.1e}"
    )
    largest_probability: lab.Floats = lab.column(
        "largest difference", heading="largest |Δ p|", form="{:.1e}"
    )
    tokens_per_s: Float[np.ndarray, "rows rounds"] = lab.column(
        "tokens of the answers over the time of all, prompts included", of=np.median
    )
    ratio: lab.Floats = lab.column(
        "speed over that of `fast`, median of rounds",
        heading="over fast",
        form="{:.2f}",
    )


class PlantedFaults(lab.ResultTable):
    """Faults, and the tokens whose bits show them."""

    fault: lab.Texts = lab.column("a name in `FAULTS`")
    num_tokens: lab.Ints = lab.column("tokens of the answers", heading="tokens")
    num_different: lab.Ints = lab.column("tokens with other bits", heading="different")
    largest_logprob: lab.Floats = lab.column(
        "largest difference", heading="largest |Δ log p|", form="{:.1e}"
    )


class Result(lab.ResultRecord):
    """Equal bits, divergence and price, and planted faults."""

    bits: ComparedBits = lab.column(
        "every family, type and schedule",
        heading="Bits of reproducible engines, compared with `jaxkv.score`",
    )
    samplers: SamplerTable = lab.column(
        "samplers of the model", heading="Samplers and trainers, {0.model}"
    )
    faults: PlantedFaults = lab.column(
        "faults of sampler or trainer", heading="Planted faults"
    )
    model: str = lab.column("model of samplers and faults")
    absent: str = lab.column("peers that were not compared", heading="absent peers")

    @property
    @lab.computed_column(heading="log-probabilities")
    def num_logprobs(self) -> int:
        """Number of log-probabilities whose bits were compared."""
        return int(self.bits.num_logprobs.sum())

    @property
    @lab.computed_column(heading="different log-probabilities")
    def num_different(self) -> int:
        """Number of them that differ."""
        return int(self.bits.num_different.sum())


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Compares bits, then samplers, then faults; a stopped run has complete parts."""
    use_two_devices()
    rows = []
    pairs = [(family, dtype) for family in config.families for dtype in config.dtypes]
    for family, dtype in progress.track(pairs, "comparing bits", "models"):
        rows += [
            {
                "family": family,
                "dtype": dtype,
                "setup": setup,
                "load": load,
                **counts._asdict(),
            }
            for setup, load, counts in schedules.count_schedules(
                family,
                dtype,
                num_setups=config.num_setups,
                num_requests=config.num_requests,
            )
        ]
        # Linux ends a process with 65,530 memory mappings, of which programs have many.
        jax.clear_caches()
        gc.collect()
    folder = str(files.model_folder(config.model))
    model = load_text_model(config.model, max_length=samplers.LENGTH)
    prompts = _prompts(model, config)
    with contextlib.ExitStack() as stack:
        peers, absent = peer_models.start_model_peers(stack, config.peer_python, model)
        if absent:
            progress.show(f"without {absent}")
        table = _compare_samplers(config, folder, prompts, peers, progress)
    return Result(
        ComparedBits.of(rows),
        table,
        _plant_faults(config, folder, model, prompts, progress),
        config.model,
        absent,
    )


def use_two_devices() -> None:
    """Splits a CPU into two devices, before JAX initializes them."""
    set_cpu_devices(2)


def _prompts(model: LoadedModel, config: Config) -> list[list[int]]:
    """Cuts prompts of 16 to 112 tokens from held-out files."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(16, 113, config.num_prompts).tolist()
    asks = [Sampling()] * config.num_prompts
    requests = cut_held_out_prompts(model.tokenizer, sizes, asks, rng)
    return [request.tokens for request in requests]


class _Sampling:
    """A sampler with its engine, and the trainer's model."""

    def __init__(self, name: str, folder: str, num_prompts: int):
        self.name = name
        self.sampler = SAMPLERS[name]
        self.engine = samplers.make_sampler(folder, self.sampler, num_prompts)
        self.model = load_model(folder, dtype=self.sampler.trainer_dtype)

    def sample(
        self, prompts: list[list[int]], num_tokens: int, seed: int
    ) -> tuple[ReportedLogprobs, float]:
        """Returns sampled answers, and the seconds."""
        return samplers.sample_answers(self.engine, prompts, num_tokens, seed)

    def score(self, reported: ReportedLogprobs) -> Float32[np.ndarray, "rows length"]:
        """Returns the trainer's log-probabilities."""
        return samplers.score_reported(self.model, reported, self.sampler.trainer)


def _compare_samplers(
    config: Config,
    folder: str,
    prompts: list[list[int]],
    peers: ModelPeers,
    progress: lab.Progress,
) -> SamplerTable:
    """Samples with every sampler in rotation; the first answers are compared.

    The row of a peer that trains has the speed of the reproducible sampler.
    """
    mismatches: dict[str, samplers.Mismatch] = {}
    sampler_of = {name: name for name in (*SAMPLERS, LLAMA_ROW)}
    sampler_of[TRANSFORMERS_ROW] = "reproducible"

    def begin(case: str) -> list[_Sampling | LlamaSampler]:
        systems: list[_Sampling | LlamaSampler] = [
            _Sampling(name, folder, len(prompts)) for name in SAMPLERS
        ]
        trainer = systems[0]
        if peers.sampler is not None:
            systems.append(peers.sampler)
        for system in systems:
            reported, _ = system.sample(prompts, config.answer_tokens, seed=0)
            scorer = system if isinstance(system, _Sampling) else trainer
            assert isinstance(scorer, _Sampling)
            mismatches[system.name] = samplers.measure_mismatch(
                reported.logprobs, scorer.score(reported)
            )
            if system is trainer and peers.trainer is not None:
                mismatches[TRANSFORMERS_ROW] = samplers.measure_mismatch(
                    reported.logprobs, peers.trainer.score(reported)
                )
        return systems

    def measure(case: str, system: _Sampling | LlamaSampler) -> float:
        _, seconds = system.sample(prompts, config.answer_tokens, seed=1)
        return len(prompts) * config.answer_tokens / seconds

    rows = []
    for _, _, rates in measure_in_turns(
        [config.model],
        config.rounds,
        begin,
        measure,
        progress=progress,
        bar_label="sampling",
        case_name="model",
    ):
        for name, mismatch in mismatches.items():
            sampled = rates[sampler_of[name]]
            ratios = [x / y for x, y in zip(sampled, rates["fast"], strict=True)]
            row = mismatch._asdict()
            num_different = row.pop("num_different")
            rows.append(
                {
                    "sampler": name,
                    "different_share": num_different / mismatch.num_tokens,
                    "tokens_per_s": sampled,
                    "ratio": statistics.median(ratios),
                    **row,
                }
            )
    return SamplerTable.of(rows)


def _plant_faults(
    config: Config,
    folder: str,
    model: LoadedModel,
    prompts: list[list[int]],
    progress: lab.Progress,
) -> PlantedFaults:
    """Plants one fault after another in the reproducible sampler or its trainer."""
    if progress.stopped:
        return PlantedFaults.of([])
    engine = samplers.make_sampler(folder, SAMPLERS["reproducible"], len(prompts))
    num_tokens = config.answer_tokens
    reported, _ = samplers.sample_answers(engine, prompts, num_tokens, seed=0)
    case = FaultContext(folder, model, engine, prompts, reported, num_tokens)
    names = [*FAULTS][: config.num_faults]
    if len(jax.devices()) < 2 and "a reduction over two devices" in names:
        names.remove("a reduction over two devices")
    rows = []
    for name in progress.track(names, "planting faults", "faults"):
        sampled, trained = FAULTS[name](case)
        mismatch = samplers.measure_mismatch(sampled, trained)
        rows.append(
            {
                "fault": name,
                "num_tokens": mismatch.num_tokens,
                "num_different": mismatch.num_different,
                "largest_logprob": mismatch.largest_logprob,
            }
        )
    return PlantedFaults.of(rows)


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws divergence against speed, and the tokens that show each fault."""
    first, second = axes
    table = result.samplers
    smallest = 1e-15  # zero has no place on a logarithmic axis
    names = table.sampler.tolist()
    first.scatter(np.maximum(table.k3, smallest), names, color=lab.colors()[lab.BLUE])
    for row, (k3, ratio) in enumerate(zip(table.k3, table.ratio, strict=True)):
        text = f"{k3:.0e}, speed {ratio:.2f}" if k3 else f"0, speed {ratio:.2f}"
        lab.annotate(first, text, (max(k3, smallest), row), (6, -3))
    first.invert_yaxis()
    first.set_xlim(smallest, 1)
    title = "k3 of sampler and trainer, and speed over fast"
    lab.set_labels(first, title, "k3 [nats]", "", xscale="log")
    planted = result.faults
    shares = planted.num_different / np.maximum(planted.num_tokens, 1)
    second.barh(planted.fault, shares, color=lab.colors()[lab.BLUE])
    second.invert_yaxis()
    title = f"Bits show {(shares > 0).sum()} of {len(shares)} planted faults"
    lab.set_labels(second, title, "tokens with other bits [share]", "")


@lab.claims_file(__file__).judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares counts with those of an exact sampler, and k3 with published values."""
    if result.num_logprobs:
        yield lab.measured("bits", result.num_different, num=result.num_logprobs)
    if len(result.samplers.k3):
        exact = result.samplers.where(sampler="reproducible")
        yield lab.measured("exact", float(exact.k3[0]))
        fast = result.samplers.where(sampler="fast, bfloat16")
        yield lab.measured("published", float(fast.k3[0]))
    if len(result.faults.fault):
        num_caught = int((result.faults.num_different > 0).sum())
        yield lab.measured(
            "faults",
            num_caught / len(result.faults.fault),
            num=len(result.faults.fault),
        )


STUDY = lab.Study(
    CONFIGS,
    Result,
    run,
    plot,
    claims,
    panels=lab.Panels(2, 1, 3.0),
    prepare=use_two_devices,
)
