"""Which model for a budget? `jaxkv plan`: device, operations, N, D, loss, architecture.

`plan_case` looks up what is asked, `plan_finding` finds the optimum and its designs;
`plan_document` gives the numbers, `plan_telling` says them step by step, `plan_drawing`
draws them.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from experiments.cli import parsing
from experiments.cli.run import Answer
from experiments.framework import config_json

if TYPE_CHECKING:
    from experiments.cli.plan.case import Case
    from experiments.cli.plan.find import Found


LEAST, MOST = 1e-6, 1e40
"""Of any amount: beyond these nothing means anything, and products overflow."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """A budget, what it may be spent on, and what is believed of losses."""

    gpu: tuple[str, ...] = ()
    """A device to rent, NAME:USD_PER_HOUR:TFLOPS; once for each."""
    budget_usd: Annotated[
        float | None, parsing.without("--flops, or --days with --devices")
    ] = None
    """Money to spend."""
    flops: Annotated[
        float | None, parsing.without("--budget-usd, or --days with --devices")
    ] = None
    """Operations to spend, in place of money."""
    target_loss: Annotated[
        float | None, parsing.without("--budget-usd, --flops, or --days with --devices")
    ] = None
    """Loss to reach, in nats per token, with the smallest budget that does."""
    mfu: float = 0.4
    """Share of a device's peak that training reaches."""
    law: str = "lecture"
    """Published constants by name, or a fit.json, or the folder of a fit."""
    group: Annotated[str | None, parsing.without("the only one")] = None
    """Of a fit with --by, the group whose law is taken."""
    days: Annotated[float | None, parsing.without("no limit")] = None
    """How long training may take; the number of devices follows."""
    devices: Annotated[int | None, parsing.without("as many as --days needs")] = None
    """How many devices; the duration follows. With --days, the budget."""
    count: Annotated[
        Literal["total", "non-embedding", "matmul", "active"] | None,
        parsing.without("as in the fit, or total"),
    ] = None
    """Which parameters N counts."""
    inference_tokens: float = 0.0
    """Tokens that the model will read and write; the budget is to pay for them too."""
    serve_mfu: Annotated[float | None, parsing.without("as --mfu")] = None
    """Share of the peak that serving reaches."""
    unique_tokens: Annotated[float | None, parsing.without("as many as are needed")] = (
        None
    )
    """Tokens that there are; more are repetitions."""
    vocab_size: Annotated[
        int | None, parsing.without("that of the sweep behind --law, or 32,000")
    ] = None
    """Of the architecture."""
    sequence: Annotated[
        int | None, parsing.without("that of the sweep behind --law, or 4,096")
    ] = None
    """Tokens of a training sequence."""
    tie_embeddings: bool = False
    """Whether the architecture's head is its embedding; it is after a sweep of such
    models."""
    attention: Literal["full", "causal"] = "full"
    """How exact operations count pairs of query and key."""
    level: float = 0.9
    """Probability of the intervals of a fit."""
    plot: bool = False
    """Draw the figure."""
    out: Annotated[
        Path | None, parsing.without("none, with --plot a new one under runs/")
    ] = None
    """Folder for plan.json, architecture.json and the figure."""

    def __post_init__(self) -> None:
        """Refuses numbers that cannot be."""
        amounts = ("budget_usd", "flops", "days", "devices", "unique_tokens")
        for name in (*amounts, "target_loss"):
            value = getattr(self, name)
            if value is not None and not LEAST <= value <= MOST:
                raise ValueError(
                    f"{_flag(name)} {value:g}: must be in [{LEAST:g}, {MOST:g}]"
                )
        if not 0 <= self.inference_tokens <= MOST:
            value = self.inference_tokens
            raise ValueError(f"--inference-tokens {value:g}: must be in [0, {MOST:g}]")
        for name in ("mfu", "serve_mfu"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{_flag(name)} {value:g}: must be in (0, 1]")
        if not 0 < self.level < 1:
            raise ValueError(f"--level {self.level:g}: must be in (0, 1)")


def plan(options: Options) -> Answer:
    """Answers `jaxkv plan`.

    Raises:
      ValueError: there is no such law or device, no budget or two, or a budget for
        which there is no design.
    """
    from experiments.cli.plan import find, report
    from experiments.cli.plan.case import look_up
    from experiments.cli.plan.document import describe

    case = look_up(options)
    found = find.find(case)
    document = describe(case, found)
    lines = []
    if options.plot or options.out is not None:
        folder = _keep(case, found, document)
        document["out"] = folder
        lines.append(f"kept in {folder}; `jaxkv cost {folder}/architecture.json`")
    return Answer(document, report.sheets(case, found), lines)


def _keep(case: "Case", found: "Found", document: dict[str, Any]) -> Path:
    """Writes the document, the architecture, and the figure if it is wanted."""
    from experiments.cli.plan.document import config
    from experiments.framework import run_folder

    contents: dict[str, str | bytes] = {
        "plan.json": config_json.dumps(document),
        "architecture.json": config_json.dumps(config(found.design.model)),
    }
    if case.options.plot:
        from experiments.cli.plan import drawing

        contents |= drawing.render(case, found)
    return run_folder.keep(case.options.out, "plan", contents)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
