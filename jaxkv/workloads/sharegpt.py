"""Lengths of the conversations of ShareGPT."""

import os
from collections.abc import Callable

import numpy as np

from jaxkv import files
from jaxkv.files import read_decompressed_text
from jaxkv.workloads.lengths import Lengths


def read_sharegpt(
    path: str | os.PathLike[str], encode: Callable[[str], list[int]]
) -> Lengths:
    """Reads the lengths of conversations: the first question and its answer.

    Conversations without both, or in which either has no token, are skipped.

    Args:
      path: JSON list of objects with `conversations`, lists of turns with `from` and
        `value`.
      encode: encoding function of a tokenizer.

    Returns:
      The lengths, in the order of the file.

    Raises:
      ValueError: the file cannot be read, is no such list, or no conversation is left;
        one line with the file and the entry, counted from 1.

    Source: the choice of turns is that of vLLM's `benchmarks/benchmark_serving.py`.
    """
    entries = files.parse_json(read_decompressed_text(path), path)
    if not isinstance(entries, list):
        raise ValueError(f"{path}: holds {type(entries).__name__}, not a list")
    conversations = []
    for number, entry in enumerate(entries, 1):
        try:
            texts = [turn["value"] for turn in entry["conversations"][:2]]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError
        except (KeyError, TypeError):
            raise ValueError(
                f"{path}: entry {number}: has no conversations of turns with a value"
            ) from None
        sizes = [len(encode(text)) for text in texts]
        if len(sizes) == 2 and min(sizes) >= 1:
            conversations.append(sizes)
    if not conversations:
        raise ValueError(f"{path}: holds no conversation of two turns")
    tokens = np.array(conversations, np.int32)
    return Lengths(tokens[:, 0], tokens[:, 1])
