"""Incidents: folders with a state of a server, and all that followed around a breach.

  incident.json   model, options, objective, breach, calls, requests and outcomes
  state/          the state before the first call, see `engine.save_state`
  SHA256SUMS      digests of all files

Without prompts, tokens are masked, see `token_masks`, and the incident has the lengths
of the answers. The schedule can then be replayed with tokens that mean nothing; an
answer that a later prompt repeats is not found in the prefix cache.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from jaxkv import files, validation
from jaxkv.engine import EngineConfig, EngineState, save_state
from jaxkv.sampling import Sampling
from jaxkv.scheduling import RequestAttributes

INCIDENT_FILE = "incident.json"
STATE_FOLDER = "state"
"""Names in the folder."""
FORMAT = 1
"""Version of the format."""
type JsonObject = dict[str, Any]
"""A parsed JSON object."""
_PLAIN_FIELDS = (
    "model",
    "digests",
    "loading",
    "bounds",
    "policy",
    "breach",
    "has_tokens",
)


class IncidentObjectives(NamedTuple):
    """Objectives of a server; None where there is none."""

    ttft_s: float | None = None
    """Largest time to first token, in s."""
    tpot_s: float | None = None
    """Largest time per output token after the first, in s."""


class IncidentRequest(NamedTuple):
    """A request that was submitted after the state."""

    request_id: int
    key_id: int
    arrival_s: float
    prompt: list[int]
    sampling: Sampling
    attributes: RequestAttributes
    end_tokens: list[int]
    """Tokens of the model that end an answer."""


class IncidentCall(NamedTuple):
    """A call of the engine, as it was dispatched."""

    now_s: float
    """Clock of the call."""
    may_draft: bool
    request_ids: list[int]
    """Requests that were submitted just before."""
    cancels: list[tuple[int, int]]
    """Requests and samples that were cancelled just after."""
    has_drained: bool
    """True if finished requests were removed just after."""
    num_rows: list[int]
    """Tokens fed in each step."""


class IncidentOutcome(NamedTuple):
    """A request that completed after the state. Times in s, as the host read them."""

    request_id: int
    arrival_s: float
    first_token_s: float | None
    finish_s: float
    reasons: list[str]
    """Finish reason of each sequence that was returned."""
    samples: list[int]
    """Index of each sequence in the request."""
    num_tokens: list[int]
    """Tokens of each sequence's answer."""
    tokens: list[list[int]] | None
    """The answers, where tokens are kept."""


class Incident(NamedTuple):
    """What was kept of an incident, besides the state."""

    folder: Path
    """Its folder."""
    model: str
    """Folder of the model, or name of a bundled one."""
    digests: dict[str, str]
    """SHA-256 of the files of the model."""
    loading: JsonObject
    """Options by which the model was loaded."""
    bounds: JsonObject
    """Bounds of the engine."""
    policy: str
    """Name of the scheduling policy."""
    objectives: IncidentObjectives
    breach: JsonObject
    """Request, name of the objective, seconds, and the objective."""
    has_tokens: bool
    """False if tokens are masked."""
    calls: list[IncidentCall]
    requests: list[IncidentRequest]
    outcomes: list[IncidentOutcome]


def write_incident(
    incident: Incident, state: EngineState, config: EngineConfig
) -> None:
    """Writes the folder of an incident.

    Raises:
      ValueError: the folder exists, or the disk is full.
    """
    document = {"format": FORMAT, **incident._asdict()}
    del document["folder"]
    document["objectives"] = incident.objectives._asdict()
    for name in ("calls", "requests", "outcomes"):
        document[name] = [x._asdict() for x in document[name]]
    for row in document["requests"]:
        row["sampling"] = dataclasses.asdict(row["sampling"])
        row["attributes"] = row["attributes"]._asdict()
    files.check_replaceable(incident.folder, INCIDENT_FILE, "incident", False)
    with files.replace_folder(incident.folder, ValueError) as new:
        save_state(new / STATE_FOLDER, state, config)
        (new / INCIDENT_FILE).write_text(json.dumps(document) + "\n", encoding="utf-8")
        files.write_checksums(new)


def read_incident(folder: str | os.PathLike[str]) -> Incident:
    """Reads the folder of an incident, except its state.

    Raises:
      ValueError: the folder is missing, damaged, or no incident; one line.
    """
    folder = validation.path("folder", folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such incident")
    path = folder / INCIDENT_FILE
    if not path.is_file():
        raise ValueError(f"{folder}: is no incident, it has no {INCIDENT_FILE}")
    files.verify_checksums(folder)
    document = files.read_json(path)
    if document.get("format") != FORMAT:
        raise ValueError(f"{path}: format={document.get('format')} must be {FORMAT}")
    try:
        return Incident(
            folder=folder,
            objectives=IncidentObjectives(**document["objectives"]),
            calls=[IncidentCall(**x) for x in document["calls"]],
            requests=[_read_request(x) for x in document["requests"]],
            outcomes=[IncidentOutcome(**x) for x in document["outcomes"]],
            **{name: document[name] for name in _PLAIN_FIELDS},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: is no incident: {error}") from None


def _read_request(row: JsonObject) -> IncidentRequest:
    """Reads a request; lists of its sampling parameters become tuples again."""
    fields: JsonObject = {
        name: tuple(x) if isinstance(x, list) else x
        for name, x in row["sampling"].items()
    }
    values: JsonObject = {**row, "sampling": Sampling(**fields)}
    values["attributes"] = RequestAttributes(**row["attributes"])
    return IncidentRequest(**values)


def model_digests(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of the files that determine a model and its tokens."""
    names = ("*.json", "*.safetensors", "*.jinja")
    paths = {path for name in names for path in folder.glob(name)}
    return {path.name: files.file_digest(path) for path in sorted(paths)}
