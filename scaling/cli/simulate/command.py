"""`jaxkv simulate`: latency and throughput of a server, and their uncertainty.

`options` are the flags, `case` resolves them to a server and its loads, `summary` and
`tables` report the simulated runs, `drawing` draws them, and `stages` predicts the rows
of a table.
"""

import dataclasses
from typing import Any

import jax

from jaxkv.cli import CommandOutput, Terminal, WorkStopped
from jaxkv.files import read_table
from jaxkv.report import RunTrace, dumps, record_simulation, write_files
from jaxkv.scheduling import find_policy
from scaling.calibration import (
    PUBLISHED_LOOPS,
    draw_coefficients,
    find_server_form,
    format_posterior,
    make_server_member,
    simulate_server,
)
from scaling.cli.calibrate import report_server_table
from scaling.cli.simulate import comparison, stages, tables
from scaling.cli.simulate.case import (
    ServerCase,
    find_next_measurements,
    resolve_server_case,
)
from scaling.cli.simulate.options import SimulateOptions
from scaling.cli.simulate.summary import RunSummary, find_largest_rates

_MAX_TRACED_S = 120.0
"""Longest load of which the memory of each step is kept."""


def simulate_command(name: str, options: SimulateOptions) -> CommandOutput:
    """Runs `jaxkv simulate`.

    Args:
      name: name of a model, its config.json, or a folder; "" with `--stages` and with
        `--verify`.
      options: the server, its load, and the output.

    Raises:
      ValueError: an option is invalid or missing.
      WorkStopped: the simulation was interrupted; no file is written.
    """
    if options.verify:
        return _verify(name, options)
    if options.stages is not None:
        return _predict_stages(name, options)
    case = resolve_server_case(name, options)
    is_sweep = len(case.loads) > 1
    duration_s = max(x.warm_up_s + x.window_s for x in case.loads)
    with Terminal() as bars:
        runs = simulate_server(
            case.setup,
            case.loads,
            draw_coefficients(case.posterior.deviations),
            policy=case.policy,
            num_slots=case.num_slots,
            keep_trace=not is_sweep and duration_s <= _MAX_TRACED_S,
            progress=bars,
        )
        _refuse_partial(bars)
    summaries = [RunSummary(case, run) for run in runs]
    rows = [x.document(rate) for x, rate in zip(summaries, case.rates, strict=True)]
    document = _describe(case) | (rows[0] if not is_sweep else {"rows": rows})
    parts = [tables.server_sheet(case)]
    largest = {}
    if is_sweep:
        parts.append(tables.sweep_sheet(rows))
        if case.objectives:
            probabilities = [x["objective_probability"] for x in rows]
            largest = find_largest_rates(case.rates, probabilities)
            document["largest_rate_per_s"] = {
                f"{level:g}": x._asdict() for level, x in largest.items()
            }
    else:
        parts += tables.run_sheets(document)
    if case.objectives:
        parts.append(tables.objective_sheet(case, rows, largest))
    if case.log is not None:
        document["comparison"] = comparison.compare_requests(case, summaries[0])
        parts += comparison.comparison_sheets(document["comparison"])
        if options.fit_requests is not None:
            parts.append(comparison.coefficient_sheet(case.posterior))
    if options.measure_next:
        gains = find_next_measurements(case)
        document["measure_next"] = [
            {**jax.tree.map(float, gain.load._asdict()), "end_to_end": gain.end_to_end}
            | {"first_token": gain.first_token}
            for gain in gains
        ]
        parts.append(tables.measurement_sheet(gains))
    sizes = [item for x in summaries for item in x.outside.items()]
    # The farthest size of each name comes last, and remains.
    outside = dict(sorted(sizes, key=lambda item: item[1].octaves))
    parts.append(tables.basis_sheet(case, outside))
    lines = []
    if not is_sweep and (share := document["overloaded_share"]):
        lines.append(f"overloaded: the queue grows in {100 * share:.0f} % of the draws")
    if options.record is not None:
        _record_load(case).save(options.record)
        document["trace"] = str(options.record)
        lines.append(f"trace: {options.record}")
    if options.plot or options.out is not None:
        contents: dict[str, str | bytes] = {"simulate.json": dumps(document)}
        if options.plot:
            # matplotlib takes a second to import.
            from scaling.cli.simulate import drawing

            if case.log is not None:
                contents |= comparison.render_comparison(case, summaries[0])
            else:
                contents |= drawing.render_simulation(case, summaries, rows, largest)
        if options.fit_requests is not None:
            contents["server.json"] = format_posterior(case.posterior)
        document["out"] = write_files(options.out, "simulate", contents)
        lines.append(f"folder: {document['out']}")
    return CommandOutput(document, parts, lines)


