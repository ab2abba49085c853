"""Rules that select rows of a log: `N <= 4.2e8 and (multiplier == 20 or seed != 3)`.

    rule        := term {"or" term}
    term        := factor {"and" factor}
    factor      := "not" factor | "(" rule ")" | value operator value
                 | value "is" ("missing" | "invalid")
    operator    := "<" | "<=" | ">" | ">=" | "==" | "!="
    value       := number | 'text' | "text" | column | `a column of any name`

A rule is parsed, never evaluated as a program. Numbers compare with numbers, and 1.5B
is 1.5e9; text compares by equality only; true is 1 and false is 0. An order comparison
of a cell that is no number is an error. A cell is missing if it is empty, and invalid
unless it is a finite number above 0.
"""

import math
import operator
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from jaxkv.files import Cell

MAX_RULE_LENGTH = 2_000
"""Largest length of a rule; it bounds the nesting."""

Test = Callable[[Mapping[str, Any]], bool]
_Value = Callable[[Mapping[str, Any]], Any]

_TOKEN_PATTERN = re.compile(
    r"\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?[KMBGTkmbgt]?)"
    r"(?![\w.])"
    r"|(?P<text>'[^']*'|\"[^\"]*\")|(?P<quoted>`[^`]+`)|(?P<name>[^\W\d][\w.]*)"
    r"|(?P<mark><=|>=|==|!=|<|>|\(|\)))"
)
_ORDER_OPERATORS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class _Token(NamedTuple):
    kind: str
    text: str
    start: int


def parse_rule(rule: str, names: Collection[str]) -> Test:
    """Parses a rule.

    Args:
      rule: a rule as above, not empty, at most `MAX_RULE_LENGTH` characters.
      names: columns that the rule may use.

    Returns:
      A predicate of a row's cells, by column. It raises `ValueError` for an order
      comparison of a cell that is not a number.

    Raises:
      ValueError: the rule is invalid, or uses another column; one line with the place.
    """
    if len(rule) > MAX_RULE_LENGTH:
        raise ValueError(f"rule of {len(rule)} characters; at most {MAX_RULE_LENGTH}")
    reader = _Reader(rule, names)
    try:
        test = reader.either()
    except RecursionError:
        raise ValueError(f"rule {rule!r}: nested too deeply") from None
    reader.end()
    return test


class _Reader:
    """Recursive-descent parser; one method for each rule of the grammar."""

    def __init__(self, rule: str, names: Collection[str]) -> None:
        self._rule = rule
        self._names = names
        self._tokens: list[_Token] = []
        start = 0
        while rule[start:].strip():
            match = _TOKEN_PATTERN.match(rule, start)
            if match is None:
                raise self._error("cannot read", rule[start:].strip())
            kind = str(match.lastgroup)
            self._tokens.append(_Token(kind, match[kind], start))
            start = match.end()
        self._next = 0

    def either(self) -> Test:
        tests = [self._both()]
        while self._take("or"):
            tests.append(self._both())
        return lambda row: any(test(row) for test in tests)

    def end(self) -> None:
        if token := self._peek():
            raise self._error("needs `and` or `or` before", token.text)

    def _both(self) -> Test:
        tests = [self._factor()]
        while self._take("and"):
            tests.append(self._factor())
        return lambda row: all(test(row) for test in tests)

    def _factor(self) -> Test:
        if self._take("not"):
            test = self._factor()
            return lambda row: not test(row)
        if self._take("("):
            test = self.either()
            if not self._take(")"):
                raise self._error("needs a ) before", self._token_text())
            return test
        return self._comparison()

    def _comparison(self) -> Test:
        left_text, left = self._value()
        if self._take("is"):
            if self._take("missing"):
                return lambda row: left(row) in (None, "")
            if self._take("invalid"):
                return lambda row: not 0 < (_number(left(row)) or 0.0) < math.inf
            raise self._error("needs missing or invalid before", self._token_text())
        token = self._peek()
        if token is None or token.text not in {*_ORDER_OPERATORS, "==", "!="}:
            raise self._error(
                "needs a comparison such as <= before", self._token_text()
            )
        self._next += 1
        right_text, right = self._value()
        order = _ORDER_OPERATORS.get(token.text)
        is_equal = token.text == "=="

        def test(row: Mapping[str, Cell]) -> bool:
            a = left(row)
            b = right(row)
            x = _number(a)
            y = _number(b)
            if order is None:
                is_same = a == b if x is None or y is None else x == y
                return is_same == is_equal
            if x is None or y is None:
                text, cell = (left_text, a) if x is None else (right_text, b)
                fault = "missing" if cell in (None, "") else f"{cell!r}, not a number"
                raise ValueError(f"rule {self._rule!r}: {text} is {fault}")
            return order(x, y)

        return test

    def _value(self) -> tuple[str, _Value]:
        token = self._peek()
        if token is None or token.kind == "mark" or token.text in _KEYWORDS:
            raise self._error("needs a column or a value before", self._token_text())
        self._next += 1
        if token.kind == "number":
            number = parse_number(token.text, 1.0)
            return token.text, lambda row: number
        text = token.text[1:-1]
        if token.kind == "text":
            return token.text, lambda row: text
        name = text if token.kind == "quoted" else token.text
        if name not in self._names:
            column_list = ", ".join(self._names)
            raise ValueError(
                f"rule {self._rule!r}: no column {name!r}; one of {column_list}"
            )
        return name, lambda row: row.get(name)

    def _peek(self) -> _Token | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def _take(self, text: str) -> bool:
        token = self._peek()
        is_match = token is not None and token.text == text
        self._next += is_match
        return is_match

    def _token_text(self) -> str:
        token = self._peek()
        return "its end" if token is None else token.text

    def _error(self, what: str, where: str) -> ValueError:
        return ValueError(f"rule {self._rule!r}: {what} {where}")


_KEYWORDS = {"and", "or", "not"}


def quote_column(name: str) -> str:
    """Returns a column's name in the syntax of rules."""
    is_plain = re.fullmatch(r"[^\W\d][\w.]*", name) and name not in _KEYWORDS
    return name if is_plain else f"`{name}`"


def mentions(rule: str, name: str) -> bool:
    """Returns True if a rule, or several separated by spaces, names a column."""
    tokens = _TOKEN_PATTERN.finditer(rule)
    return any(
        (token["name"] or (token["quoted"] or "")[1:-1]) == name for token in tokens
    )


def _number(value: Cell) -> float | None:
    """Reads a cell as a number, true as 1; None for other text."""
    return float(value) if isinstance(value, bool) else parse_number(value, 1.0)


_SUFFIX_SCALES = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def parse_number(cell: Cell, unit: float | None) -> float | None:
    """Parses 1.5e9, or 1.5B if the unit is 1; None for other text."""
    if isinstance(cell, bool) or cell is None:
        return None
    if isinstance(cell, int | float):
        try:
            return float(cell) * (unit or 1.0)
        except OverflowError:  # whole numbers in JSON are unbounded
            return math.inf
    match = re.fullmatch(r"([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*([KMBGTkmbgt]?)", cell)
    try:
        value = float(match[1] if match else cell.replace("_", "x"))
    except ValueError:
        return None
    if match and match[2]:
        return value * _SUFFIX_SCALES[match[2].upper()] if unit == 1 else None
    return value * (unit or 1.0)
