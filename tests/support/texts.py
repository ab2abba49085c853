"""Texts to train small models on."""

from pathlib import Path


def write_functions(folder: Path, *, num: int = 20, times: int = 9) -> str:
    """Writes files of short functions, and gives the pattern that finds them.

    Args:
      folder: made.
      num: how many files.
      times: how often a file says its function.
    """
    folder.mkdir()
    for i in range(num):
        text = f"def f{i}(x):\n    return x * {i}\n"
        (folder / f"{i}.py").write_text(text * times)
    return f"{folder}/*.py"
