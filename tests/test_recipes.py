"""Recipes of the package READMEs, each followed in code."""

import dataclasses
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from experiments.framework import registry
from jaxkv import arrays, models
from jaxkv.cli import main
from jaxkv.engine import Drafter, Drafts
from jaxkv.models import (
    FAMILIES,
    config,
    init_params,
    load_model,
    nonlinear,
    save_model,
)
from jaxkv.models.huggingface import configs
from jaxkv.report import read_run
from jaxkv.speculation import SharedNoiseVerifier
from pallas_kernels import devices
from pallas_kernels.paged_attention import (
    RowView,
    dispatch,
    make_plan,
    prefill_plan,
    stream_k,
)
from scaling import fits
from scaling.costs import count_parameters
from scaling.laws import base, powers
from scaling.plan import allocate_budget, law_two_powers
from scaling.shapes import describe_huggingface, load_shape
from scaling.training import (
    LearningRateSchedule,
    OptimizerConfig,
    architectures,
    compiled_steps,
    init_train_state,
)
from tests.support import attention_cases, emulating, engines, kernel_cases, plans
from tests.support.attention_cases import attend_arrays
from tests.support.folders import ROOT
from tests.support.mutation import replace

# Add a policy; add a sampling rule. One compiled program tests both.


class ConcurrencyLimit(NamedTuple):
    """First come, first served, with at most `limit` running requests."""

    limit: jax.Array
    holds_finished = False

    def plan(self, counts: jaxkv.Counts) -> jaxkv.Plan:
        room = self.limit - jnp.sum(counts.running, dtype=jnp.int32)
        rank = jnp.arange(counts.waiting.shape[0], dtype=jnp.int32)
        counts = counts._replace(waiting=counts.waiting & (rank < room))
        return engines.FCFS.plan(counts)


def allow_rising_tokens(answer: jaxkv.TokenHistory, logits: jax.Array) -> jax.Array:
    """Masks tokens up to the previous one, unless that is the end of the vocabulary."""
    token = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]
    rows = jnp.arange(logits.shape[0])
    last = answer.tokens[rows, jnp.maximum(answer.num_tokens - 1, 0)][:, None]
    rises = (token > last) | (last == logits.shape[1] - 1)
    return jnp.where(rises, logits, -jnp.inf)


@pytest.fixture(scope="module")
def runs() -> dict[int, engines.Run]:
    """Returns runs of the same requests under the policy, by concurrency limit."""
    asks = [engines.greedy(i, [3 * i + 1, 2], max_tokens=5) for i in range(6)]
    return {
        limit: engines.serve(
            asks,
            engines.TIGHT,
            ConcurrencyLimit(jnp.int32(limit)),
            logits_fn=allow_rising_tokens,
        )
        for limit in (1, 4)
    }


def test_policy_plans_from_counts() -> None:
    counts = plans.counts([(9, 8, 3)], waiting=[3, 2, 1], free_pages=20)
    plan = plans.plan_of(counts, ConcurrencyLimit(jnp.int32(2)))
    assert np.asarray(plan.admit).tolist() == [True, False, False, False]
    assert np.asarray(plan.num_rows).tolist() == [1, 0, 0, 0]


@pytest.mark.thorough
def test_policy_changes_the_schedule_but_not_the_tokens(
    runs: dict[int, engines.Run],
) -> None:
    num_running = {
        limit: (run.info.request_id >= 0).sum(axis=1).max()
        for limit, run in runs.items()
    }
    assert num_running == {1: 1, 4: 4}
    answers = [
        {name: outcome.tokens for name, outcome in run.outcomes.items()}
        for run in runs.values()
    ]
    assert answers[0] == answers[1]


@pytest.mark.thorough
def test_sampling_rule_applies_to_every_step(runs: dict[int, engines.Run]) -> None:
    last = engines.MODEL.vocab_size - 1
    for outcome in runs[4].outcomes.values():
        tokens = [2, *outcome.tokens]
        assert len(tokens) == 6
        for before, after in itertools.pairwise(tokens):
            assert after > before or before == last


