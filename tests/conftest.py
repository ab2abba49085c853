"""What every test runs under: the CPU, no silent broadcasting, no silent casts."""

import dataclasses
import gc
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

# Before jax is imported. A GPU run names its platform: JAX_PLATFORMS=cuda pytest -m gpu
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Where `make setup` puts the compiler for GPUs that are not there. Elsewhere than the
# other packages: without a GPU jax would complain of it at every start.
sys.path.append(str(Path(sys.prefix, "deviceless")))

import jax
import jaxtyping
import numpy as np
import pytest
from jax._src import compiler

from experiments.framework import config_json, registry, study
from experiments.framework.claims import Claim, judge
from jaxkv.progress import QUIET, Progress
from tests.support import commands, folders

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# For meshes; all else runs on the first of them.
jax.config.update("jax_num_cpu_devices", 8)


def _keep_programs() -> None:
    """Keeps compiled programs from one run to the next: half of the suite's time.

    They lie in the temporary folder, unless the variable names another place, and only
    if the folder is ours: whoever writes a program there has it run. The variables are
    for the tests' subprocesses.
    """
    folder = Path(tempfile.gettempdir()) / f"jaxkv-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return
    path = os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    jax.config.update("jax_compilation_cache_dir", path)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


_keep_programs()


@pytest.fixture(scope="session", autouse=True)
def _interrupts_arrive() -> Iterator[None]:
    """Has Ctrl-C interrupt, here and in the processes that tests start.

    What starts the tests may ignore it, as `make test &` does. The program
    honours that, and tests would wait for an end that nobody asked for.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


_FLAGS = os.environ.get("XLA_FLAGS", "")
_OLDER = "xla_cpu_disable_new_fusion_emitters"
_AS_SERVED = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": _FLAGS}
_FAST = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": f"{_FLAGS} --xla_backend_extra_options={_OLDER}".strip(),
}
_is_fast = True


def _compile_fast() -> None:
    """Has programs for CPUs compiled in a third of the time, and run slower.

    LLVM optimises nothing, and XLA's older emitters write the kernels: the newer ones
    set up a compiler for each. XLA knows that choice as a flag of a process; but some
    tests want the program that users get, so it is added to the options of single
    compilations, as bytes, since JAX has no name for it.
    """
    made = compiler.get_compile_options

    def field(number: int, content: bytes) -> bytes:
        """A field of a protocol buffer; two of a message become one."""
        key, size = (number << 3) | 2, len(content)
        head = [key & 127 | 128, key >> 7] if key > 127 else [key]
        return bytes([*head, size]) + content

    # CompileOptionsProto.executable_build_options.debug_options.xla_backend_extra_...
    extra = field(1, _OLDER.encode()) + field(2, b"")
    added = field(3, field(3, field(500, extra)))

    def make(*args: Any, backend: Any = None, **options: Any) -> Any:
        found = made(*args, backend=backend, **options)
        if not _is_fast or getattr(backend, "platform", "") != "cpu":
            return found
        debug = found.executable_build_options.debug_options
        debug.xla_backend_optimization_level = 0
        debug.xla_llvm_disable_expensive_passes = True
        return type(found).ParseFromString(found.SerializeAsString() + added)

    compiler.get_compile_options = make  # ty: ignore[invalid-assignment]


_compile_fast()


@pytest.fixture(scope="session", autouse=True)
def _processes_compile_fast() -> None:
    """Has the processes that tests start compile fast, too.

    Not before tests begin: workers of the test run inherit variables, and would have
    no program as served.
    """
    jax.devices()  # after which XLA reads no variables: they are for others
    os.environ.update(_FAST)


_MAPS = Path("/proc/self/maps")
_num_tests = itertools.count(1)


@pytest.fixture(autouse=True)
def _few_programs() -> Iterator[None]:
    """Drops compiled programs before Linux aborts a process of 65,530 mappings.

    A program of a model takes some hundred of them; looking costs a few milliseconds.
    """
    yield
    if next(_num_tests) % 10 == 0 and _MAPS.exists():
        with _MAPS.open("rb") as file:
            if sum(1 for _ in file) > 30_000:
                jax.clear_caches()
                gc.collect()


@pytest.fixture(scope="module")
def compiled_as_served() -> Iterator[None]:
    """Has a file's programs compiled as users get them, and those of its processes.

    For files that ask about rounding, bits or speed: `pytestmark =
    pytest.mark.usefixtures("compiled_as_served")`. All others ask what a program does.
    """
    global _is_fast
    _is_fast = False
    os.environ.update(_AS_SERVED)
    jax.clear_caches()
    yield
    _is_fast = True
    os.environ.update(_FAST)
    jax.clear_caches()


@pytest.fixture
def as_users_have_it() -> Iterator[None]:
    """Takes the check of annotations away, which tests have and users do not.

    For tests of what is said to those who pass something of another type.
    """
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives all tests of a file to one worker: they share fixtures and programs.

    What every experiment is asked goes where the tests of that experiment go: a smoke
    run is made once.
    """
    if config.getoption("dist") != "load":
        return None  # Somebody asked for another way.
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            stem = Path(file).stem.removeprefix("test_").removesuffix("_experiment")
            if stem == "experiments" and "smoke" in test:
                return test.partition("[")[2].rstrip("]")
            return stem

    return ByFile(config, log)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """A nested part of a config."""

    rate: float = 2.0
    """Requests per second."""
    lengths: tuple[int, ...] = (1, 2)
    kind: Literal["steady", "bursty"] = "steady"

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"{self.rate=} must be above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A config with every kind of field."""

    load: Load = Load()
    num_points: int = 5
    limit: float = float("inf")
    name: str | None = None
    greedy: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.num_points <= 1000:
            raise ValueError(f"{self.num_points=} must be in [0, 1000]")


