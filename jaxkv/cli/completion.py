"""`jaxkv completion SHELL`: a completion script, made from the help of commands."""

import contextlib
import importlib
import io
import re

from jaxkv.cli.arguments import FULL_HELP, choose_word
from jaxkv.cli.main import COMMANDS, FIGURES
from jaxkv.cli.output import CommandOutput

_SHELLS = {
    "bash": "jaxkv completion bash > ~/.local/share/bash-completion/completions/jaxkv",
    "zsh": "jaxkv completion zsh > ~/.jaxkv.zsh; then source it in .zshrc",
    "fish": "jaxkv completion fish > ~/.config/fish/completions/jaxkv.fish",
}
_BASH = """\
_jaxkv() {{
  local words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands}"
  else
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _jaxkv jaxkv"""
"""Script of bash, and of zsh after `bashcompinit`; other words complete as files."""


def main(args: list[str]) -> CommandOutput:
    """Runs `completion SHELL`."""
    usage = "usage: jaxkv completion SHELL"
    shell = choose_word(args, "shell", _SHELLS, usage)
    if args[1:]:
        raise ValueError(f"{args[1]}: jaxkv completion has no further arguments")
    words = {name: _help_words(name) for name in COMMANDS if name != "completion"}
    words["completion"] = [*_SHELLS]
    if shell == "fish":
        lines = [
            f"complete -c jaxkv -n 'test (count (commandline -opc)) -eq 1' -a '{name}'"
            for name in words
        ]
        for name, choices in words.items():
            start = f"complete -c jaxkv -n '__fish_seen_subcommand_from {name}'"
            lines += [
                f"{start} -l {word[2:]}" if word[0] == "-" else f"{start} -a {word}"
                for word in choices
            ]
        script = "\n".join(lines)
    else:
        cases = [f'    {name}) words="{" ".join(x)}" ;;' for name, x in words.items()]
        script = _BASH.format(commands=" ".join(words), cases="\n".join(cases))
    if shell == "zsh":
        script = f"autoload -U +X bashcompinit && bashcompinit\n{script}"
    return CommandOutput({"shell": shell, "script": script}, [], [script])


def _help_words(name: str) -> list[str]:
    """Returns the options and the named choices in the help of a command."""
    module, _, function = COMMANDS[name].function.partition(":")
    call = getattr(importlib.import_module(module), function)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        call([FULL_HELP])
    words = re.findall(
        r"^(?:[│ ]{0,3}(--\w[-\w]*)|  ([a-z]\w+)  )", printed.getvalue(), re.MULTILINE
    )
    general = ["--json", "--help", FULL_HELP]
    if name in FIGURES:
        general += ["--style", "--format"]
    if name in ("bench", "run"):  # the options of all experiments
        general += ["--config", "--max-seconds", "--out"]
    return sorted({flag or choice for flag, choice in words} | {*general})
