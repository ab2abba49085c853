"""Runs an incident of a server again, under its own and other policies: `replay`.

The module imports only the standard library at the top, so that `--help` is fast.
"""

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from jaxkv import files, validation
from jaxkv.cli import generate, parsing
from jaxkv.cli.arguments import parse_subject
from jaxkv.cli.output import CommandOutput

if TYPE_CHECKING:
    from jaxkv.report import ReportPart
    from jaxkv.server import Incident, JsonObject, ReplayTable

NUM_SHOWN = 5
"""Requests of a policy that are printed: those that gained or lost most."""
LEAST_CHANGE = 0.01
"""Relative change of a latency above which a request has gained or lost."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Policies, and the place of the model."""

    policy: tuple[str, ...] = ()
    """Policy to compare with the server's own, as for serve, such as
    shortest-remaining; may be given several times."""
    model: Annotated[str | None, parsing.describe_default("that of the server")] = None
    """Folder of the model, or name of a bundled one; its files must be the server's."""


def main(args: list[str]) -> CommandOutput:
    """Runs `replay SNAPSHOT [OPTIONS]`."""
    description = (
        "SNAPSHOT is an incident, a folder that jaxkv serve --keep-incidents has saved."
    )
    folder, options = parse_subject(
        args,
        ReplayOptions,
        "jaxkv replay SNAPSHOT",
        "SNAPSHOT is missing: the folder of an incident",
        description,
    )
    return replay(Path(folder), options)


def replay(folder: Path, options: ReplayOptions) -> CommandOutput:
    """Repeats the calls of an incident, and continues its state under each policy.

    Args:
      folder: folder of the incident.
      options: policies, and the place of the model.

    Returns:
      Latencies by policy, and the requests that gained and lost.

    Raises:
      ValueError: the incident is damaged or of another model, or a policy is unknown.
    """
    from jaxkv.report import from_plain
    from jaxkv.scheduling import POLICY_NAMES, find_eviction, find_policy
    from jaxkv.server import IncidentEngine, model_digests, read_incident

    policies = {name: find_policy(name) for name in options.policy}
    incident = read_incident(folder)
    name = incident.policy
    # A file that only the incident names is not executed.
    if name not in POLICY_NAMES and name not in policies:
        raise ValueError(
            f"{folder}: policy={validation.format_value(name)} of the server is a "
            "file; it must be named as well, by --policy"
        )
    server_policy = policies[name] if name in policies else find_policy(name)
    model = incident.model if options.model is None else options.model
    digests = model_digests(files.model_folder(model))
    for name in sorted({*digests, *incident.digests}):
        if digests.get(name) != incident.digests.get(name):
            raise ValueError(
                f"{folder}: is of another model: {name} of {model} differs"
            )
    if not incident.calls:
        raise ValueError(f"{folder}: has no calls")
    loading = from_plain(generate.ModelOptions, incident.loading, str(folder))
    engine = generate.load_engine(
        generate.read_model(model, loading),
        loading,
        eviction=find_eviction(incident.policy),
        **incident.bounds,
    )
    engine.policy = server_policy
    runner = IncidentEngine(engine, incident)
    print("[repeating the calls of the server]", file=sys.stderr)
    calls = runner.replay()
    print("[continuing the state under each policy]", file=sys.stderr)
    names = [*({incident.policy: None} | policies)]
    table = runner.compare(
        {incident.policy: server_policy} | policies,
        {name: find_eviction(name) for name in names},
    )
    document = {
        "incident": folder,
        "model": incident.model,
        "has_tokens": incident.has_tokens,
        "breach": incident.breach,
        "replay": calls._asdict(),
        "call_time": table.call_time._asdict(),
        "policies": policy_rows(table, incident),
        "requests": request_rows(table),
    }
    return CommandOutput(document, *_tables(document, table))