# Add an attribute of requests that a policy reads

TENANT_FIRST = '''
"""Scheduling policy that prefers the smallest tenant."""

from typing import NamedTuple

from jaxkv.scheduling import interface
from jaxkv.scheduling.first_come import FCFS, fcfs
from jaxkv.scheduling.interface import Counts, Plan


class TenantFirst(NamedTuple):
    """Admits the request with the smallest tenant first."""

    inner: FCFS = fcfs()
    holds_finished = False

    def plan(self, counts: Counts) -> Plan:
        """Plans one step."""
        asked = interface.attributes_of(counts.waiting_attributes)
        return interface.plan_by(self.inner, counts, asked.tenant)
'''

SERVE_TENANTS = """
import dataclasses, types
from typing import NamedTuple
import jax.numpy as jnp
import numpy as np
import jaxkv
from jaxkv.engine import EngineParts, EngineRules
from jaxkv.models import paged
from jaxkv.scheduling.tenant_first import TenantFirst
from jaxkv.server import openai_requests
from jaxkv.simulation import Capacity, SimulationMember, driver
from jaxkv.workloads import arrivals
from tests.support import engines

tenants = [5, 2, 9, 0]
asked = [jaxkv.RequestAttributes(tenant=x) for x in tenants]
config = dataclasses.replace(engines.SERVED, max_slots=1, queue_head=4, debug=False)
parts = EngineParts(
    engines.params(), paged.PagedForward(engines.MODEL),
    paged.make_model_pages(engines.MODEL, config), config,
)
engine = jaxkv.Engine(parts, EngineRules(policy=TenantFirst()))
ask = jaxkv.Sampling.greedy(max_tokens=2)
ids = [engine.submit([7, 8], ask, attributes=each) for each in asked]
order = dict.fromkeys(event.request_id for event in engine.stream() if event.tokens)
served = [tenants[ids.index(x)] for x in order]
assert served == [0, 2, 5, 9], served
try:
    engine.submit([7, 8], ask, attributes=jaxkv.RequestAttributes(tenant=10))
except ValueError as error:
    assert "attributes.tenant=10 must be a whole number in [0, 9]" in str(error)
else:
    raise AssertionError("tenant=10 was accepted")

class OneSecond(NamedTuple):
    def __call__(self, work):
        return jnp.float32(1.0)

column = jaxkv.RequestAttributes(tenant=np.array(tenants))
two = np.full(4, 2)
load = arrivals.make_workload(np.zeros(4), two, two, attributes=column)
bounds = Capacity.of(num_pages=20, max_length=8, token_budget=8)
members = driver.stack([SimulationMember(load, bounds, TenantFirst(), OneSecond())])
finish_s = driver.simulate(members, max_slots=1, head=4).finish_s[0]
served = [tenants[i] for i in np.argsort(finish_s)]
assert served == [0, 2, 5, 9], served

backend = types.SimpleNamespace(
    model_name="tiny", tokenizer=None, max_length=64, adapters=()
)
body = b'{"prompt": [7, 8], "tenant": 3}'
request = openai_requests.parse_completion(body, {}, backend, 1.0)
assert request.attributes == jaxkv.RequestAttributes(tenant=3)
"""


