"""`jaxkv plan`: device, operations, N, D, loss and architecture for a budget.

`case` resolves the options, `find` computes the optimum and its designs as a document,
`report` explains it step by step, and `drawing` draws it. With `--serve`, `serving`
prices servers of a ladder of designs, `total` finds the cheapest model with them, and
`total_report` and `total_drawing` present it.
"""

from pathlib import Path
from typing import Any

from jaxkv.cli import CommandOutput, parse_options
from jaxkv.report import dumps, write_files
from scaling.cli.plan import find, report
from scaling.cli.plan.case import resolve_plan_case
from scaling.cli.plan.options import PlanOptions


def main(args: list[str]) -> CommandOutput:
    """Runs `plan [OPTIONS]`."""
    description = "Chooses a device, N, D and an architecture for a budget."
    options = parse_options(PlanOptions, args, "jaxkv plan", description)
    return plan_model(options)


def plan_model(options: PlanOptions) -> CommandOutput:
    """Runs `jaxkv plan`.

    Raises:
      ValueError: the law or device is unknown, there is not exactly one budget, or no
        design fits the budget.
    """
    case = resolve_plan_case(options)
    if options.serve:
        # jax takes a second to import.
        from scaling.cli.plan.total import find_total_plan
        from scaling.cli.plan.total_report import total_sheets

        total = find_total_plan(options, case)
        document = total.document
        sheets = total_sheets(total)
    else:
        total = None
        document = find.find_plan(options, case)
        sheets = report.plan_sheets(options, case, document)
    lines = []
    if options.plot or options.out is not None:
        contents: dict[str, str | bytes] = {
            "plan.json": dumps(document),
            "architecture.json": dumps(
                find.to_architecture_config(case, document["architecture"])
            ),
        }
        if options.plot:
            # matplotlib takes a second to import.
            from scaling.cli.plan import drawing, total_drawing

            if total is None:
                contents |= drawing.render_plan_figure(options, case, document)
            else:
                powers = case.loss_model.powers
                contents |= total_drawing.render_total_figure(total, powers)
        folder = write_files(options.out, "plan", contents)
        document["out"] = folder
        lines.append(f"folder: {folder}; next: jaxkv cost {folder}/architecture.json")
        if document.get("serving") is not None:
            lines.append(f"percentiles of a server: {_simulation(folder, document)}")
    return CommandOutput(document, sheets, lines)


def _simulation(folder: Path, document: dict[str, Any]) -> str:
    """Returns the command that simulates one server of a plan."""
    serving = document["serving"]
    load = document["load"]
    rate = serving["requests_per_s"]["median"]
    return (
        f"jaxkv simulate {folder}/architecture.json --device {serving['device']} "
        f"--tp {serving['devices_per_server']} --prompt-tokens "
        f"{load['prompt_tokens']:.0f} --answer-tokens {load['answer_tokens']:.0f} "
        f"--rate {rate:.3g} --max-num-seqs {serving['concurrency'] + 64:.0f}"
    )
