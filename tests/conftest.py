"""Settings and fixtures of all tests.

Tests run on the CPU; implicit rank promotion and implicit casts raise.
"""

import dataclasses
import gc
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

# Must precede the import of jax. On a GPU: JAX_PLATFORMS=cuda pytest -m gpu
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Folder of the deviceless GPU compiler (`make setup`). It is outside site-packages,
# since JAX would warn of the CUDA plugin at every start without a GPU.
sys.path.append(str(Path(sys.prefix, "deviceless")))

import jax
import jaxtyping
import numpy as np
import pytest
from jax._src import compiler

from experiments.framework import registry
from experiments.framework.claims import judge
from jaxkv.progress import QUIET, Progress
from jaxkv.report import Claim, config_loads, study
from jaxkv.serving.compiling import program_store
from tests.support import commands, folders
from tests.support.mutation import replace

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Eight virtual devices for meshes; other programs run on the first.
jax.config.update("jax_num_cpu_devices", 8)


def _use_compilation_cache() -> None:
    """Caches compiled programs between runs, which saves half of the suite's time.

    The cache is in the temporary folder unless JAX_COMPILATION_CACHE_DIR is set. A
    folder of another user is not used, since its programs would be executed. The
    environment variables are for subprocesses of tests.
    """
    folder = Path(tempfile.gettempdir()) / f"jaxkv-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return
    path = os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    jax.config.update("jax_compilation_cache_dir", path)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


_use_compilation_cache()
# Tests replace functions, and check what is traced.
program_store.is_enabled = False
# Tracing allocates many objects that live long: with the default of 700, collections
# take 8 % of the suite's processor time.
gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def _enable_interrupts() -> Iterator[None]:
    """Enables SIGINT in this process and in subprocesses of tests.

    A shell starts background jobs (`make test &`) with SIGINT ignored. The program
    inherits that, and tests that interrupt it would wait forever.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


_FLAGS = os.environ.get("XLA_FLAGS", "")
_OLD_EMITTERS = "xla_cpu_disable_new_fusion_emitters"
_OPTIMIZED_VARIABLES = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": _FLAGS}
_FAST_VARIABLES = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": f"{_FLAGS} --xla_backend_extra_options={_OLD_EMITTERS}".strip(),
}
_is_fast = True


def _compile_fast() -> None:
    """Makes compilation for CPUs three times faster; programs run slower.

    LLVM's optimisation is off, and XLA's older emitters generate the kernels (the newer
    emitters set up one compiler per kernel). XLA has a process-wide flag for the
    emitters, but some tests need the default program. The flag is therefore added to
    the options of each compilation, as serialised bytes, since JAX has no field for it.
    """
    default_options = compiler.get_compile_options

    def field(number: int, content: bytes) -> bytes:
        """Encodes a protocol-buffer field; parsers merge repeated message fields."""
        key = (number << 3) | 2
        size = len(content)
        head = [key & 127 | 128, key >> 7] if key > 127 else [key]
        return bytes([*head, size]) + content

    # CompileOptionsProto.executable_build_options.debug_options.xla_backend_extra_...
    extra = field(1, _OLD_EMITTERS.encode()) + field(2, b"")
    added = field(3, field(3, field(500, extra)))

    def make(*args: Any, backend: Any = None, **options: Any) -> Any:
        options_proto = default_options(*args, backend=backend, **options)
        if not _is_fast or getattr(backend, "platform", "") != "cpu":
            return options_proto
        debug = options_proto.executable_build_options.debug_options
        debug.xla_backend_optimization_level = 0
        debug.xla_llvm_disable_expensive_passes = True
        return type(options_proto).ParseFromString(
            options_proto.SerializeAsString() + added
        )

    compiler.get_compile_options = make  # ty: ignore[invalid-assignment]


_compile_fast()


@pytest.fixture(scope="session", autouse=True)
def _compile_subprocesses_fast() -> None:
    """Sets the variables for fast compilation in subprocesses of tests.

    Workers of the test run inherit variables, so the variables are set after the
    workers have started. Otherwise `full_optimization` would have no effect in them.
    """
    jax.devices()  # XLA reads XLA_FLAGS once, now: this process is unaffected
    os.environ.update(_FAST_VARIABLES)


_MAPS = Path("/proc/self/maps")
_num_tests = itertools.count(1)


@pytest.fixture(autouse=True)
def _limit_mappings() -> Iterator[None]:
    """Drops compiled programs before the process reaches 65,530 memory mappings.

    Linux aborts a process at that limit. A program of a model has about 100 mappings.
    Counting takes a few ms, so mappings are counted after every tenth test.
    """
    yield
    if next(_num_tests) % 10 == 0 and _MAPS.exists():
        with _MAPS.open("rb") as file:
            if sum(1 for _ in file) > 30_000:
                jax.clear_caches()
                gc.collect()


@pytest.fixture(scope="module")
def full_optimization() -> Iterator[None]:
    """Compiles the programs of a test file, and of its subprocesses, with defaults.

    For files that test rounding, bits or speed: `pytestmark =
    pytest.mark.usefixtures("full_optimization")`.
    """
    global _is_fast
    _is_fast = False
    os.environ.update(_OPTIMIZED_VARIABLES)
    jax.clear_caches()
    yield
    _is_fast = True
    os.environ.update(_FAST_VARIABLES)
    jax.clear_caches()


@pytest.fixture
def no_type_checks() -> Iterator[None]:
    """Disables the runtime check of annotations, which is active only in tests.

    For tests of the error messages for arguments of a wrong type.
    """
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Assigns all tests of a file to one worker: they share fixtures and programs.

    The common tests of an experiment run in the worker of its own test file, so that
    the smoke run is computed once.
    """
    if config.getoption("dist") != "load":
        return None  # `--dist` was given explicitly.
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
    """Nested config of the experiment `made_up`."""

    rate: float = 2.0
    """Requests per second."""
    lengths: tuple[int, ...] = (1, 2)
    kind: Literal["steady", "bursty"] = "steady"

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"{self.rate=} must be above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Config with fields of every kind."""

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
        config_loads(Config, "{", "model/config.json")
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
    """Returns a small experiment with all optional parts."""
    configs = {"smoke": Config(), "paper": Config(num_points=9)}
    question = "Does a made-up experiment leave a whole folder?"
    only_study = study.Study(configs, Result, run, plot, claims, metrics=metrics)
    return study.Experiment("made_up", question, (only_study,))


@pytest.fixture
def jaxkv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> commands.Command:
    """Returns a function that runs a command in an empty folder, 80 columns wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return commands.command(capsys)


@pytest.fixture
def popen() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Returns a function that starts Python; its processes end with the test."""
    processes = []

    def start(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=folders.ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def work_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experiment: study.Experiment
) -> Path:
    """Enters an empty folder and registers the experiment as `made_up`; returns it."""
    configs = tuple(experiment.configs)
    entry = registry.RegistryEntry("made_up", experiment.question, configs, "")
    entries = [*registry.entries(), entry]
    load = registry.load_experiment
    replace(monkeypatch, registry, "entries", lambda: entries)
    replace(
        monkeypatch,
        registry,
        "load_experiment",
        lambda name: experiment if name == "made_up" else load(name),
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path
