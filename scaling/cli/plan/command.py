"""`jaxkv plan`: device, operations, N, D, loss and architecture for a budget.

`case` resolves the options, `find` computes the optimum and its designs as a document,
`report` explains it step by step, and `drawing` draws it.
"""

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
    document = find.find_plan(options, case)
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
            from scaling.cli.plan import drawing

            contents |= drawing.render_plan_figure(options, case, document)
        folder = write_files(options.out, "plan", contents)
        document["out"] = folder
        lines.append(f"folder: {folder}; next: jaxkv cost {folder}/architecture.json")
    return CommandOutput(document, report.plan_sheets(options, case, document), lines)