@pytest.mark.thorough
def test_policy_reads_a_new_request_attribute(tmp_path: Path) -> None:
    """The recipe changes two files: the attributes and the policy."""
    copy = tmp_path / "jaxkv"
    original = ROOT / "jaxkv"
    shutil.copytree(original, copy, ignore=shutil.ignore_patterns("__pycache__"))
    table = copy / "scheduling/attributes.py"
    text = table.read_text(encoding="utf-8")
    end_of_fields = "\n\n\nATTRIBUTE_RANGES: Any"
    end_of_bounds = '\n)\n"""Smallest and'
    assert text.count(end_of_fields) == text.count(end_of_bounds) == 1
    text = text.replace(end_of_fields, f"\n    tenant: Values = 0{end_of_fields}")
    text = text.replace(end_of_bounds, f"\n    tenant=(0, 9),{end_of_bounds}")
    table.write_text(text, encoding="utf-8")
    (copy / "scheduling/tenant_first.py").write_text(TENANT_FIRST, encoding="utf-8")

    folders = os.pathsep.join(map(str, (tmp_path, ROOT)))
    subprocess.run(
        [sys.executable, "-c", SERVE_TENANTS],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": folders},
        check=True,
    )


# Add a drafter


@dataclasses.dataclass(frozen=True)
class RepeatLastToken(Drafter):
    """Proposes the last token again and counts accepted drafts per sequence."""

    def init(self, config: jaxkv.EngineConfig) -> jax.Array:
        return jnp.zeros(config.max_sequences, jnp.int32)

    def requested_draft_lengths(self, memory, state, config):
        return jnp.full(state.slots.sequence.shape, config.max_drafts, jnp.int32)

    def propose(self, params, memory, state, granted, config):
        row = jnp.maximum(state.slots.sequence, 0)
        last = state.sequences.tokens[row, state.slots.num_tokens - 1]
        tokens = jnp.repeat(last[:, None], config.max_drafts, axis=1)
        return memory, state.pages, Drafts(granted, tokens)

    def learn(self, memory, state, verified):
        row = jnp.where(verified.emits, state.slots.sequence, -1)
        return arrays.put(memory, row, verified.accepted, "add")


@pytest.mark.slow
def test_drafter_does_not_change_the_tokens() -> None:
    speculation = jaxkv.Speculation(RepeatLastToken(), SharedNoiseVerifier())
    asks = [engines.greedy(i, [i, 2, 7], 20) for i in range(6)]
    bounds = dataclasses.replace(engines.TIGHT, max_drafts=2, token_budget=32)
    run = engines.serve(asks, bounds, speculation=speculation)
    engines.assert_equal_plain(run, asks, engines.TIGHT)
    assert np.asarray(run.info.num_drafts).sum() > 20
    num = run.info.num_emitted
    assert int(run.state.memory.sum()) == (num - 1)[num > 0].sum() > 0


# Add a model family


def test_model_family_is_one_table_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = dataclasses.replace(engines.MODEL, num_layers=1)
    weights = init_params(shape, jax.random.key(0))
    raw = configs.to_hf(shape) | {"model_type": "toy", "architectures": ["ToyLM"]}
    with pytest.raises(ValueError, match="architecture 'ToyLM' is not supported"):
        configs.from_hf(raw)

    llama = FAMILIES["llama"]
    modules = {**llama.modules, ".out": (".attention.output",)}
    toy = llama._replace(architecture="ToyLM", modules=modules)
    monkeypatch.setitem(FAMILIES, "toy", toy)  # which is undone at the end
    del FAMILIES["toy"]
    models.register_family("toy", toy)
    with pytest.raises(ValueError, match="'toy' is registered already"):
        models.register_family("toy", toy)
    parsed_config = configs.from_hf(raw)
    assert dataclasses.replace(parsed_config, family="llama") == shape
    with pytest.raises(ValueError, match="attn_logit_cap"):
        configs.from_hf(raw | {"attn_logit_cap": 30.0})

    save_model(tmp_path / "toy", parsed_config, weights)
    names = (tmp_path / "toy" / "model.safetensors").read_bytes()
    assert b"model.layers.0.attention.output.weight" in names
    again = load_model(tmp_path / "toy")
    assert again.config == parsed_config
    jax.tree.map(np.testing.assert_array_equal, again.params, weights)

    counted = count_parameters(load_shape(tmp_path / "toy"))
    assert counted.total == sum(x.size for x in jax.tree.leaves(weights))
    only_counted = toy._replace(architecture="Toy2LM", servable=False)
    monkeypatch.setitem(FAMILIES, "toy2", only_counted)
    raw |= {"model_type": "toy2", "architectures": ["Toy2LM"]}
    assert count_parameters(describe_huggingface(raw)) == counted
    with pytest.raises(ValueError, match="architecture 'Toy2LM' is not supported"):
        configs.from_hf(raw)


