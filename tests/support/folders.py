"""Where things lie: the checkout, and the files that the tests compare with."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "experiments" / "records"
GOLDEN = ROOT / "tests" / "golden"
TOKENIZED = GOLDEN / "tokenized"
"""A small llama and its tokenizer, as transformers saved them."""
