"""Training texts for small models."""

from pathlib import Path


def write_functions(folder: Path, *, num: int = 20, times: int = 9) -> str:
    """Writes files of short functions; returns the glob pattern of the files.

    Args:
      folder: folder to make.
      num: number of files.
      times: repetitions of the function in each file.
    """
    folder.mkdir()
    for i in range(num):
        text = f"def f{i}(x):\n    return x * {i}\n"
        (folder / f"{i}.py").write_text(text * times)
    return f"{folder}/*.py"
