"""Texts and tokens: tokenizers, byte pairs, chat templates."""

from jaxkv.text.tokenizer import MAX_BYTE_VOCAB as MAX_BYTE_VOCAB
from jaxkv.text.tokenizer import NUM_BYTES as NUM_BYTES
from jaxkv.text.tokenizer import ByteTokenizer as ByteTokenizer
from jaxkv.text.tokenizer import Tokenizer as Tokenizer

__all__ = [
    "MAX_BYTE_VOCAB",
    "NUM_BYTES",
    "ByteTokenizer",
    "Tokenizer",
    "byte_pairs",
    "tokenizer",
]