def _record_load(case: ServerCase) -> RunTrace:
    """Returns the trace of the only load with the first draw of the coefficients."""
    draws = draw_coefficients(case.posterior.deviations)
    draw = jax.tree.map(lambda x: x[0], draws)
    member = make_server_member(case.setup, case.loads[0], draw, case.policy)
    max_slots = case.setup.max_num_seqs
    return record_simulation(member, max_slots=max_slots, head=min(max_slots, 511))


def _describe(case: ServerCase) -> dict[str, Any]:
    setup = case.setup
    return {
        "model": setup.model.name,
        "device": setup.device.name,
        "tensor_parallel": setup.tensor_parallel,
        "policy": case.policy_name,
        "max_num_seqs": setup.max_num_seqs,
        "max_num_batched_tokens": setup.max_num_batched_tokens,
        "max_model_len": setup.max_model_len,
        "num_draws": len(case.posterior.deviations),
        "objectives": [x._asdict() for x in case.objectives],
        "fitted": {
            "stages": list(case.posterior.stages),
            "models": list(case.posterior.residuals),
            "devices": list(case.posterior.devices),
            "has_model": case.fitted_model is not None,
            "has_device": setup.device.name in case.posterior.devices,
        },
        "doubts": list(case.doubts),
    }


def _verify(name: str, options: SimulateOptions) -> CommandOutput:
    """Runs `jaxkv simulate --policy POLICY --verify`; the status is 1 if it fails."""
    if name:
        raise ValueError(f"{name}: --verify has a small random model of its own")
    _refuse_others(options, "--verify", ("verify", "policy", "seed"))
    # Imports the engine.
    from jaxkv.verification import POLICY_CHECKS, verify_policy

    policy = find_policy(options.policy, max_running=options.max_num_seqs)
    report = verify_policy(policy, seed=options.seed)
    fault = report.fault
    document = {
        "policy": options.policy,
        "holds": fault is None,
        "num_loads": report.num_loads,
        "num_steps": report.num_steps,
        "checks": list(POLICY_CHECKS),
        "fault": None
        if fault is None
        else {
            "check": fault.check,
            "reason": fault.reason,
            "seed": fault.load.seed,
            "requests": [dataclasses.asdict(x) for x in fault.load.requests],
        },
    }
    lines = str(report).splitlines()
    return CommandOutput(document, [], lines, 0 if fault is None else 1)


def _refuse_others(
    options: SimulateOptions, flag: str, allowed: tuple[str, ...]
) -> None:
    """Refuses options that `flag` does not use."""
    plain = SimulateOptions()
    for field in dataclasses.fields(SimulateOptions):
        setting = getattr(options, field.name)
        if field.name not in allowed and setting != getattr(plain, field.name):
            other = f"--{field.name.replace('_', '-')}"
            raise ValueError(f"{other} and {flag} exclude each other")


def _predict_stages(name: str, options: SimulateOptions) -> CommandOutput:
    """Runs `jaxkv simulate --stages FILE`."""
    if name:
        raise ValueError(f"{name}: --stages has the models of its rows")
    stage_options = ("stages", "coefficients", "draws", "seed", "plot", "out")
    _refuse_others(options, "--stages", stage_options)
    assert options.stages is not None
    if find_server_form(read_table(options.stages, allow_partial=False).names):
        return report_server_table(
            options.stages,
            options.coefficients or PUBLISHED_LOOPS,
            out=options.out,
            has_figure=options.plot,
        )
    with Terminal() as bars:
        document, posterior = stages.predict_table(options, bars)
        _refuse_partial(bars)
    lines = []
    if options.plot or options.out is not None:
        contents: dict[str, str | bytes] = {"simulate.json": dumps(document)}
        if options.plot:
            from scaling.cli.simulate import drawing

            contents |= drawing.render_stages(document)
        document["out"] = write_files(options.out, "simulate", contents)
        lines.append(f"folder: {document['out']}")
    parts = [stages.stage_sheet(document), stages.judgement_sheet(document, posterior)]
    return CommandOutput(document, parts, lines)


def _refuse_partial(bars: Terminal) -> None:
    if bars.has_stopped:
        raise WorkStopped("interrupted; no file is written", bars.status)
