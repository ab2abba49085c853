"""What was published on sharing, held against ours."""

from experiments.framework import Claim, judge
from experiments.serving.sharing.groups import Readings, Savings
from experiments.serving.sharing.picture import Picture
from experiments.serving.sharing.prefixes import Prefixes

PAPER = "Kwon et al. 2023, arXiv:2309.06180"

SAMPLES = {
    ("short", 2): 0.0609,
    ("short", 4): 0.0853,
    ("short", 6): 0.0979,
    ("long", 2): 0.162,
    ("long", 6): 0.305,
}
"""Shares of pages saved by n answers: figure 15a for Alpaca; for ShareGPT the ends of
the range that the text gives."""
BEAMS = {
    ("short", 2): 0.3756,
    ("short", 4): 0.5313,
    ("short", 6): 0.5516,
    ("long", 2): 0.443,
    ("long", 6): 0.663,
}
"""The same by beams of a width: figure 15b."""
SPEED_UPS = {80: 1.67, 341: 3.58}
"""Request rates at equal latency over Orca (Oracle), by tokens of a common beginning:
figure 16."""

DATA = {"short": "Alpaca", "long": "ShareGPT"}
POINT = 1.0
"""How far the saving may lie from the one that follows from lengths, in per cent."""

_LENGTHS = (
    "Lengths are drawn after the printed means, not taken from the data, and long ones "
    "end at the bundled model's 1,024 tokens."
)
_MODEL = (
    "A model of 1.4 million parameters continues bytes of Python: how soon beams part "
    "is a matter of model and text, theirs OPT-13B's."
)
_RANGE = "Of theirs a range is printed; its ends are taken for 2 and 6."
_RATE = (
    "Theirs is the rate at equal latency on a GPU, over a system without pages. "
    "Ours are tokens per second of one engine, its requests in and out of the cache."
)


def share(lengths: str, num_sequences: int, beams: bool) -> float | None:
    """Looks up the published share of pages saved, None where there is none."""
    return (BEAMS if beams else SAMPLES).get((lengths, num_sequences))


def claims(
    samples: Savings,
    beams: Savings,
    readings: Readings,
    prefixes: Prefixes,
    picture: Picture,
) -> list[Claim]:
    """Judges everything that was served; parts that were not are left out."""
    del picture  # drawn, nothing is claimed of it
    return [
        *_closed_forms(samples),
        *_readings(readings),
        *_published(samples, beams=False),
        *_published(beams, beams=True),
        *_beams_above_samples(samples, beams),
        *_prefixes(prefixes),
    ]


def _closed_forms(samples: Savings) -> list[Claim]:
    found = []
    for name in dict.fromkeys(samples.lengths.tolist()):
        here = samples.lengths == name
        apart = abs(samples.saved_share - samples.expected_share)[here]
        found.append(
            judge(
                f"{name} prompts: n answers save (n - 1) / n of the share of full "
                "prompt pages; largest difference",
                source=f"{PAPER}, section 4.4; worked out from lengths and page size",
                published=0.0,
                ours=100 * apart.max(),
                unit="points",
                tolerance=POINT,
            )
        )
    return found


def _readings(readings: Readings) -> list[Claim]:
    if not readings.chunk_size.size:
        return []
    num, sizes = readings.num_sequences[0], readings.chunk_size.tolist()
    return [
        judge(
            f"{num} answers to a prompt compute its tokens once",
            source=f"{PAPER}, section 4.4",
            published=1.0,
            ours=float((readings.prompt_rows / readings.prompt_tokens).max()),
            unit="1",
            note=f"Counted by the engine, read in chunks of {_words(sizes)} tokens.",
        )
    ]


def _published(savings: Savings, *, beams: bool) -> list[Claim]:
    found = []
    for name, num in zip(savings.lengths, savings.num_sequences, strict=True):
        published = share(str(name), int(num), beams)
        if published is None:
            continue
        here = (savings.lengths == name) & (savings.num_sequences == num)
        tokens = savings.mean_prompt[here][0], savings.mean_answer[here][0]
        what = f"beam search of width {num}" if beams else f"{num} answers"
        where = f"figure 15{'b' if beams else 'a'}, {DATA[str(name)]}"
        found.append(
            judge(
                f"pages saved by {what}, {name} prompts",
                source=f"{PAPER}, {where}",
                published=100 * published,
                ours=100 * savings.at(str(name), int(num)),
                unit="%",
                differs=_MODEL if beams else _LENGTHS,
                note=f"Ours: {tokens[0]:.0f} + {tokens[1]:.0f} tokens on average. "
                + (_RANGE if name == "long" else ""),
            )
        )
    return found


def _beams_above_samples(samples: Savings, beams: Savings) -> list[Claim]:
    gains = [
        beams.at(str(name), int(num)) - samples.at(str(name), int(num))
        for name, num in zip(beams.lengths, beams.num_sequences, strict=True)
        if num in samples.num_sequences[samples.lengths == name]
    ]
    if not gains:
        return []
    return [
        judge(
            "beams save more pages than as many answers; smallest difference",
            source=f"{PAPER}, section 6.3",
            published=0.0,
            ours=100 * min(gains),
            unit="points",
            relation="at_least",
        )
    ]


def _prefixes(prefixes: Prefixes) -> list[Claim]:
    found = []
    for i, num in enumerate(prefixes.prefix_tokens.tolist()):
        if num in SPEED_UPS:
            found.append(
                judge(
                    f"requests that begin with the same {num} tokens are served faster",
                    source=f"{PAPER}, figure 16",
                    published=SPEED_UPS[num],
                    ours=float(prefixes.speed_ups[i, 1]),
                    unit="1",
                    differs=_RATE,
                )
            )
    return found


def _words(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes[:-1])) + f" and {sizes[-1]}"
