"""Paths of the checkout and of the golden files."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "experiments" / "records"
GOLDEN = ROOT / "tests" / "golden"
TOKENIZED = GOLDEN / "tokenized"
"""A small Llama and its tokenizer, saved by transformers."""