class Tail(NamedTuple):
    p95_s: float
    label: str


class Result(NamedTuple):
    time_s: np.ndarray
    done: np.ndarray
    tail: Tail


def run(config: Config, progress: Progress = QUIET) -> Result:
    if config.name == "broken":
        int("not a number")
    if config.name == "refused":
        config_json.config_loads(Config, "{", "model/config.json")
    done = list(progress.track(range(config.num_points), "points", "points"))
    time_s = np.linspace(0, 1, len(done)) / config.load.rate
    return Result(time_s, np.asarray(done), Tail(0.5 * len(done), "µ|s"))


def plot(ax: Any, result: Result) -> None:
    ax.plot(result.time_s, result.done)
    ax.set_xlabel("time [s]")


def claims(result: Result) -> list[Claim]:
    ours = result.tail.p95_s
    return [judge("the tail is short", source="us", published=3, ours=ours, unit="s")]


def metrics(result: Result) -> dict[str, Any]:
    return {"points": len(result.done), "tail": result.tail._asdict()}


@pytest.fixture
def experiment() -> study.Experiment:
    """A small experiment with everything an experiment can have."""
    module = types.SimpleNamespace(
        Config=Config,
        CONFIGS={"smoke": Config(), "paper": Config(num_points=9)},
        run=run,
        plot=plot,
        claims=claims,
        metrics=metrics,
        PANELS=(1, 1),
    )
    question = "Does a made-up experiment leave a whole folder?"
    return study.Experiment("made_up", question, study.studies_of(module))


@pytest.fixture
def jaxkv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> commands.Command:
    """Runs a command in an empty folder, for a screen of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return commands.command(capsys)


@pytest.fixture
def popen() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts Python on words, in a process that does not outlive the test."""
    begun = []

    def start(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=folders.ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        begun.append(process)
        return process

    yield start
    for process in begun:
        process.kill()
        process.communicate()


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experiment: study.Experiment
) -> Path:
    """An empty folder to be in, with that experiment in the catalogue as made_up."""
    configs = tuple(experiment.configs)
    entry = registry.RegistryEntry("made_up", experiment.question, configs, "")
    known = [*registry.entries(), entry]
    load = registry.load_experiment
    monkeypatch.setattr(registry, "entries", lambda: known)
    monkeypatch.setattr(
        registry,
        "load_experiment",
        lambda name: experiment if name == "made_up" else load(name),
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path
