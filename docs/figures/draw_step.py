"""Draws `step.svg`, the parts of one engine step with the arrays between them.

Run `python docs/figures/draw_step.py`; it writes the figure next to this file.
"""

from html import escape
from pathlib import Path

BOXES = (
    (
        "submit",
        "requests to queue and rows",
        ("tokens [requests, max_length]", "limit [requests]"),
    ),
    ("counts", "state to integers", ("running [slots]", "waiting_pages [head]")),
    ("policy", "Counts to Plan", ("admit [head]", "num_rows [slots]")),
    (
        "apply_plan",
        "preempt, admit, reserve",
        ("page_ids [slots, pages]", "length, ahead [slots]"),
    ),
    (
        "pack rows",
        "tokens of all slots",
        ("token, position [rows]", "logit_rows [slots]"),
    ),
    (
        "forward",
        "writes K and V, attends",
        ("pages [L, pages, heads, size, dim]", "logits [slots, vocab]"),
    ),
    (
        "emit",
        "logits_fn, truncate, draw",
        ("tokens [slots, emit_width]", "num_emitted [slots]"),
    ),
    ("retire", "frees slots and pages", ("reason [slots]", "ref [pages]")),
)
WIDTH = 206
HEIGHT = 104
GAP = 30
COLUMNS = 4
INK = "#1f3044"
FILL = "#e8eef5"
HOST = "#f6ead7"


def text(x: float, y: float, content: str, size: int, *, bold: bool = False) -> str:
    """Returns a text element with a centred line."""
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="middle" '
        f'fill="{INK}"{weight}>{escape(content)}</text>'
    )


def arrow(points: str) -> str:
    """Returns a line with an arrow head at its last point."""
    return (
        f'<polyline points="{points}" fill="none" stroke="{INK}" stroke-width="1.5" '
        'marker-end="url(#head)"/>'
    )


def draw() -> str:
    """Returns the figure as SVG text."""
    top = 46
    left = 14
    width = 2 * left + COLUMNS * WIDTH + (COLUMNS - 1) * GAP
    height = top + 2 * HEIGHT + 60 + 62
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" role="img" aria-label="One step of the engine">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/>'
        "</marker></defs>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        text(width / 2, 26, "step(params, state) -> (state, info)", 17, bold=True),
    ]
    place = {}
    for i, (name, work, arrays) in enumerate(BOXES):
        row, column = divmod(i, COLUMNS)
        column = column if row == 0 else COLUMNS - 1 - column
        x = left + column * (WIDTH + GAP)
        y = top + row * (HEIGHT + 60)
        place[i] = x, y
        fill = HOST if name == "submit" else FILL
        parts.append(
            f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="7" '
            f'fill="{fill}" stroke="{INK}"/>'
        )
        middle = x + WIDTH / 2
        parts.append(text(middle, y + 23, name, 15, bold=True))
        parts.append(text(middle, y + 43, work, 12))
        for k, line in enumerate(arrays):
            parts.append(text(middle, y + 68 + 19 * k, line, 12))
    for i in range(len(BOXES) - 1):
        (x, y), (to_x, _) = place[i], place[i + 1]
        middle = y + HEIGHT / 2
        if to_x > x:
            parts.append(arrow(f"{x + WIDTH},{middle} {to_x - 1},{middle}"))
        elif to_x < x:
            parts.append(arrow(f"{x},{middle} {to_x + WIDTH + 1},{middle}"))
        else:
            down = x + WIDTH / 2
            parts.append(arrow(f"{down},{y + HEIGHT} {down},{y + HEIGHT + 59}"))
    # The state of the next step, from `retire` to `counts`.
    x, y = place[len(BOXES) - 1]
    from_x = x + WIDTH / 2
    to_x = place[1][0] + WIDTH / 2
    bend = y - 30
    parts.append(
        arrow(f"{from_x},{y} {from_x},{bend} {to_x},{bend} {to_x},{top + HEIGHT + 1}")
    )
    parts.append(text((from_x + to_x) / 2, bend - 6, "state of the next step", 12))
    note = "submit runs between steps; the sizes are those of the configuration"
    parts.append(text(width / 2, height - 40, note, 12))
    note = "L: layers; rows: max_slots if every slot feeds one token, else token_budget"
    parts.append(text(width / 2, height - 20, note, 12))
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("step.svg").write_text(draw(), encoding="utf-8")
