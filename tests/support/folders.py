"""Paths of the checkout and of the golden files."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "experiments" / "records"
GOLDEN = ROOT / "tests" / "golden"
TOKENIZED = GOLDEN / "tokenized"
"""A small Llama and its tokenizer, saved by transformers."""


def published_template(name: str) -> str:
    """Returns a published chat template, or skips the test if it is not there.

    Templates of other projects are not in the repository: they are read from the
    folder `chat_templates` of `$JAXKV_DATA`, see `tests/golden/make_chats.py`.
    """
    folder = os.environ.get("JAXKV_DATA")
    path = Path(folder or "", "chat_templates", f"{name}.jinja")
    if folder is None or not path.exists():
        pytest.skip(f"JAXKV_DATA has no chat_templates/{name}.jinja, see make_chats.py")
    return path.read_text(encoding="utf-8")
