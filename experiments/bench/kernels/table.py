"""A record of the kernel benchmark as the README shows it: nothing is typed by hand.

from experiments import kernel_table
print(kernel_table.markdown(Path("experiments/records/bench_kernels")))
"""

from pathlib import Path
from typing import Any

from experiments.bench.kernels import sheets
from experiments.framework import registry, run_folder, units
from pallas_kernels.bench import Ceilings

_HEADS = (
    *("shape", "bytes", "jaxkv", "best peer", "best / jaxkv"),
    *("of the floor", "target"),
)


def markdown(folder: Path) -> str:
    """Writes a record as a table in Markdown, and where it was measured below.

    A shape's time is that of the fastest of ours, a layer's share of the plan in it;
    the faster side is bold. What is not timed has a line that says so.

    Args:
      folder: a run folder of `bench kernels`, made on a GPU and not cut short.

    Raises:
      ValueError: it is no such folder.
    """
    run = run_folder.read(folder, registry.load("bench_kernels"))
    head, *rows = run.result
    if head["device"] == "cpu":
        raise ValueError(f"{folder}: was made on a CPU; the table is of a GPU's record")
    if run.env.get("status") != "done":
        raise ValueError(f"{folder}: {run.env.get('status')=}; only a whole run counts")
    names = dict.fromkeys(row["spec"] for row in rows)
    lines = [_line(name, [x for x in rows if x["spec"] == name]) for name in names]
    rule = "|".join(["---"] * len(_HEADS))
    table = [f"| {' | '.join(_HEADS)} |", f"|{rule}|", *lines]
    return "\n".join([*table, "", _caption(head, run.env)])


def _line(name: str, rows: list[dict[str, Any]]) -> str:
    """The line of a shape."""
    ours = _fastest([row for row in rows if not row["is_peer"]])
    peer = _fastest([row for row in rows if row["is_peer"]])
    size = units.size(rows[0]["bytes"])
    theirs = f"{units.seconds(peer['seconds'])} ({sheets.named(peer)})" if peer else "-"
    if ours is None:
        notes = dict.fromkeys(row["note"] for row in rows if not row["is_peer"])
        cells = [f"not timed: {'; '.join(notes)}", theirs, "-", "-", "-"]
        return f"| {' | '.join([name, size, *cells])} |"
    mine = units.seconds(ours["seconds"])
    if peer and peer["seconds"] < ours["seconds"]:
        theirs = f"**{theirs}**"
    else:
        mine = f"**{mine}**"
    if ours["implementation"] != "mosaic_gpu":
        mine += f" ({ours['implementation']})"
    ratio = f"{peer['seconds'] / ours['seconds']:.2f}" if peer else "-"
    share, target = units.share(ours["fraction"]), units.seconds(ours["target_s"])
    return f"| {' | '.join([name, size, mine, theirs, ratio, share, target])} |"


def _fastest(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    timed = [row for row in rows if row["seconds"] is not None]
    return min(timed, key=lambda row: row["seconds"], default=None)


def _caption(head: dict[str, Any], env: dict[str, Any]) -> str:
    """Says where, when and with what, and what the device reached."""
    ceilings = Ceilings(**head["ceilings"])
    versions = {"jax": env["versions"].get("jax", "?"), **head["peers"]}
    said = [
        head["device"],
        env["started_at"][:10],
        f"commit {(env['commit'] or 'unknown')[:10]}",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
    ]
    reached = [
        f"copy {units.size(ceilings.copy_bytes_per_s)}/s",
        f"read {units.size(ceilings.read_bytes_per_s)}/s",
        f"matrix product {units.flops(ceilings.flops_per_s)}/s",
        f"empty call {units.seconds(ceilings.empty_call_s)}",
    ]
    clock = sheets.CLOCKS[ceilings.clock]
    return f"{'; '.join(said)}. Measured in the same run: {', '.join(reached)}. {clock}"
