"""Training corpora: tokenized texts, token files, synthetic languages."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from scaling.corpora.corpora import AnyCorpus, open_corpus
    from scaling.corpora.languages.language import (
        LanguageConfig,
        code_lengths,
        optimal_loss,
        zipf_probabilities,
    )
    from scaling.corpora.languages.markov import entropy
    from scaling.corpora.streams import (
        Corpus,
        check_lengths,
        draw_windows,
        windows_per_epoch,
    )
    from scaling.corpora.texts import (
        END_TOKEN,
        STANDARD_LIBRARY,
        VOCAB_SIZE,
        CorpusConfig,
        Document,
        TextSplit,
        count_bytes,
        describe_source,
        load_documents,
    )
    from scaling.corpora.tokenizing_texts import encode_documents

__all__, __getattr__, __dir__ = lazy_exports(__name__)
