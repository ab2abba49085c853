"""Formats of numbers with units: at most four significant digits."""

_SECOND_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_COUNT_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))

_FLOP_UNITS = (
    (1e15, "PFLOP"),
    (1e12, "TFLOP"),
    (1e9, "GFLOP"),
    (1e6, "MFLOP"),
    (1e3, "kFLOP"),
    (1.0, "FLOP"),
)


def format_number(value: object) -> str:
    """Formats a value with four significant digits; integers in full."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e3 <= abs(value) < 1e15 else f"{value:.4g}"
    return str(value)


def format_count(value: float, form: str = ".3g", gap: str = "") -> str:
    """Formats a number of parameters or tokens: 124M."""
    scale, letter = next((x for x in _COUNT_UNITS if value >= x[0]), (1.0, ""))
    return f"{value / scale:{form}}{gap}{letter}".rstrip()


def format_seconds(value: float | None) -> str:
    """Formats a duration: 12.3 s, 4.56 ms, 78.9 us."""
    return _scaled(value, _SECOND_UNITS)


def format_bytes(value: float | None) -> str:
    """Formats a number of bytes: 734 MB; 1 MB is 1e6 bytes."""
    return _scaled(value, _BYTE_UNITS)


def format_flops(value: float | None) -> str:
    """Formats a number of operations: 1.07 GFLOP."""
    return _scaled(value, _FLOP_UNITS)


def format_percent(value: float | None) -> str:
    """Formats a share in [0, 1] as a percentage: 93.9 %."""
    return "-" if value is None else f"{100 * value:.1f} %"


def format_rate(value: float | None) -> str:
    """Formats a rate with three digits, and without decimals from 100."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def format_named(name: str, value: object) -> tuple[str, str]:
    """Formats a number whose name has its unit as a suffix.

    Args:
      name: name of the number; may end in `_per_s`, `_s`, `_bytes`, `_share` or
        `_utilisation`.
      value: number, or any other value.

    Returns:
      The name in words, and the value with its unit.
    """
    label = name.replace("_", " ")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if name.endswith("_per_s"):
            return label, format_rate(value)
        if name.endswith("_s"):
            return label.removesuffix(" s"), format_seconds(value)
        if name.endswith("_bytes"):
            return label.removesuffix(" bytes"), format_bytes(value)
        if name.endswith(("_share", "_utilisation")):
            return label, format_percent(value)
    return label, format_number(value)


def _scaled(value: float | None, units: tuple[tuple[float, str], ...]) -> str:
    if value is None:
        return "-"
    scale, unit = next((x for x in units if abs(value) >= x[0]), units[-1])
    if value == 0:
        scale = 1.0
        unit = dict(units).get(1.0, units[-1][1])
    number = value / scale
    return f"{number:,.0f} {unit}" if abs(number) >= 100 else f"{number:.3g} {unit}"
