"""The command line `jaxkv`.

Each command is a function from its arguments to a `CommandOutput`; `main` prints it as
one JSON document (`--json`) or as tables, and converts errors to exit statuses. The
module imports only the standard library at the top, so that `--help` answers at once:
an experiment, and with it jax, is imported after its name was read.

A new command needs a function and a line in `_COMMANDS`. A new experiment needs no
change here, and an experiment `bench_NAME` is also `bench NAME`.
"""

import contextlib
import dataclasses
import io
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jaxkv
from experiments import framework
from experiments.cli import compilation_cache, multiprocess, run
from experiments.cli.console import (
    STATUS,
    OutputError,
    exit_on_interrupt,
    guard_streams,
)
from experiments.cli.run import CommandOutput
from experiments.framework import (
    SMOKE,
    config_loads,
    error_line,
    find_entry,
    is_user_error,
    load_experiment,
)
from jaxkv import files
from jaxkv.validation import format_unknown_name


def main(args: list[str] | None = None) -> int:
    """Runs one command.

    Args:
      args: arguments after `jaxkv`; by default those of the process.

    Returns:
      Exit status: 0 when done, 2 on invalid input, 1 on failure, 130 after Ctrl-C, 75
      if the time limit was reached and the same command continues the work.
    """
    if args is None:  # called as the main program
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
                helps = {name: known.help for name, known in _COMMANDS.items()}
                name = _word(args, "command", helps, _USAGE)
                multiprocess.check_command(name)
                if name == "serve":  # prints its address before it ends
                    answer = _serve(args[1:], documents)
                else:
                    answer = _COMMANDS[name].call(args[1:])
        if answer is not None and multiprocess.is_first_process():
            if not as_json:
                from experiments.cli.console import print_parts

                print_parts(answer.parts)
                if answer.parts and answer.lines:
                    print()
                for line in answer.lines:
                    print(line)
            elif answer.document:  # otherwise it is already printed
                print(framework.dumps(answer.document))
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


def _bench(args: list[str]) -> CommandOutput:
    known = [x for x in framework.entries() if x.name.startswith("bench_")]
    questions = {x.name.removeprefix("bench_"): x.question for x in known}
    name = _word(args, "benchmark", questions, "usage: jaxkv bench BENCHMARK [OPTIONS]")
    return _lift_metrics(_experiment(f"bench_{name}", args[1:], f"jaxkv bench {name}"))


def _run(args: list[str]) -> CommandOutput:
    args = [args[0].replace("-", "_"), *args[1:]] if _is_word(args) else args
    questions = {x.name: x.question for x in framework.entries()}
    name = _word(args, "experiment", questions, _RUN_USAGE)
    return _experiment(name, args[1:], f"jaxkv run {name}")


def _generate(args: list[str]) -> CommandOutput:
    from experiments.cli import generate

    return generate.generate(
        *_served(args, generate.GenerateOptions, "jaxkv generate MODEL")
    )


def _serve(args: list[str], documents: TextIO | None = None) -> CommandOutput:
    from experiments.cli import serve

    file = _value_of(args, "--config")
    base = None if file is None else serve.read_options(file)
    asked = _served(args, serve.ServeOptions, "jaxkv serve MODEL", base)
    return serve.serve_model(*asked, documents)


def _served[T](
    args: list[str], options: type[T], prog: str, base: T | None = None
) -> tuple[str, T]:
    """Parses `COMMAND MODEL [OPTIONS]`; the model is a folder or a bundled one."""
    from experiments.harness import bundled_names

    known = ", ".join(bundled_names())
    asks = f"MODEL is missing: a folder, or one of: {known}"
    description = f"MODEL is a folder, or the name of a bundled model: {known}."
    return _subject(args, options, prog, asks, description, base)


def _cost(args: list[str]) -> CommandOutput:
    from experiments.cli.cost import command

    known = command.list_models()
    model, options = _subject(
        args,
        command.CostOptions,
        "jaxkv cost MODEL",
        f"MODEL is missing: a config.json, a folder, or {known}",
        f"MODEL is a config.json, a folder with one, or {known}.",
    )
    return command.count_costs(model, options)


def _simulate(args: list[str]) -> CommandOutput:
    from experiments.cli import parsing
    from experiments.cli.cost import command as cost
    from experiments.cli.simulate import options

    known, prog = cost.list_models(), "jaxkv simulate MODEL"
    description = f"MODEL is a config.json, a folder with one, or {known}."
    if _value_of(args, "--stages") is not None and not _is_word(args):
        asked = (
            "",
            parsing.parse_options(options.SimulateOptions, args, prog, description),
        )
    else:
        asks = f"MODEL is missing: a config.json, a folder, or {known}"
        asked = _subject(args, options.SimulateOptions, prog, asks, description)
    from experiments.cli.simulate import command

    return command.simulate_command(*asked)


