"""Experiments bench decode."""

from experiments.bench.decode.peers import Answerer as Answerer

__all__ = [
    "Answerer",
    "peers",
]
