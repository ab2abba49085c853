"""Validation of arguments: errors of one line with the value and the allowed range."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.validation.configs import (
        Ascending,
        AscendingFloats,
        AscendingInts,
        Choices,
        ConfigRecord,
        Entries,
        NonNegativeFloat,
        NonNegativeInt,
        PositiveFloat,
        PositiveFloats,
        PositiveInt,
        PositiveInts,
        Range,
        Share,
        Shares,
        Sizes,
        check_fields,
    )
    from jaxkv.validation.keywords import (
        RENAMED,
        UnknownKeyword,
        check_installed,
        check_keywords,
        format_unknown_name,
        suggests_keywords,
    )
    from jaxkv.validation.number_checks import (
        checks_numbers,
    )
    from jaxkv.validation.values import (
        INT32,
        SECONDS,
        SEEDS,
        SIZES,
        boolean,
        choice,
        floating,
        format_value,
        instance,
        integer,
        integers,
        number,
        one_line,
        path,
        seconds,
        token_ids,
        token_sequence,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
