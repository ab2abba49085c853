"""The command line `jaxkv`.

A command is a function from its arguments to a `CommandOutput`. `COMMANDS` names it,
and it is imported when it is called, so that `--help` answers at once. `main` prints
the output as one JSON document (`--json`) or as tables, and converts errors to exit
statuses.
"""

import contextlib
import importlib
import io
import sys
import traceback
from typing import NamedTuple

import jaxkv
from jaxkv.cli import compilation_cache, multiprocess
from jaxkv.cli.arguments import choose_word, take_value
from jaxkv.cli.console import STATUS, OutputError, exit_on_interrupt, guard_streams
from jaxkv.cli.user_errors import error_line, is_user_error
from jaxkv.files import InstalledPackages
from jaxkv.plotting import draw_with


class Command(NamedTuple):
    """A command.

    Attributes:
      help: line of help.
      function: `module:name` of a function of arguments that returns `CommandOutput`.
    """

    help: str
    function: str


COMMANDS = {
    "demo": Command(
        "serve the bundled model with static and continuous batching",
        "experiments.cli.commands:demo",
    ),
    "list": Command(
        "list the experiments and their configs",
        "experiments.cli.commands:list_experiments",
    ),
    "run": Command(
        "run an experiment and keep its folder",
        "experiments.cli.commands:run_experiment",
    ),
    "generate": Command("continue text with a model", "jaxkv.cli.generate:main"),
    "serve": Command(
        "serve a model over HTTP, by OpenAI's API", "jaxkv.cli.serve:main"
    ),
    "replay": Command(
        "run an incident of a server again, under other policies",
        "jaxkv.cli.replay:main",
    ),
    "view": Command(
        "replay a recorded run in a browser, and draw its steps", "jaxkv.cli.view:main"
    ),
    "bench": Command("measure speed on this machine", "experiments.cli.commands:bench"),
    "cost": Command(
        "count a model's parameters, operations and bytes",
        "scaling.cli.cost.command:main",
    ),
    "simulate": Command(
        "predict the latency of a server under load",
        "scaling.cli.simulate.arguments:main",
    ),
    "train": Command("train one model", "scaling.cli.train.command:main"),
    "sweep": Command(
        "train many models for a scaling law", "scaling.cli.train.command:sweep_main"
    ),
    "fit": Command(
        "fit scaling laws to a log of training runs", "scaling.cli.fit.command:main"
    ),
    "compare": Command(
        "compare groups of runs at equal loss", "scaling.cli.runs.compare:main"
    ),
    "next": Command(
        "choose the next training runs of a log", "scaling.cli.runs.next_run:main"
    ),
    "calibrate": Command(
        "fit a server's step times to measured runs",
        "scaling.cli.calibrate.command:main",
    ),
    "plan": Command(
        "choose the best model for a budget", "scaling.cli.plan.command:main"
    ),
    "course": Command(
        "list live commands of lecture topics; hand out and grade assignments",
        "experiments.course.command:main",
    ),
    "records": Command(
        "list the project's records with their age, and make them again",
        "experiments.cli.records:main",
    ),
    "completion": Command(
        "print a script that completes commands and options in a shell",
        "jaxkv.cli.completion:main",
    ),
    "claims": Command(
        "list published and measured numbers with verdicts",
        "experiments.cli.results_page:main",
    ),
}

FIGURES = dict.fromkeys(("bench", "calibrate", "demo", "fit", "run"), "")
FIGURES |= dict.fromkeys(("cost", "plan", "simulate"), "--plot")
FIGURES |= {"sweep": "--check-coordinates", "view": "--gantt"}
"""Commands that draw, with the flag that makes them; "" if they always do."""

_USAGE = f"""usage: jaxkv COMMAND [OPTIONS]

Every command takes --help, --help-all for the whole text of its options, and
--json for one JSON document on standard output. Commands that draw take --style
paper or slide for the sizes of text and figure, and --format pdf.

{multiprocess.HELP}"""


def main(args: list[str] | None = None) -> int:
    """Runs one command.

    Args:
      args: arguments after `jaxkv`; by default those of the process.

    Returns:
      Exit status: 0 when done, 2 on invalid input, 1 on failure, 130 after Ctrl-C, 75
      if the time limit was reached and the same command continues the work.
    """
    if args is None:  # called as the main program
        sys.meta_path.insert(0, InstalledPackages())
        try:
            guard_streams(is_shared=multiprocess.is_requested(sys.argv))
        except ValueError as error:
            return _report_error(error, 1)
        if (
            multiprocess.is_requested(sys.argv)
            and (status := multiprocess.fork_worker()) is not None
        ):
            return status
        with exit_on_interrupt():
            return multiprocess.exit_unjoined(main(sys.argv[1:]))
    if args == ["--version"]:
        print(f"jaxkv {jaxkv.__version__}")
        return 0
    as_json = "--json" in args
    args = [arg for arg in args if arg != "--json"]
    # Unencodable characters are replaced; JSON is always UTF-8.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if as_json and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    try:
        # Standard output must contain only the document, so prints are redirected.
        documents = sys.stdout if as_json else None
        with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
            compilation_cache.enable_program_cache()
            args = multiprocess.join_from_command(args)
            answer = None
            with contextlib.suppress(SystemExit):  # help was printed
                helps = {name: command.help for name, command in COMMANDS.items()}
                name = choose_word(args, "command", helps, _USAGE)
                multiprocess.check_command(name)
                style, args = _take_figure_option(args, "--style")
                kind, args = _take_figure_option(args, "--format")
                if kind not in (None, "pdf"):
                    raise ValueError(f"--format {kind}: must be pdf")
                module, _, function = COMMANDS[name].function.partition(":")
                call = getattr(importlib.import_module(module), function)
                # `serve` prints its address before it ends.
                streams = [documents] if name == "serve" else []
                with draw_with(style or "page", has_pdf=kind == "pdf"):
                    answer = call(args[1:], *streams)
        if answer is not None and multiprocess.is_first_process():
            if not as_json:
                from jaxkv.cli.console import print_parts

                print_parts(answer.parts)
                if answer.parts and answer.lines:
                    print()
                for line in answer.lines:
                    print(line)
            elif answer.document:  # otherwise it is already printed
                from jaxkv.report import dumps

                print(dumps(answer.document))
        sys.stdout.flush()
        return 0 if answer is None else answer.status
    except OutputError as error:  # no message if the reader closed the pipe
        return 1 if error.is_left else _report_error(error, 1)
    except KeyboardInterrupt as error:
        status = getattr(error, "status", STATUS)
        _report_error(str(error) or "interrupted", status)
        return multiprocess.exit_unjoined(status, at_once=True)
    except Exception as error:
        if multiprocess.is_peer_loss(error):
            reason = str(error).partition("\n")[0]
            return _report_error(f"another process has ended: {reason}", 1)
        if is_user_error(error):
            return _report_error(error, 2)
        traceback.print_exc()
        return 1


def _take_figure_option(args: list[str], flag: str) -> tuple[str | None, list[str]]:
    """Removes an option of figures; refuses it if the command would draw none."""
    value, remaining = take_value(args, flag)
    needed = FIGURES.get(args[0])
    flags = {"", *(arg.partition("=")[0] for arg in remaining)}
    if value is not None and needed not in flags:
        reason = f"draws a figure only with {needed}" if needed else "draws none"
        raise ValueError(f"{flag} {value}: jaxkv {args[0]} {reason}")
    return value, remaining


def _report_error(error: object, status: int) -> int:
    print("jaxkv:", error_line(error), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
