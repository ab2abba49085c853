"""The numbers of what is shared: for a program, and as tables for a person."""

from typing import Any

import numpy as np

from experiments.framework import Part, Sheet, units
from experiments.serving.sharing import published
from experiments.serving.sharing.groups import Readings, Savings
from experiments.serving.sharing.picture import Picture
from experiments.serving.sharing.prefixes import Prefixes


def metrics(
    samples: Savings,
    beams: Savings,
    readings: Readings,
    prefixes: Prefixes,
    picture: Picture,
) -> dict[str, Any]:
    """Lists every setting, a row each."""
    return {
        "samples": _rows(samples, beams=False),
        "beams": _rows(beams, beams=True),
        "readings": [
            {name: int(column[i]) for name, column in readings._asdict().items()}
            for i in range(len(readings.chunk_size))
        ],
        "prefixes": [
            {
                "prefix_tokens": int(prefixes.prefix_tokens[i]),
                "requests": int(prefixes.num_requests[i]),
                "saved_share": float(prefixes.saved_share[i]),
                "num_cached": int(prefixes.num_cached[i]),
                "prompt_tokens": int(prefixes.prompt_tokens[i]),
                "prompt_rows_without": int(prefixes.prompt_rows[i, 0]),
                "prompt_rows_with": int(prefixes.prompt_rows[i, 1]),
                "steps_without": int(prefixes.steps[i, 0]),
                "steps_with": int(prefixes.steps[i, 1]),
                "tokens_without_per_s": float(np.median(prefixes.rate[i, :, 0])),
                "tokens_with_per_s": float(np.median(prefixes.rate[i, :, 1])),
                "speed_up": float(prefixes.speed_ups[i, 1]),
                "speed_up_lowest": float(prefixes.speed_ups[i, 0]),
                "speed_up_highest": float(prefixes.speed_ups[i, 2]),
                "different_answers": int(prefixes.num_different[i]),
            }
            for i in range(len(prefixes.prefix_tokens))
        ],
        "pictures": [
            {"scene": str(title), "logical_pages": logical, "pages": pages}
            for i, title in enumerate(picture.title)
            for logical, pages in [picture.num_pages(i)]
        ],
    }


def summary(
    samples: Savings,
    beams: Savings,
    readings: Readings,
    prefixes: Prefixes,
    picture: Picture,
) -> list[Part]:
    """Puts ours beside the paper's; parts that were not served are left out."""
    parts: list[Part] = []
    if samples.lengths.size:
        parts.append(_savings_sheet(samples, beams, readings))
    if prefixes.prefix_tokens.size:
        parts.append(_prefix_sheet(prefixes))
    if picture.title.size:
        rows = [
            (str(title), *map(str, picture.num_pages(i)))
            for i, title in enumerate(picture.title)
        ]
        heads = ("in the picture", "logical pages", "physical pages")
        parts.append(Sheet("", heads, rows))
    return parts


def _rows(savings: Savings, *, beams: bool) -> list[dict[str, Any]]:
    rows = []
    settings = zip(savings.lengths, savings.num_sequences, strict=True)
    for i, (name, num) in enumerate(settings):
        row = {
            "lengths": str(name),
            "sequences": int(num),
            "requests": int(savings.num_requests[i]),
            "mean_prompt": float(savings.mean_prompt[i]),
            "mean_answer": float(savings.mean_answer[i]),
            "saved_share": float(savings.saved_share[i]),
            "published_share": published.share(str(name), int(num), beams),
            "steps": int(savings.steps[i]),
            "copied_pages": int(savings.num_copied[i]),
            "preempted": int(savings.num_preempted[i]),
        }
        if not beams:
            row["expected_share"] = float(savings.expected_share[i])
        rows.append(row)
    return rows


def _savings_sheet(samples: Savings, beams: Savings, readings: Readings) -> Sheet:
    rows = []
    pairs = zip(samples.lengths.tolist(), samples.num_sequences.tolist(), strict=True)
    for i, (name, num) in enumerate(pairs):
        tokens = samples.mean_prompt[i], samples.mean_answer[i]
        found = beams.at(name, num)
        rows.append(
            (
                f"{name}: {tokens[0]:.0f} + {tokens[1]:.0f}",
                str(num),
                units.share(float(samples.saved_share[i])),
                units.share(float(samples.expected_share[i])),
                units.share(published.share(name, num, False)),
                units.share(found if np.isfinite(found) else None),
                units.share(published.share(name, num, True)),
            )
        )
    heads = ("tokens, prompt + answer", "n", "answers save", "lengths say", "paper's")
    note = "Pages in use against those that every sequence would hold for itself."
    if readings.chunk_size.size:
        rows_fed, tokens_given = readings.prompt_rows.max(), readings.prompt_tokens[0]
        note += (
            f" Requests of {readings.num_sequences[0]} answers fed {rows_fed:,} tokens "
            f"for prompts of {tokens_given:,}, whatever the chunks."
        )
    heads = (*heads, "beams save", "paper's")
    return Sheet("pages saved by sequences of one request", heads, rows, note)


def _prefix_sheet(prefixes: Prefixes) -> Sheet:
    rows = [
        (
            f"{num:,} tokens",
            units.share(float(prefixes.saved_share[i])),
            *(
                f"{a:,} / {b:,}"
                for a, b in (prefixes.prompt_rows[i], prefixes.steps[i])
            ),
            "{1:.2f} ({0:.2f}-{2:.2f})".format(*prefixes.speed_ups[i]),
            units.cell(int(prefixes.num_different[i])),
        )
        for i, num in enumerate(prefixes.prefix_tokens.tolist())
    ]
    heads = ("beginning", "pages saved", "prompt tokens computed", "steps")
    heads = (*heads, "times the tokens/s", "other answers")
    repeats = prefixes.rate.shape[1]
    note = (
        "Without and with the prefix cache, which holds the beginning at the start; "
        f"rates: medians, lowest and highest of {repeats} alternating pairs of runs."
    )
    title = f"{prefixes.num_requests[0]} requests that begin with the same text"
    return Sheet(title, heads, rows, note)