def policy_rows(table: "ReplayTable", incident: "Incident") -> "list[JsonObject]":
    """Returns latencies of each policy, over requests that end under all of them."""
    import numpy as np

    ended = np.isfinite(table.latency_s).all(axis=0)
    limits = incident.objectives
    rows = []
    for i, name in enumerate(table.policies):
        row: JsonObject = {
            "policy": name,
            "num_requests": int(ended.sum()),
            "num_open": int(np.isnan(table.latency_s[i]).sum()),
        }
        times = {"latency": table.latency_s, "ttft": table.ttft_s}
        for key, seconds in times.items():
            part = seconds[i, ended]
            row[f"{key}_mean_s"] = float(part.mean()) if part.size else None
            row[f"{key}_p90_s"] = float(np.percentile(part, 90)) if part.size else None
        late = np.zeros(ended.shape, bool)
        if limits.ttft_s is not None:
            late |= table.ttft_s[i] > limits.ttft_s
        if limits.tpot_s is not None:
            late |= table.tpot_s[i] > limits.tpot_s
        change = table.latency_s[i, ended] / table.latency_s[0, ended] - 1
        row |= {
            "num_breaches": int(late.sum()),
            "num_gained": int((change < -LEAST_CHANGE).sum()),
            "num_lost": int((change > LEAST_CHANGE).sum()),
            "num_preempted": int(table.num_preempted[i]),
            "same_tokens": table.same_tokens[i],
        }
        rows.append(row)
    return rows


def request_rows(table: "ReplayTable") -> "list[JsonObject]":
    """Returns the times of each request, by policy."""
    return [
        {
            "request_id": request_id,
            "prompt_tokens": table.prompt_tokens[k],
            "answer_tokens": table.answer_tokens[k],
            "ttft_s": dict(
                zip(table.policies, table.ttft_s[:, k].tolist(), strict=True)
            ),
            "latency_s": dict(
                zip(table.policies, table.latency_s[:, k].tolist(), strict=True)
            ),
        }
        for k, request_id in enumerate(table.request_ids)
    ]


def _tables(
    document: "JsonObject", table: "ReplayTable"
) -> "tuple[list[ReportPart], list[str]]":
    """Returns the tables and the lines for a terminal."""
    from jaxkv.report import row_sheet

    columns = {
        "policy": "policy",
        "mean latency": "latency_mean_s",
        "p90": "latency_p90_s",
        "mean first token": "ttft_mean_s",
        "p90 first token": "ttft_p90_s",
        "breaches": "num_breaches",
        "gained": "num_gained",
        "lost": "num_lost",
        "preempted": "num_preempted",
        "open": "num_open",
    }
    sheets = [row_sheet("latencies by policy", document["policies"], columns)]
    rows = []
    for i, name in enumerate(table.policies[1:], 1):
        change = table.latency_s[i] - table.latency_s[0]
        order = [k for k in change.argsort() if change[k] == change[k]]
        chosen = dict.fromkeys([*order[:NUM_SHOWN], *order[-NUM_SHOWN:]])
        rows += [
            {
                "policy": name,
                "request": table.request_ids[k],
                "prompt": table.prompt_tokens[k],
                "answer": table.answer_tokens[k],
                "own_s": table.latency_s[0, k],
                "latency_s": table.latency_s[i, k],
                "change_s": change[k],
            }
            for k in chosen
        ]
    if rows:
        columns = {
            "policy": "policy",
            "request": "request",
            "prompt tokens": "prompt",
            "answer tokens": "answer",
            f"under {table.policies[0]}": "own_s",
            "latency": "latency_s",
            "change": "change_s",
        }
        sheets.append(row_sheet("largest gains and losses", rows, columns))
    calls = document["replay"]
    breach = document["breach"]
    kind = "tokens" if document["has_tokens"] else "lengths (tokens are masked)"
    time = table.call_time
    return sheets, [
        f"breach: request {breach['request_id']}, {breach['objective']} "
        f"{breach['measured_s']:.3f} s, at most {breach['limit_s']:g} s",
        f"replay: {calls['num_equal_calls']} of {calls['num_calls']} calls equal, "
        f"{calls['num_equal_answers']} of {calls['num_answers']} answers with equal "
        f"{kind}",
        f"time of a call: {1000 * time.call_s:.1f} ms + {1000 * time.row_s:.3f} ms per "
        "token, fit to the calls of the server",
    ]