class NewFamily(NamedTuple):
    """Model family with a new norm and a new activation, with random weights."""

    config: config.ModelConfig
    params: dict
    folder: Path


@pytest.fixture
def new_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NewFamily:
    """Applies the edits of the recipe: config, nonlinear, families and configs."""
    for field, name in (
        ("norm", "peak"),
        ("activation", "squared"),
    ):
        declared = config.ModelConfig.__dataclass_fields__[field]
        names = (*get_args(declared.type), name)
        monkeypatch.setattr(declared, "type", Literal[names])  # ty: ignore[invalid-type-form]

    def peak_norm(x: jax.Array, axis: int, eps: float) -> jax.Array:
        return x / (jnp.max(jnp.abs(x), axis, keepdims=True) + jnp.float32(eps))

    peak = nonlinear.NormKind(peak_norm, has_bias=True)
    monkeypatch.setitem(nonlinear.NORMS, "peak", peak)
    squared = lambda x: jnp.square(jax.nn.relu(x))  # noqa: E731
    monkeypatch.setitem(nonlinear.ACTIVATIONS, "squared", squared)

    llama = FAMILIES["llama"]
    implied = {**llama.implied, "norm": "peak"}
    toy = llama._replace(architecture="ToyLM", implied=implied)
    monkeypatch.setitem(FAMILIES, "toy", toy)
    monkeypatch.setitem(configs.ACTIVATION_NAMES, "squared", ("squared",))

    names = {"norm": "peak", "activation": "squared", "family": "toy"}
    shape = dataclasses.replace(engines.MODEL, num_layers=1, **names)
    rng = np.random.default_rng(0)
    params = jax.tree.map(  # biases of 0 and scales of 1 would hide errors
        lambda x: x + jnp.asarray(0.2 * rng.normal(size=x.shape), x.dtype),
        init_params(shape, jax.random.key(0)),
    )
    save_model(tmp_path / "toy", shape, params)
    return NewFamily(shape, params, tmp_path / "toy")


def test_new_norm_and_activation_are_defined_once(new_family: NewFamily) -> None:
    shape, params, folder = new_family
    again = load_model(folder)
    assert again.config == shape
    size = sum(x.size for x in jax.tree.leaves(params))
    assert architectures.count_model_parameters(shape).total == size
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 30, (2, 7)), jnp.int32)
    columns = models.logits(params, tokens, config=shape)
    rows = architectures.forward(params, tokens, config=shape).logits
    np.testing.assert_allclose(rows, columns, rtol=1e-4, atol=1e-4)
    for other in ({"norm": "layer"}, {"activation": "relu"}):
        changed_shape = dataclasses.replace(shape, **other)
        far = models.logits(params, tokens, config=changed_shape) - columns
        assert np.abs(far).max() > 0.01


