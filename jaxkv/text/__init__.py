"""Text and tokens: tokenizers, streaming decode, stop strings, chat templates."""

from jaxkv.text.tokenizer import MAX_BYTE_VOCAB, NUM_BYTES, ByteTokenizer, Tokenizer

__all__ = [
    "MAX_BYTE_VOCAB",
    "NUM_BYTES",
    "ByteTokenizer",
    "Tokenizer",
    "byte_pairs",
    "tokenizer",
]
