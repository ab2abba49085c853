"""Which model for a budget? `jaxkv plan`: device, operations, N, D, loss, architecture.

`case` looks up what is asked, `find` finds the optimum and its designs, a document;
`report` says it step by step, `drawing` draws it.
"""

from experiments.cli.plan import find, report
from experiments.cli.plan.case import look_up
from experiments.cli.plan.options import Options
from experiments.cli.run import Output
from experiments.framework import config_json, run_folder


def plan(options: Options) -> Output:
    """Answers `jaxkv plan`.

    Raises:
      ValueError: there is no such law or device, no budget or two, or a budget for
        which there is no design.
    """
    case = look_up(options)
    told = find.find(options, case)
    lines = []
    if options.plot or options.out is not None:
        contents: dict[str, str | bytes] = {
            "plan.json": config_json.dumps(told),
            "architecture.json": config_json.dumps(
                find.config(case, told["architecture"])
            ),
        }
        if options.plot:
            # matplotlib takes a second to import.
            from experiments.cli.plan import drawing

            contents |= drawing.render(options, case, told)
        folder = run_folder.keep(options.out, "plan", contents)
        told["out"] = folder
        lines.append(f"kept in {folder}; `jaxkv cost {folder}/architecture.json`")
    return Output(told, report.sheets(options, case, told), lines)
