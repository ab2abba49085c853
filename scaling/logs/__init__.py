"""Logs of runs: columns, files, selection rules."""

from scaling.logs.columns import FLOPS_PER_PARAM_AND_TOKEN as FLOPS_PER_PARAM_AND_TOKEN
from scaling.logs.columns import LETTERS as LETTERS
from scaling.logs.columns import SIZES as SIZES
from scaling.logs.log import Log as Log

__all__ = [
    "FLOPS_PER_PARAM_AND_TOKEN",
    "LETTERS",
    "SIZES",
    "Log",
    "columns",
    "doubts",
    "files",
    "log",
    "rules",
]
