"""transformers as trainer and llama.cpp as sampler, in processes of their own."""

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32

from experiments.decoding.rollout_mismatch.samplers import LENGTH
from experiments.decoding.rollout_mismatch.schedules import ReportedLogprobs
from experiments.harness import MODEL_PEERS, PeerProcess, format_absent, start_peers
from jaxkv.models import LoadedModel, save_model

TRANSFORMERS_ROW = "reproducible, trained by transformers"
LLAMA_ROW = "llama.cpp, trained by score"
"""Names of the peers in the table."""


class TransformersTrainer:
    """Scores sequences by transformers in float32."""

    def __init__(self, peer: PeerProcess):
        self._peer = peer

    def score(
        self, reported: ReportedLogprobs
    ) -> Float32[np.ndarray, "sequences length"]:
        """Returns the log-probability of each token, 0 at the first and at padding."""
        pairs = zip(reported.tokens, reported.lengths, strict=True)
        sequences = [tokens[:length].tolist() for tokens, length in pairs]
        scores = np.zeros(reported.tokens.shape, np.float32)
        logprobs = self._peer.ask({"sequences": sequences})["logprobs"]
        for row, values in enumerate(logprobs):
            scores[row, 1 : 1 + len(values)] = values
        return scores


class LlamaSampler:
    """Samples answers by llama.cpp in float32."""

    name = LLAMA_ROW

    def __init__(self, peer: PeerProcess):
        self._peer = peer

    def sample(
        self, prompts: Sequence[list[int]], num_tokens: int, seed: int
    ) -> tuple[ReportedLogprobs, float]:
        """Returns answers with their log-probabilities, and the seconds."""
        question = {"prompts": prompts, "sampled_tokens": num_tokens, "seed": seed}
        answer = self._peer.ask(question)
        tokens = np.zeros((len(prompts), LENGTH), np.int32)
        logprobs = np.full(tokens.shape, np.nan, np.float32)
        lengths = np.array([len(prompt) + num_tokens for prompt in prompts], np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : lengths[row]] = prompt + answer["tokens"][row]
            logprobs[row, len(prompt) : lengths[row]] = answer["logprobs"][row]
        reported = ReportedLogprobs(tokens, lengths, logprobs, ~np.isnan(logprobs))
        return reported, answer["seconds"]


class ModelPeers(NamedTuple):
    """Peers of a model; None where they are absent."""

    trainer: TransformersTrainer | None
    sampler: LlamaSampler | None


def start_model_peers(
    stack: contextlib.ExitStack, python: Path | None, model: LoadedModel
) -> tuple[ModelPeers, str]:
    """Starts transformers and llama.cpp with a model, if an interpreter has them.

    Args:
      stack: exit stack that ends them.
      python: the interpreter; None starts none.
      model: the model; its weights are given as float32.

    Returns:
      The peers, and the absent ones with the reason.

    Raises:
      ValueError: the interpreter cannot be started.
    """
    if python is None:
        return ModelPeers(None, None), f"{', '.join(MODEL_PEERS)}: no peer_python"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "model")
        save_model(folder, model.config, model.params, dtype="float32")
        peers = {name: (*words, folder) for name, words in MODEL_PEERS.items()}
        processes, absent = start_peers(stack, PeerProcess, python, peers)
    by_name = {process.name: process for process in processes}
    trainer = by_name.get("transformers")
    sampler = by_name.get("llama.cpp")
    return (
        ModelPeers(
            None if trainer is None else TransformersTrainer(trainer),
            None if sampler is None else LlamaSampler(sampler),
        ),
        format_absent(absent),
    )
