"""Commands of the laboratory: `list`, `run`, `demo` and `bench`.

A new experiment needs no change here, and an experiment `bench_NAME` is also
`bench NAME`.
"""

from pathlib import Path

from experiments import framework
from experiments.cli import smoke_compilation
from jaxkv import files
from jaxkv.cli import (
    CommandOutput,
    choose_word,
    is_word,
    parse_changes,
    take_value,
    value_of,
)
from jaxkv.validation import format_unknown_name

_RUN_USAGE = """usage: jaxkv run EXPERIMENT [CONFIG] [--field VALUE] [--out DIR]
       jaxkv run grpo --log jsonl             logs steps; or tensorboard, wandb
       jaxkv run EXPERIMENT --config FILE     runs any config.json again"""


_NEXT_STEPS = """
next, each in under a minute:
  serve  jaxkv generate stdlib-bytes --prompt "def read_lines(path):" --n 3
  fit    {fit}
  teach  jaxkv course"""


def demo(args: list[str]) -> CommandOutput:
    """Runs `demo [CONFIG]`; the claims are in its report only."""
    from jaxkv.report import Verdicts

    answer = _run(args, "demo", "jaxkv demo").lift_metrics()
    lines = [*answer.lines]
    for name in ("static", "continuous"):
        served = answer.document[name]
        if served["steps"]:
            share = f"{100 * served['kv_utilisation']:.0f} %"
            lines.append(
                f"{name} batching took {served['steps']:,} steps, and {share} of the "
                "KV memory that it reserved held tokens"
            )
    record = Path("experiments/records/isoflop")  # not in an installed wheel
    fit = (
        f"jaxkv fit {record} --out runs/law"
        if record.is_dir()
        else "jaxkv plan --flops 1e21"
    )
    lines += _NEXT_STEPS.format(fit=fit).split("\n")
    parts = [x for x in answer.parts if not isinstance(x, Verdicts)]
    return answer._replace(parts=parts, lines=lines)


def bench(args: list[str]) -> CommandOutput:
    """Runs `bench BENCHMARK [CONFIG]`."""
    questions = {
        entry.name.removeprefix("bench_"): entry.question
        for entry in framework.entries()
        if entry.name.startswith("bench_")
    }
    usage = "usage: jaxkv bench BENCHMARK [OPTIONS]"
    name = choose_word(args, "benchmark", questions, usage)
    return _run(args[1:], f"bench_{name}", f"jaxkv bench {name}").lift_metrics()


def run_experiment(args: list[str]) -> CommandOutput:
    """Runs `run EXPERIMENT [CONFIG]`."""
    args = [args[0].replace("-", "_"), *args[1:]] if is_word(args) else args
    questions = {entry.name: entry.question for entry in framework.entries()}
    name = choose_word(args, "experiment", questions, _RUN_USAGE)
    return _run(args[1:], name, f"jaxkv run {name}")


def list_experiments(args: list[str]) -> CommandOutput:
    """Runs `list`."""
    from jaxkv.cli import NoOptions, parse_options
    from jaxkv.report import Sheet

    description = "The experiments and their configs."
    parse_options(NoOptions, args, "jaxkv list", description)
    entries = framework.entries()
    rows = [(entry.name, " ".join(entry.configs), entry.question) for entry in entries]
    sheet = Sheet("", ("experiment", "configs", "question"), rows)
    line = "jaxkv run EXPERIMENT [CONFIG] runs one; the first config is the default."
    documents = [
        {name: getattr(entry, name) for name in ("name", "question", "configs")}
        for entry in entries
    ]
    return CommandOutput({"experiments": documents}, [sheet], [line])


def _run(args: list[str], name: str, prog: str) -> CommandOutput:
    """Runs an experiment: `[CONFIG] [--config FILE] [--field VALUE] [--out DIR]`."""
    log, args = take_value(args, "--log")
    entry = framework.find_entry(name)
    is_named = is_word(args)
    is_default = not is_named and value_of(args, "--config") is None
    if (args[0] if is_named else is_default and entry.configs[0]) == "smoke":
        smoke_compilation.disable_optimization(name)
    # After the variables above are set, since it imports jax.
    from jaxkv.cli import run_study

    experiment = framework.load_experiment(name)
    configs = experiment.configs
    config_name = args[0] if is_named else next(iter(configs))
    flags = args[1:] if is_named else args
    if config_name not in configs:
        line = format_unknown_name("config", config_name, configs)
        raise ValueError(f"{prog}: {line}")
    base = configs[config_name]
    if (file := value_of(flags, "--config")) is not None:
        if is_named:
            line = f"{config_name} and --config {file} exclude each other"
            raise ValueError(f"{prog}: {line}")
        base = experiment.config_loads(files.read_text(file), file)
        config_name = ""
    first, *others = configs
    choices = ", ".join([f"{first} (the default)", *others])
    description = f"{experiment.question} Configs: {choices}."
    request = parse_changes(base, flags, f"{prog} [CONFIG]", description)
    return run_study(experiment, *request, config_name=config_name, log=log)
