"""Runs the programs of tutorials, and stores the figures that they draw.

Each page is one program whose last block writes the figure `PAGE.svg`; the page shows
the copy in `docs/figures/tutorials/`. Output that differs from the page is printed.

    python docs/make_tutorial_figures.py                  # all pages; takes minutes
    python docs/make_tutorial_figures.py policy sessions  # the named ones
"""

import contextlib
import shutil
import sys
import tempfile

from tests.support import pages


def main(names: list[str]) -> int:
    """Runs the named pages, or all; returns 1 if an output differs from its page."""
    num_wrong = 0
    for page in pages.tutorials():
        if names and page.stem not in names:
            continue
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            _, printed = pages.run_blocks(page)
            figure = pages.figure_path(page)
            shutil.copy(figure.name, figure)
        wrong = pages.wrong_outputs(page, printed)
        num_wrong += len(wrong)
        print(f"{page.stem}: {figure.stat().st_size:,} bytes", *wrong, sep="\n")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
