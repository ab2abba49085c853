"""Synthetic languages of known entropy."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from scaling.corpora.languages.language import LanguageConfig, open_language

__all__, __getattr__, __dir__ = lazy_exports(__name__)
