"""Mistakes that make a trainer disagree with a sampler, planted one at a time.

Each is of a kind that trainers of language models have: the two sides differ in
numerics, in a constant, in the parameters or in the tokens. All are found by comparing
bits, and most are too small to be found by a tolerance.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

import jaxkv
from experiments.decoding.rollout_mismatch import samplers
from experiments.decoding.rollout_mismatch.samplers import SAMPLERS
from experiments.decoding.rollout_mismatch.schedules import ReportedLogprobs
from jaxkv.models import LoadedModel, load_model
from jaxkv.parallel import make_mesh
from jaxkv.sampling import Sampling
from jaxkv.serving import read_model_folder

SMALL_UPDATE = 1e-4
"""Relative change of every parameter by an update of the policy."""


class FaultContext(NamedTuple):
    """A reproducible sampler, its answers, and the model that scores them."""

    folder: str
    model: LoadedModel
    engine: jaxkv.Engine
    prompts: list[list[int]]
    reported: ReportedLogprobs
    num_tokens: int


type Logprobs = Float32[np.ndarray, "sequences length"]
type Fault = Callable[[FaultContext], tuple[Logprobs, Logprobs]]
"""Returns log-probabilities of the sampler and of the trainer."""


def _score(
    case: FaultContext,
    reported: ReportedLogprobs | None = None,
    sampling: Sampling | None = None,
    **config: float,
) -> Logprobs:
    """Scores sequences by a model with some constants changed."""
    reported = case.reported if reported is None else reported
    model = dataclasses.replace(case.model.config, **config)
    scores = jaxkv.score(
        case.model.params,
        reported.tokens,
        reported.lengths,
        config=model,
        sampling=sampling,
    )
    return np.asarray(scores)


def _sample(case: FaultContext, name: str) -> ReportedLogprobs:
    """Samples answers by another engine."""
    engine = samplers.make_sampler(case.folder, SAMPLERS[name], len(case.prompts))
    return samplers.sample_answers(engine, case.prompts, case.num_tokens, seed=0)[0]


def _updated(model: LoadedModel) -> LoadedModel:
    factor = np.float32(1 + SMALL_UPDATE)
    return model._replace(params=jax.tree.map(lambda x: x * factor, model.params))


def other_tiles(case: FaultContext) -> tuple[Logprobs, Logprobs]:
    """The trainer computes whole sequences in place of tiles of rows."""
    scores = samplers.score_reported(case.model, case.reported, "logits")
    return case.reported.logprobs, scores


def rounded_logprobs(case: FaultContext) -> tuple[Logprobs, Logprobs]:
    """The sampler's log-probabilities are stored in bfloat16."""
    stored = case.reported.logprobs.astype(jnp.bfloat16).astype(np.float32)
    return stored, _score(case)


def other_temperature(case: FaultContext) -> tuple[Logprobs, Logprobs]:
    """The trainer divides the logits by 0.99."""
    return case.reported.logprobs, _score(case, sampling=Sampling(temperature=0.99))


def stale_kv(case: FaultContext) -> tuple[Logprobs, Logprobs]:
    """The sampler gets new parameters, and keeps the prompts' K and V of the old."""
    model = _updated(case.model)
    before = case.engine.params
    case.engine.params = jax.tree.map(
        lambda x: x * np.asarray(1 + SMALL_UPDATE, x.dtype), before
    )
    reported, _ = samplers.sample_answers(
        case.engine, case.prompts, case.num_tokens, seed=0
    )
    case.engine.params = before
    case.engine.set_params(case.model.params)  # K and V of both are unusable now
    return reported.logprobs, samplers.score_reported(model, reported)


def stale_parameters(case: FaultContext) -> tuple[Logprobs, Logprobs]:
    """The trainer is one update ahead of the sampler."""
    scores = samplers.score_reported(_updated(case.model), case.reported)
    return case.reported.logprobs, scores


def other_type(case: FaultContext) -> tuple[Logprobs, Logprobs]:
    """The trainer computes in bfloat16."""
    model = load_model(case.folder, dtype="bfloat16")
    return case.reported.logprobs, samplers.score_reported(model, case.reported)


def quantised_kv(case: FaultContext) -> tuple[Logprobs, Logprobs]:
    """The sampler has K and V of 8 bits."""
    reported = _sample(case, "8-bit K and V")
    return reported.logprobs, _score(case, reported)


def fast_numerics(case: FaultContext) -> tuple[Logprobs, Logprobs]:
    """The sampler has ordinary numerics."""
    reported = _sample(case, "fast")
    return reported.logprobs, _score(case, reported)


def other_rotation(case: FaultContext) -> tuple[Logprobs, Logprobs]:
    """The base of the trainer's rotary positions is larger by one in a million."""
    base = case.model.config.rope_theta * (1 + 1e-6)
    return case.reported.logprobs, _score(case, rope_theta=base)


def other_epsilon(case: FaultContext) -> tuple[Logprobs, Logprobs]:
    """The epsilon of the trainer's norms is twice the sampler's."""
    eps = 2 * case.model.config.norm_eps
    return case.reported.logprobs, _score(case, norm_eps=eps)


def lost_token(case: FaultContext) -> tuple[Logprobs, Logprobs]:
    """The trainer's sequences lack the first token of the prompt."""
    suffix = ReportedLogprobs(
        np.ascontiguousarray(case.reported.tokens[:, 1:]),
        case.reported.lengths - 1,
        case.reported.logprobs[:, 1:],
        case.reported.is_reported[:, 1:],
    )
    return suffix.logprobs, _score(case, suffix)


def other_reduction(case: FaultContext) -> tuple[Logprobs, Logprobs]:
    """The trainer sums over two devices, the sampler on one."""
    mesh = make_mesh(tensor=2)
    model = read_model_folder(case.folder, dtype="float32", mesh=mesh)
    scores = jaxkv.score(
        model.params,
        case.reported.tokens,
        case.reported.lengths,
        config=case.model.config,
        mesh=mesh,
    )
    return case.reported.logprobs, np.asarray(scores)


FAULTS: dict[str, Fault] = {
    "whole sequences in place of tiles": other_tiles,
    "log-probabilities in bfloat16": rounded_logprobs,
    "temperature of 0.99": other_temperature,
    "stale K and V": stale_kv,
    "stale parameters": stale_parameters,
    "a trainer in bfloat16": other_type,
    "8-bit K and V": quantised_kv,
    "ordinary numerics": fast_numerics,
    "another rotary base": other_rotation,
    "another epsilon": other_epsilon,
    "a lost token": lost_token,
    "a reduction over two devices": other_reduction,
}
"""Faults by name."""
