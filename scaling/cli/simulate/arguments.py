"""Arguments of `jaxkv simulate`: a model and options, read without importing jax."""

from jaxkv.cli import CommandOutput, is_word, parse_options, parse_subject, value_of
from scaling.cli.cost import list_models
from scaling.cli.simulate.options import SimulateOptions


def main(args: list[str]) -> CommandOutput:
    """Runs `simulate MODEL [OPTIONS]`; `--stages` and `--verify` need no model."""
    names = list_models()
    prog = "jaxkv simulate MODEL"
    description = f"MODEL is a config.json, a folder with one, or {names}."
    has_stages = value_of(args, "--stages") is not None
    if (has_stages or "--verify" in args) and not is_word(args):
        options = parse_options(SimulateOptions, args, prog, description)
        request = ("", options)
    else:
        missing = f"MODEL is missing: a config.json, a folder, or {names}"
        request = parse_subject(args, SimulateOptions, prog, missing, description)
    # After the help, since it imports jax.
    from scaling.cli.simulate.command import simulate_command

    return simulate_command(*request)