def _fit(args: list[str]) -> CommandOutput:
    from experiments.fitting import Config as FitConfig
    from experiments.fitting import experiment as fit_experiment

    log, flags = (args[0], args[1:]) if _is_word(args) else ("", args)
    base = FitConfig(log=log)
    if (file := _value_of(flags, "--config")) is not None:
        text = files.read_text(file)
        base = config_loads(FitConfig, text, file)
        base = dataclasses.replace(base, log=log or base.log)
    description = "LOG is a CSV or JSON, gzipped or not, or the folder of a sweep."
    where = "LOG/fit for a sweep, or a new one under runs/"
    config, out, max_seconds = _changed(
        base, flags, "jaxkv fit LOG", description, where
    )
    if not config.log:
        raise ValueError("LOG is missing: a CSV, JSON, or the folder of a sweep")
    is_sweep = out is None and Path(config.log).is_dir()
    out = Path(config.log) / "fit" if is_sweep else out
    experiment = fit_experiment.experiment(config.log)
    answer = _lift_metrics(run.run(experiment, config, out, max_seconds))
    if is_sweep and out is not None:  # where `plan --law SWEEP/fit.json` looks
        text = files.read_text(out / "fit.json")
        files.write_atomically(Path(config.log) / "fit.json", text)
    return answer


def _calibrate(args: list[str]) -> CommandOutput:
    if not _is_word(args) and not {"-h", "--help"} & {*args}:
        raise ValueError("RUNS is missing: a CSV of measured load stages")
    experiment = load_experiment("calibration")
    config_type: Any = type(next(iter(experiment.configs.values())))
    runs, flags = (args[0], args[1:]) if _is_word(args) else ("", args)
    config, out, max_seconds = _changed(
        config_type(runs=runs),
        flags,
        "jaxkv calibrate RUNS",
        "RUNS is a CSV of load stages of servers, as their clients measured them.",
        "a new one under runs/; FILE.json writes only the coefficients there",
    )
    file = out if out is not None and out.suffix == ".json" else None
    if file is not None and "none" not in config.leave_out:
        line = f"leave_out={config.leave_out!r} writes no coefficients"
        raise ValueError(f"--out {file}: {line}")
    answer = run.run(experiment, config, None if file else out, max_seconds)
    if file is not None and (made := answer.document["out"] / "server.json").is_file():
        files.write_atomically(file, files.read_text(made))
        answer.lines.append(f"coefficients: {file}")
    return _lift_metrics(answer)


def _train(args: list[str], name: str = "train") -> CommandOutput:
    """Runs `COMMAND CONFIG [OPTIONS]`; CONFIG is a shipped name or a JSON file."""
    from experiments.cli.train import command

    is_sweep = name == "sweep"
    call: Any = command.run_model_sweep if is_sweep else command.train_model
    options: Any = command.SweepOptions if is_sweep else command.TrainOptions
    shipped = command.SWEEPS if is_sweep else command.TRAININGS
    known = f"JSON file, or one of: {', '.join(shipped)}"
    asks, description = f"CONFIG is missing: a {known}", f"CONFIG is a {known}."
    return call(*_subject(args, options, f"jaxkv {name} CONFIG", asks, description))


def _plan(args: list[str]) -> CommandOutput:
    from experiments.cli import parsing
    from experiments.cli.plan import command, options

    description = "Chooses a device, N, D and an architecture for a budget."
    return command.plan_model(
        parsing.parse_options(options.PlanOptions, args, "jaxkv plan", description)
    )


def _list(args: list[str]) -> CommandOutput:
    from experiments.cli import parsing
    from experiments.framework import Sheet

    description = "The experiments and their configs."
    parsing.parse_options(parsing.NoOptions, args, "jaxkv list", description)
    known = framework.entries()
    rows = [(x.name, " ".join(x.configs), x.question) for x in known]
    sheet = Sheet("", ("experiment", "configs", "question"), rows)
    line = "jaxkv run EXPERIMENT [CONFIG] runs one; the first config is the default."
    names = ("name", "question", "configs")
    listed = [{name: getattr(x, name) for name in names} for x in known]
    return CommandOutput({"experiments": listed}, [sheet], [line])


def _claims(args: list[str]) -> CommandOutput:
    from experiments.cli import parsing, results_page

    description = "Claims of run folders: published and measured numbers, verdicts."
    options = parsing.parse_options(
        results_page.ClaimsOptions, args, "jaxkv claims", description
    )
    return results_page.list_claims(options.folder, options.write)


class Command(NamedTuple):
    """A command: its line of help, and its function."""

    help: str
    call: Callable[[list[str]], CommandOutput]


_COMMANDS = {
    "demo": Command(
        "serve the bundled model with static and continuous batching",
        lambda args: _lift_metrics(_experiment("demo", args, "jaxkv demo")),
    ),
    "list": Command("list the experiments and their configs", _list),
    "run": Command("run an experiment and keep its folder", _run),
    "generate": Command("continue text with a model", _generate),
    "serve": Command("serve a model over HTTP, by OpenAI's API", _serve),
    "bench": Command("measure speed on this machine", _bench),
    "cost": Command("count a model's parameters, operations and bytes", _cost),
    "simulate": Command("predict the latency of a server under load", _simulate),
    "train": Command("train one model", _train),
    "sweep": Command(
        "train many models for a scaling law", lambda args: _train(args, "sweep")
    ),
    "fit": Command("fit scaling laws to a log of training runs", _fit),
    "calibrate": Command("fit a server's step times to measured runs", _calibrate),
    "plan": Command("choose the best model for a budget", _plan),
    "claims": Command("list published and measured numbers with verdicts", _claims),
}

