"""The command `jaxkv course`: live commands, hand-outs, autograders and grades."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Annotated

from experiments.course import assignments
from jaxkv import files
from jaxkv.cli import CommandOutput, choose_word, describe_default, is_word
from jaxkv.validation import NonNegativeInt

_USAGE = """usage: jaxkv course                          lists topics and assignments
       jaxkv course handout ASSIGNMENT --out DIR|FILE.zip
       jaxkv course autograder ASSIGNMENT --out DIR|FILE.zip [--seed N]
       jaxkv course grade ASSIGNMENT --solution FILE.py [--out results.json]"""
_ACTIONS = {
    "handout": "write statement, skeleton and public tests of an assignment",
    "autograder": "write an autograder for Gradescope, hidden tests included",
    "grade": "grade a solution by all tests",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CourseOptions:
    """Options of the actions of `jaxkv course`."""

    out: Annotated[Path | None, describe_default("none")] = None
    """New folder, or file of the type zip; for `grade` the file of the results."""
    solution: Annotated[Path | None, describe_default("none")] = None
    """The file that `grade` grades."""
    seed: NonNegativeInt = 0
    """Seed of the hidden tests."""
    wheel: Annotated[Path | None, describe_default("none")] = None
    """Wheel of jaxkv for the autograder of an assignment that needs it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LectureTopic:
    """A lecture topic, with a command that shows it live."""

    topic: str
    command: str
    processor_s: float | None
    """Processor time of a first run in s; None if it was not measured."""
    page: str
    """Path of its page."""


def read_topics() -> list[LectureTopic]:
    """Reads the table of topics, `topics.md`."""
    text = files.read_text(assignments.HOME / "topics.md")

    def seconds(cell: str) -> float | None:
        return None if cell == "not measured" else float(cell)

    rows = re.findall(r"^\| \[(.+?)\]\((.+?)\) \| `(.+?)` \| (.+?) \|$", text, re.M)
    return [
        LectureTopic(topic=topic, command=command, processor_s=seconds(s), page=page)
        for topic, page, command, s in rows
    ]


def main(args: list[str]) -> CommandOutput:
    """Runs `course [ACTION ASSIGNMENT]`."""
    from jaxkv.cli import NoOptions, parse_options

    if not args or (not is_word(args) and not {"-h", "--help"} & {*args}):
        parse_options(NoOptions, args, "jaxkv course", _USAGE)
        return _list_course()
    action = choose_word(args, "action", _ACTIONS, _USAGE)
    titles = {name: x.title for name, x in assignments.ASSIGNMENTS.items()}
    name = choose_word(args[1:], "assignment", titles, _USAGE)
    prog = f"jaxkv course {action} ASSIGNMENT"
    options = parse_options(CourseOptions, args[2:], prog, _ACTIONS[action])
    if action == "grade":
        return _grade(name, options)
    if options.out is None:
        raise ValueError(f"{prog}: --out is missing, a new folder or zip file")
    if action == "handout":
        assignments.write_handout(name, options.out)
    else:
        assignments.write_autograder(
            name, options.out, seed=options.seed, wheel=options.wheel
        )
    return CommandOutput({"out": str(options.out)}, [], [f"{options.out}: written"])


def _grade(name: str, options: CourseOptions) -> CommandOutput:
    from jaxkv.report import Sheet

    if options.solution is None or not options.solution.is_file():
        raise ValueError(f"solution={options.solution} must be a Python file")
    results = assignments.grade_assignment(name, options.solution, options.seed)
    if options.out is not None:
        files.write_atomically(options.out, json.dumps(results, indent=1))
    rows = [
        (f"{x['score']:g}/{x['max_score']:g}", x["name"], x["output"])
        for x in results["tests"]
    ]
    sheet = Sheet("", ("points", "test", "output"), rows)
    line = f"{results['score']:g} of {results['max_score']:g} points"
    return CommandOutput(results, [sheet], [line])


def _list_course() -> CommandOutput:
    from jaxkv.report import Sheet

    topics = read_topics()
    listed = {
        name: {"title": x.title, "hours": x.hours}
        for name, x in assignments.ASSIGNMENTS.items()
    }
    document = {
        "topics": [dataclasses.asdict(x) for x in topics],
        "assignments": [{"name": name, **x} for name, x in listed.items()],
    }
    sheets = [
        Sheet(
            "topics",
            ("topic", "command", "processor s"),
            [
                (
                    x.topic,
                    x.command,
                    "" if x.processor_s is None else f"{x.processor_s:g}",
                )
                for x in topics
            ],
        ),
        Sheet(
            "assignments",
            ("assignment", "title", "hours"),
            [(name, x["title"], x["hours"]) for name, x in listed.items()],
        ),
    ]
    return CommandOutput(document, sheets, [*_USAGE.splitlines()])