@pytest.mark.slow
@pytest.mark.usefixtures("no_type_checks")
def test_new_norm_and_activation_work_in_serving_and_training(
    new_family: NewFamily,
) -> None:
    shape, params, folder = new_family
    engine = jaxkv.Engine.load(folder, num_pages=32, max_slots=2, max_length=32)
    [completion] = engine.generate(
        [[5, 9, 2]], jaxkv.Sampling(temperature=0, max_tokens=8)
    )
    text = jnp.asarray([[5, 9, 2, *completion.tokens]], jnp.int32)
    trained = architectures.forward(params, text[:, :-1], config=shape).logits
    assert np.argmax(trained[0, 2:], axis=-1).tolist() == list(completion.tokens)

    optimizer = OptimizerConfig(kind="adamw")
    state = init_train_state(shape, optimizer, jnp.int32(0))
    stream = jnp.asarray(np.tile(np.arange(20), 40), jnp.uint16)
    losses = []
    run = compiled_steps(shape, optimizer, 4, 16)
    for _ in range(2):
        rate = LearningRateSchedule.constant(1e-2)
        state, info = run(state, stream, rate, jnp.int32(0), jnp.int32(20))
        losses.append(float(info.loss))
    assert losses[1] < 0.5 * losses[0]


# Add a kernel tiling

CUSTOM = dispatch.KernelTilings(
    decode=stream_k.Tiling(num_programs=5, tile=128, stages=2, q_stages=1),
    prefill=stream_k.Tiling(num_programs=2, stages=2, block_rows=128),
)


def test_tiling_argument_reaches_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = attention_cases.make_case(
        np.random.default_rng(0),
        [(20, 3), (33, 1)],
        page_size=16,
        kv_heads=1,
        group=2,
        head_dim=64,
    )
    arrays = [jnp.asarray(x) for x in case]
    # The reference implementation ignores the tiling: the traced programs are equal.
    programs = [
        str(jax.make_jaxpr(functools.partial(attend_arrays, **fields))(*arrays))
        for fields in ({}, {"tiling": CUSTOM})
    ]
    assert programs[0] == programs[1]

    h200 = devices.Target("gpu", "NVIDIA H200", 132, "9.0")
    replace(monkeypatch, devices, "current_target", lambda: h200)
    q, k = (jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in arrays[:2])

    def planned(tiling: dispatch.KernelTilings | None) -> dispatch.StepPlan:
        def plan(
            page_ids: jax.Array, positions: jax.Array, slots: jax.Array
        ) -> dispatch.StepPlan | None:
            view = RowView(page_ids, positions, slots)
            return make_plan(q, k, view, tiling=tiling)

        return jax.eval_shape(plan, *arrays[3:6])

    assert planned(CUSTOM).tiling == CUSTOM
    assert planned(None).tiling == dispatch.default_tilings(64)
    with pytest.raises(ValueError, match="must be a multiple of 64"):
        stream_k.Tiling(tile=96)
    assert prefill_plan.default_prefill_tiling(head_dim=64).block_rows == 128


@pytest.mark.thorough
def test_kernel_is_exact_under_any_tiling() -> None:
    case = kernel_cases.make_case([(70, 1), (5, 2)], page_size=16, kv_heads=1, group=2)
    for tiling in (emulating.SMALL, CUSTOM.decode):
        kernel_cases.assert_within_rule(case, *emulating.run(case, tiling))


# Add a law


def test_new_law_is_fitted_and_allocates_a_budget() -> None:
    n = "num_params"
    d = "num_tokens"
    law = powers.power_sum(
        "no-floor",
        "A / N^alpha + B / D^beta",
        (n, d),
        (
            base.scale_coordinate("A"),
            base.scale_coordinate("B"),
            base.exponent_coordinate("alpha"),
            base.exponent_coordinate("beta"),
        ),
        (
            powers.PowerTerm("A", (powers.Power(n, "alpha"),)),
            powers.PowerTerm("B", (powers.Power(d, "beta"),)),
        ),
        "invented for this test",
        two_powers=lambda c: base.TwoPowers(c["A"], c["B"], c["alpha"], c["beta"]),
    )
    coefficients = {"A": 400.0, "B": 900.0, "alpha": 0.35, "beta": 0.3}
    rng = np.random.default_rng(0)
    data = {n: 10 ** rng.uniform(7, 9, 30), d: 10 ** rng.uniform(9, 11, 30)}
    data["loss"] = (
        coefficients["A"] / data[n] ** coefficients["alpha"]
        + coefficients["B"] / data[d] ** coefficients["beta"]
    )
    predicted = law.predict(np.array([*coefficients.values()]), data)
    np.testing.assert_allclose(predicted, data["loss"], rtol=1e-5)
    fit_result = fits.fit(law, data)
    assert fit_result.coefficients == pytest.approx(coefficients, rel=1e-4)

    best = allocate_budget(law_two_powers(law, fit_result.coefficients), 6e20)
    assert best.num_params * best.num_tokens == pytest.approx(1e20)
    # At the optimum both terms have the same slope along the line of constant compute.
    terms = (
        coefficients["A"] / best.num_params**0.35,
        coefficients["B"] / best.num_tokens**0.3,
    )
    assert 0.35 * terms[0] == pytest.approx(0.3 * terms[1], rel=1e-3)