_USAGE = f"""usage: jaxkv COMMAND [OPTIONS]

Every command takes --help, and --json for one JSON document on standard output.

{multiprocess.HELP}"""

_RUN_USAGE = """usage: jaxkv run EXPERIMENT [CONFIG] [--field VALUE] [--out DIR]
       jaxkv run EXPERIMENT --config FILE     runs any config.json again"""


def _experiment(name: str, args: list[str], prog: str) -> CommandOutput:
    """Runs an experiment: `[CONFIG] [--config FILE] [--field VALUE] [--out DIR]`."""
    is_named, entry = _is_word(args), find_entry(name)
    is_default = not is_named and _value_of(args, "--config") is None
    if (args[0] if is_named else is_default and entry.configs[0]) == SMOKE:
        compilation_cache.disable_optimization(name)
    experiment = load_experiment(name)
    configs = experiment.configs
    name, flags = (args[0], args[1:]) if is_named else (next(iter(configs)), args)
    if name not in configs:
        line = format_unknown_name("config", name, configs)
        raise ValueError(f"{prog}: {line}")
    base = configs[name]
    if (file := _value_of(flags, "--config")) is not None:
        if is_named:
            raise ValueError(f"{prog}: {name} and --config {file} exclude each other")
        base, name = experiment.config_loads(files.read_text(file), file), ""
    first, *others = configs
    listed = ", ".join([f"{first} (the default)", *others])
    description = f"{experiment.question} Configs: {listed}."
    asked = _changed(base, flags, f"{prog} [CONFIG]", description)
    return run.run(experiment, *asked, config_name=name)


type _Asked = tuple[Any, Path | None, float]
"""Config, folder and time limit of a run."""


_PLAIN = ("--out", "--config", "--max-seconds")
"""Flags that are parsed without tyro if there is no other flag."""


def _changed(
    base: Any,
    args: list[str],
    prog: str,
    description: str,
    out: str = "a new one under runs/",
) -> _Asked:
    """Parses changes to a config, and the flags of a run, except `--config`."""
    rest, found = list(args), {}
    while rest:
        flag, joined, value = rest.pop(0).partition("=")
        if not joined and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        if flag in found or flag not in _PLAIN or not value:
            break
        found[flag] = value
    else:
        with contextlib.suppress(ValueError):  # not a number
            max_seconds = float(found.get("--max-seconds", "inf"))
            return base, Path(found["--out"]) if "--out" in found else None, max_seconds

    # Imported here, because a benchmark machine may not have tyro.
    from experiments.cli import parsing

    parsed = parsing.parse_options(
        parsing.config_options(base, out), args, prog, description, ()
    )
    return parsed.settings, parsed.out, parsed.max_seconds


def _subject[T](
    args: list[str],
    options: type[T],
    prog: str,
    asks: str,
    description: str,
    default: T | None = None,
) -> tuple[str, T]:
    """Parses `COMMAND SUBJECT [OPTIONS]`.

    Args:
      args: arguments after the command.
      options: dataclass of the options.
      prog: command, with the name of its subject.
      asks: error message if there is no subject.
      description: text for `--help`.
      default: options that the flags change; None takes the defaults of the dataclass.
    """
    from experiments.cli import parsing

    if not _is_word(args) and not {"-h", "--help"} & {*args}:
        raise ValueError(asks)
    flags = args[1:] if _is_word(args) else args
    parsed = parsing.parse_options(options, flags, prog, description, default=default)
    return args[0], parsed


def _lift_metrics(answer: CommandOutput) -> CommandOutput:
    """Moves metrics to the top level of the document."""
    document = {k: v for k, v in answer.document.items() if k != "metrics"}
    return answer._replace(document=document | answer.document["metrics"])


def _is_word(args: list[str]) -> bool:
    return bool(args) and not args[0].startswith("-")


def _word(args: list[str], kind: str, choices: dict[str, str], usage: str) -> str:
    """Parses the first argument as one of the choices, or prints help."""
    if args[:1] in (["-h"], ["--help"]):
        width = max(map(len, choices), default=0)
        lines = [f"  {name:{width}}  {help}" for name, help in choices.items()]
        print("\n".join([usage, "", *lines]))
        raise SystemExit(0)
    if not _is_word(args):
        raise ValueError(f"{kind} is missing; one of: {', '.join(choices)}")
    if args[0] not in choices:
        raise ValueError(format_unknown_name(kind, args[0], choices))
    return args[0]


def _value_of(args: list[str], flag: str) -> str | None:
    """Returns the value of `--flag value` or `--flag=value`, without a full parse."""
    for arg, following in zip(args, [*args, None][1:], strict=True):
        if arg == flag:
            return following
        if arg.startswith(f"{flag}="):
            return arg.partition("=")[2]
    return None


def _report_error(error: object, status: int) -> int:
    print("jaxkv:", error_line(error), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
