"""The wheel, installed in an empty environment outside the repository, works there."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.support.folders import ROOT

pytestmark = pytest.mark.slow

MAX_BYTES = 5_000_000
LEFT_OUT = shutil.ignore_patterns(
    ".*", "*.egg-info", "__pycache__", "build", "dist", "runs"
)
KEPT_RECORD = "experiments/records/sharing/result.npz"
"""Data that an experiment reads."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy of the tree, because setuptools writes into it."""
    pytest.importorskip("setuptools", minversion="77")
    top = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, top / "tree", ignore=LEFT_OUT)
    code = "from setuptools import build_meta; build_meta.build_wheel('..')"
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=top / "tree",
        check=True,
        capture_output=True,
        timeout=300,
    )
    shutil.rmtree(top / "tree")
    [path] = top.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel; its dependencies are those of this one.

    A line of a `.pth` file adds this environment's packages, but not its `.pth` files,
    so that an editable install of the checkout is not visible.
    """
    home = tmp_path_factory.mktemp("installed") / "env"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(home)], check=True
    )
    python = home / "bin" / "python"
    if importlib.util.find_spec("pip"):
        command = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    else:
        command = ["uv", "pip", "install", "--python", str(python)]
    subprocess.run(
        [*command, "--no-deps", "--no-index", "--quiet", str(wheel)],
        check=True,
        capture_output=True,
        timeout=300,
    )
    [packages] = home.glob("lib/python*/site-packages")
    path = sysconfig.get_path("purelib")
    (packages / "dependencies.pth").write_text(f"{path}\n", encoding="utf-8")
    return home


def call(environment: Path, folder: Path, *words: str) -> str:
    """Runs a program of the environment in a folder, and returns its output."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "XLA_FLAGS")
    environ = {name: value for name, value in os.environ.items() if name not in hidden}
    ran = subprocess.run(
        [str(environment / "bin" / words[0]), *words[1:]],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_wheel_has_code_and_models_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    assert wheel.stat().st_size <= MAX_BYTES
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {
        *("experiments", "jaxkv", "pallas_kernels", "scaling")
    }
    assert [name for name in names if "/records/" in name] == [KEPT_RECORD]
    assert not [name for name in names if name.endswith((".png", ".svg", ".jsonl"))]
    models = re.findall(r"models/(\S+)/model.safetensors", " ".join(names))
    assert {*models} == {f"stdlib-bytes{x}" for x in ("", "-eagle", "-medusa")}


def test_the_environment_has_the_wheel_only(environment: Path, tmp_path: Path) -> None:
    code = "import jaxkv, scaling, experiments; print(jaxkv.bundled_model())"
    folder = Path(call(environment, tmp_path, "python", "-c", code).strip())
    assert folder.is_relative_to(environment)
    assert (folder / "model.safetensors").stat().st_size > 2_000_000


def test_commands_of_the_wheel_run(environment: Path, tmp_path: Path) -> None:
    listed = json.loads(call(environment, tmp_path, "jaxkv", "list", "--json"))
    assert "mean_estimation" in [x["name"] for x in listed["experiments"]]
    flags = ("--prompt", "def ", "--max-tokens", "8", "--json")
    report = json.loads(
        call(environment, tmp_path, "jaxkv", "generate", "stdlib-bytes", *flags)
    )
    assert len(report["completions"][0]["tokens"]) == 8
    call(
        environment, tmp_path, "jaxkv", "run", "mean_estimation", "smoke", "--out", "m"
    )
    assert (tmp_path / "m" / "report.md").is_file()
    demo = json.loads(
        call(environment, tmp_path, "jaxkv", "demo", "smoke", "--out", "d", "--json")
    )
    assert demo["continuous"]["tokens_per_s"] > 0
    assert (tmp_path / "d" / "figure.png").is_file()


def test_a_beam_search_panel_finds_its_measurement(
    environment: Path, tmp_path: Path
) -> None:
    code = (
        "from experiments.serving.latency_vs_rate import published\n"
        "print(published.beam_pool_factor(2))"
    )
    assert 1 < float(call(environment, tmp_path, "python", "-c", code)) < 2


def test_claims_name_the_repository(environment: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="in the repository, not in the installed"):
        call(environment, tmp_path, "jaxkv", "claims")


def test_the_python_of_the_readme_runs(environment: Path, tmp_path: Path) -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "page.py").write_text("\n".join(blocks), encoding="utf-8")
    assert "def read_lines(path):" in call(environment, tmp_path, "python", "page.py")
