"""Trains a byte-pair tokenizer on text, and encodes texts in batches.

The vocabulary has all 256 bytes, so every text has tokens, and decoding restores it
byte for byte.
"""

from collections.abc import Iterable, Iterator, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxkv import validation
from jaxkv.text.tokenizer import Tokenizer, check_texts

END_TEXT = "<|endoftext|>"
"""Text of the token that ends a document; its id is `END_ID`."""
END_ID = 0
TOKENIZERS_VERSION = tokenizers.__version__
"""Version of the `tokenizers` library; another version may learn other merges."""

_TEXTS_PER_BATCH = 64


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learns the merges; equal texts give equal tokenizers.

    Args:
      texts: the training texts.
      vocab_size: largest number of tokens, including the bytes and the end of a
        document; at least 257. Short texts may give fewer.

    Returns:
      The tokenizer; `END_ID` ends a text.

    Source: Sennrich et al. 2016, arXiv:1508.07909, section 3.2, on bytes as in Radford
    et al. 2019 (GPT-2), section 2.2.
    """
    validation.integer("vocab_size", vocab_size, low=257)  # the bytes and an end
    texts = check_texts("texts", texts)
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return Tokenizer(core, eos_ids=(END_ID,), settings={"eos_token": END_TEXT})


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[list[int]]:
    """Yields the token ids of each text; special tokens in it are plain text."""
    core = tokenizer.core
    texts = [*check_texts("texts", texts)]
    before = core.encode_special_tokens
    core.encode_special_tokens = True
    try:
        for start in range(0, len(texts), _TEXTS_PER_BATCH):
            batch = texts[start : start + _TEXTS_PER_BATCH]
            for encoded in core.encode_batch_fast(batch, add_special_tokens=False):
                yield encoded.ids
    finally:
        core.encode_special_tokens = before
