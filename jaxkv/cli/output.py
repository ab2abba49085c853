"""Output of a command: a JSON document, and tables and lines for a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jaxkv.report import ReportPart


class CommandOutput(NamedTuple):
    """Output of a command.

    Attributes:
      document: JSON document.
      parts: tables, texts and claims of `report`.
      lines: lines below the parts.
      status: exit status.
    """

    document: dict[str, Any]
    parts: "Sequence[ReportPart]"
    lines: list[str]
    status: int = 0

    def lift_metrics(self) -> "CommandOutput":
        """Returns the output with its metrics at the top level of the document."""
        document = {k: v for k, v in self.document.items() if k != "metrics"}
        return self._replace(document=document | self.document["metrics"])
