"""The command `jaxkv course`: live commands, hand-outs, autograders and grades."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Annotated, NamedTuple

from experiments.course import assignments
from jaxkv import files
from jaxkv.cli import (
    CommandOutput,
    Terminal,
    asks_help,
    choose_word,
    describe_default,
    is_word,
)
from jaxkv.validation import NonNegativeInt

_USAGE = """usage: jaxkv course                          lists topics and assignments
       jaxkv course handout ASSIGNMENT --out DIR|FILE.zip
       jaxkv course autograder ASSIGNMENT --out DIR|FILE.zip --seed N
       jaxkv course grade ASSIGNMENT --solution FILE.py|DIR --seed N"""
_ACTIONS = {
    "handout": "write statement, skeleton and public tests of an assignment",
    "autograder": "write an autograder for Gradescope, hidden tests included",
    "grade": "grade a solution, or a folder of submissions, by all tests",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HandoutOptions:
    """Options of `jaxkv course handout`."""

    out: Path
    """New folder, or file of the type zip."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutograderOptions(HandoutOptions):
    """Options of `jaxkv course autograder`."""

    seed: NonNegativeInt = 0
    """Seed of the hidden tests."""
    wheel: Annotated[Path | None, describe_default("none")] = None
    """Wheel of jaxkv, for an assignment that needs it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradeOptions:
    """Options of `jaxkv course grade`."""

    solution: Path
    """Python file or folder of submissions, one file or folder for each student."""
    seed: NonNegativeInt = 0
    """Seed of the hidden tests."""
    user: Annotated[str | None, describe_default("this one")] = None
    """User that runs the solutions; root may choose one without rights."""
    out: Annotated[Path | None, describe_default("none")] = None
    """JSON file of the results."""


class LectureTopic(NamedTuple):
    """A lecture topic, with a command that shows it live.

    Attributes:
      topic: name of the topic.
      page: path of its page.
      command: the command.
      processor_s: processor time of a first run in s.
    """

    topic: str
    page: str
    command: str
    processor_s: float


def read_topics() -> list[LectureTopic]:
    """Reads the table of topics, `topics.md`."""
    text = files.read_text(assignments.HOME / "topics.md")
    rows = re.findall(r"^\| \[(.+?)\]\((.+?)\) \| `(.+?)` \| (.+?) \|$", text, re.M)
    return [LectureTopic(*words, float(seconds)) for *words, seconds in rows]


def main(args: list[str]) -> CommandOutput:
    """Runs `course [ACTION ASSIGNMENT]`."""
    from jaxkv.cli import NoOptions, parse_options
    from jaxkv.report import Sheet

    def parse[T](kind: type[T]) -> T:
        prog = f"jaxkv course {action} ASSIGNMENT"
        return parse_options(kind, args[2:], prog, _ACTIONS[action])

    listed = assignments.ASSIGNMENTS
    if not is_word(args) and not asks_help(args):
        parse_options(NoOptions, args, "jaxkv course", _USAGE)
        topics = read_topics()
        rows = [(x.topic, x.command, f"{x.processor_s:g}") for x in topics]
        works = [
            {"name": name, "title": x.title, "hours": x.hours}
            for name, x in listed.items()
        ]
        sheets = [
            Sheet("topics", ("topic", "command", "processor s"), rows),
            Sheet("assignments", (*works[0],), [(*x.values(),) for x in works]),
        ]
        document = {"topics": [x._asdict() for x in topics], "assignments": works}
        return CommandOutput(document, sheets, [*_USAGE.splitlines()])
    action = choose_word(args, "action", _ACTIONS, _USAGE)
    titles = {name: x.title for name, x in listed.items()}
    name = choose_word(args[1:], "assignment", titles, _USAGE)
    if action == "grade":
        return _grade(name, parse(GradeOptions))
    if action == "handout":
        out = parse(HandoutOptions).out
        assignments.write_handout(name, out)
    else:
        options = parse(AutograderOptions)
        out = options.out
        assignments.write_autograder(name, out, seed=options.seed, wheel=options.wheel)
    return CommandOutput({"out": str(out)}, [], [f"{out}: written"])


def _grade(name: str, options: GradeOptions) -> CommandOutput:
    from jaxkv.report import Sheet

    path = options.solution
    paths = [path]
    if path.is_dir():
        paths = [x for x in sorted(path.iterdir()) if x.is_dir() or x.suffix == ".py"]
    elif not path.is_file():
        raise ValueError(f"solution={path} must be a Python file or a folder")
    with Terminal() as bars:
        tracked = bars.track(paths, "submissions", "submissions")
        results = assignments.grade_solutions(name, tracked, options.seed, options.user)
        graded = dict(zip([x.name for x in paths], results, strict=True))
    document = graded if path.is_dir() else graded[path.name]
    if options.out is not None:
        files.write_atomically(options.out, json.dumps(document, indent=1))
    rows = []
    for student, result in graded.items():
        points = f"{result['score']:g} of {result['max_score']:g}"
        rows.append((student, points, result["output"]))
        failures = [x for x in result["tests"] if x["status"] == "failed"]
        for x in failures[:1] if path.is_dir() else failures:
            rows.append(("", f"-{x['max_score']:g}", f"{x['name']}: {x['output']}"))
    sheet = Sheet("", ("solution", "points", "output"), rows)
    return CommandOutput(document, [sheet], [])