# Add an experiment

EXPERIMENT = '''
"""Do dice show 3.5 on average?"""

from collections.abc import Iterator

import numpy as np

from experiments import lab


class Config(lab.ConfigRecord):
    """Sample size."""

    num: lab.PositiveInt = 1000
    """Number of throws."""


CONFIGS = {"smoke": Config()}


class Result(lab.ResultRecord):
    """Throws and their mean."""

    faces: np.ndarray = lab.column("of each throw")
    mean: float = lab.column("over all throws")


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    faces = np.random.default_rng(0).integers(1, 7, config.num)
    return Result(faces, float(faces.mean()))


def plot(ax, result: Result) -> None:
    ax.hist(result.faces)


@lab.claims_file(__file__).judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    yield lab.measured("mean", result.mean)


STUDY = lab.Study(CONFIGS, Result, run, plot, claims)
'''
CLAIMS = """
[mean]
claim = "dice show 3.5 on average"
source = "worked out"
kind = "checks"
published = 3.5
unit = "1"
tolerance = 0.2
because = "nearly four standard errors of 1,000 throws"
"""


def test_experiment_is_a_module_and_a_registry_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "dice_question"
    home.mkdir()
    (home / "experiment.py").write_text(textwrap.dedent(EXPERIMENT))
    (home / "claims.toml").write_text(CLAIMS)
    monkeypatch.syspath_prepend(tmp_path)
    line = registry.RegistryEntry(
        "dice",
        "Do dice show 3.5 on average?",
        ("smoke",),
        "dice_question.experiment",
    )
    entries = (*registry.entries(), line)
    replace(monkeypatch, registry, "entries", lambda: entries)
    monkeypatch.chdir(tmp_path)

    assert main.main(["list"]) == 0
    assert "dice" in capsys.readouterr().out
    assert main.main(["run", "dice", "--num", "900", "--out", "here"]) == 0
    stored_run = read_run(tmp_path / "here", registry.load_experiment("dice"))
    assert stored_run.config.num == 900
    [claim] = stored_run.claims
    assert claim.verdict == "holds"
    assert main.main(["run", "dice", "--num", "0"]) == 2
    assert "num=0 must be at least 1" in capsys.readouterr().err


RECIPES = {
    "pallas_kernels": ["a kernel tiling"],
    # `test_eviction.py` follows the eviction rule, `test_table.py` the column of a
    # result, and `test_logs.py` the column of a log.
    "jaxkv": ["a policy", "an eviction rule", "a model family", "a sampling rule"],
    "jaxkv/speculation": ["a drafter"],
    "scaling": ["a law", "a column of logs"],
    "experiments": ["an experiment", "a column"],
}


@pytest.mark.parametrize("package", RECIPES)
def test_readme_lists_the_tested_recipes(package: str) -> None:
    page = (ROOT / package / "README.md").read_text(encoding="utf-8")
    assert (
        re.findall("^## (?:Add|Recipe:) (.*)$", page, re.MULTILINE) == RECIPES[package]
    )
