"""Text and tokens: tokenizers, streaming decode, stop strings, chat templates."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.text.byte_pairs import (
        END_ID,
        END_TEXT,
        TOKENIZERS_VERSION,
        encode_texts,
        train_tokenizer,
    )
    from jaxkv.text.openai_messages import convert_openai_messages
    from jaxkv.text.tokenizer import MAX_BYTE_VOCAB, NUM_BYTES, ByteTokenizer, Tokenizer

__all__, __getattr__, __dir__ = lazy_exports(__name__)
