"""Pages: programs run, numbers equal the records, paths and commands exist."""

import json
import re
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

import jaxkv
from experiments import framework
from experiments.examples import (
    decode_without_a_scheduler,
    serve_your_own_model,
    simulate_a_policy,
)
from jaxkv import memory
from scaling.shapes import CONFIGS
from tests.support import engines, pages
from tests.support.folders import RECORDS, ROOT

PACKAGES = ("pallas_kernels", "jaxkv", "scaling", "experiments", "tests")
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/results.md",
    "experiments/ARTIFACT.md",
    "experiments/records/README.md",
    *(f"{package}/README.md" for package in PACKAGES),
)


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


# Programs


@pytest.fixture(scope="module")
def blocks() -> list[str]:
    code_blocks = pages.fenced_blocks(ROOT / "README.md")
    return [block.text for block in code_blocks if block.language == "python"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "model", ["tiny", pytest.param("published", marks=pytest.mark.slow)]
)
def test_readme_programs_run(model, blocks, tmp_path, monkeypatch):
    if model == "tiny":
        folder = engines.save_tiny_model(tmp_path / "model", max_positions=1024)
        monkeypatch.setattr(jaxkv, "bundled_model", lambda: folder)
    monkeypatch.chdir(tmp_path)
    space, outputs = pages.run_blocks(ROOT / "README.md")
    printed = "".join(outputs)
    assert "def read_lines(path):" in printed
    # The values in the comments of the programs.
    assert "6738415616" in printed
    best = space["best"]
    line = f"{best.num_params:.3e} {best.num_tokens:.3e} {best.loss:.4f}"
    assert line.replace("e+", "e") in "\n".join(blocks)


def test_first_example_has_at_most_twelve_lines(blocks):
    assert len(blocks[0].splitlines()) <= 12


@pytest.mark.thorough
def test_policy_simulation_example(capsys):
    latency = simulate_a_policy.main()
    # [concurrency limit, load]
    assert latency.shape == (3, 3)
    assert (np.diff(latency, axis=0) < 1e-3).all()
    assert (np.diff(latency, axis=1) > 0).all()
    assert capsys.readouterr().out.count("[") == 4


def test_one_layer_model_of_the_example() -> None:
    """The logits of a prompt equal those of one causal layer in NumPy."""
    rng = np.random.default_rng(0)
    shapes = {"embed": (50, 16), "query": (16, 16), "key": (16, 16), "value": (16, 16)}
    params = {
        name: rng.normal(0, 1, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    token = np.array([3, 1, 4, 1, 5], np.int32)
    place = np.arange(5, dtype=np.int32)
    x = params["embed"][token]
    q, k, v = (
        (x @ params[name]).reshape(5, 2, 8) for name in ("query", "key", "value")
    )
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(8)
    scores = np.exp(np.where(place[:, None] >= place, scores, -np.inf))
    mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)
    expected = (x + mixed.reshape(5, 16)) @ params["embed"].T
    pages = memory.make_pages(
        num_layers=1,
        num_pages=1,
        num_kv_heads=2,
        page_size=16,
        head_dim=8,
        dtype="float32",
    )
    table = np.zeros((5, 1), np.int32)
    forward = jax.jit(serve_your_own_model.one_layer_model)
    rows: Any = (token, place, None, table, place)
    logits = forward(params, pages, memory.Rows(*rows)).logits
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_model_served_inside_jit_example():
    # Three requests of eight tokens; the limit is one request at a time.
    _, trace = serve_your_own_model.main()
    assert trace.num_emitted.sum() == 24
    assert trace.num_emitted.sum(axis=1).max() == 1


@pytest.mark.thorough
def test_decode_loop_example(tmp_path):
    model = engines.save_tiny_model(tmp_path / "model", max_positions=512)
    answer = decode_without_a_scheduler.main(model, num_tokens=5)
    assert 1 <= len(answer) <= 5
    again = decode_without_a_scheduler.main(model, num_tokens=3)
    assert answer.startswith(again.rstrip("\ufffd"))


# Sizes, paths, names


@pytest.mark.parametrize(
    ("page", "max_lines"),
    [("README.md", 100), *((f"{package}/README.md", 80) for package in PACKAGES)],
)
def test_pages_are_short(page: str, max_lines: int) -> None:
    assert len(read(page).splitlines()) <= max_lines


@pytest.mark.parametrize("page", PAGES)
def test_paths_on_pages_exist(page: str) -> None:
    text = read(page)
    home = (ROOT / page).parent
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
    for link in links:
        assert (home / link).exists(), link
    # Paths in backticks are relative to the folder of the page or to the root.
    paths = re.findall(r"`((?:\.\./)?(?:[\w.-]+/)+[\w.-]*)`", text)
    names = re.findall(r"`(?:jaxkv \w+ )?([\w/.-]+\.(?:py|md|toml|json|txt))`", text)
    for path in {*paths, *names} - set(GENERATED_FILES):
        assert (home / path).exists() or (ROOT / path).exists(), path


GENERATED_FILES = (
    "config.json",
    "env.json",
    "claims.json",
    "fit.json",
    "report.md",
    "traces/",
    "my.json",
    "records/NAME",
)
"""Files of run folders and of Hugging Face folders; they have no fixed place."""


COMMANDS = ("bench", "calibrate", "claims", "cost", "demo", "fit", "generate", "list")
COMMANDS = (*COMMANDS, "plan", "replay", "run", "serve", "simulate", "sweep", "train")
COMMANDS = (*COMMANDS, "compare", "completion", "course", "next", "records", "view")


@pytest.mark.parametrize("page", PAGES)
def test_commands_on_pages_exist(page: str) -> None:
    text = read(page)
    commands = set(re.findall(r"(?:`|^|&& )jaxkv ([a-z_]+)", text, re.MULTILINE))
    assert commands <= set(COMMANDS)
    configs_by_name = {entry.name: entry.configs for entry in framework.entries()}
    for name, config in re.findall(r"jaxkv run ([a-z_0-9]+)(?: ([a-z_0-9]+))?", text):
        assert name in configs_by_name
        assert config in (*configs_by_name[name], ""), f"{name} {config}"
    for name in re.findall(r"jaxkv bench (\w+)", text):
        assert f"bench_{name}" in configs_by_name
    for name in re.findall(r"jaxkv cost ([a-z]+[\w.-]+)", text):
        assert name in CONFIGS or (name, page) == COST_OF_A_FILE


COST_OF_A_FILE = ("plan", "experiments/README.md")


# Numbers


def rows(record: str) -> list[dict[str, Any]]:
    text = (RECORDS / record / "runs.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_records_page_names_each_record_and_its_machine() -> None:
    page = read("experiments/records/README.md")
    for path in RECORDS.iterdir():
        assert f"({path.name}/" in page or path.suffix, path
    for path in RECORDS.glob("*/env.json"):
        env = json.loads(path.read_text("utf-8"))
        # The page names two machines. Usable memory differs slightly between OS
        # kernels, so it is rounded.
        assert env["cpu"] in ("Intel(R) Xeon(R) Processor", "AMD EPYC")
        assert (env["num_cpus"], round(env["memory_bytes"] / 1e9, 1)) == (2, 25.3)
        assert env["versions"]["jax"] == "0.11.2"
    # Failed claims are marked on the page.
    assert page.count("**fail") >= 15


def measured(record: str, *statements: str, key: str = "ours") -> list[float]:
    """Returns the numbers of the claims that begin with the statements."""
    claims = json.loads((RECORDS / record / "claims.json").read_text("utf-8"))
    numbers = []
    for statement in statements:
        values = {x[key] for x in claims if x["claim"].startswith(statement)}
        assert len(values) == 1, statement
        numbers.append(float(values.pop()))
    return numbers


def drawn(record: str, *statements: str) -> str:
    """Returns the numbers of the drawn curves, as the results page has them."""
    exact = measured(record, *(f"{x}, by the dr" for x in statements), key="published")
    return ", ".join(f"{x:.2f}" for x in exact)


def median_difference() -> str:
    """Returns the median difference of drawn loads and batches, as a text."""
    claims = json.loads((RECORDS / "causes" / "claims.json").read_text("utf-8"))
    off = [x["ours"] / x["published"] - 1 for x in claims if "figure" in x["claim"]]
    assert len(off) == 40
    return f"| {100 * np.median(np.abs(off)):.1f} % off, median"


def expected_numbers() -> dict[str, list[str]]:
    """Returns the numbers of each row of the results page, from the records."""
    orca = ("Max", "Pow2", "Oracle")
    systems = [*(f"Orca ({x})" for x in orca), "the paged system"]
    parts = [f"{system}: token states" for system in systems]
    models = ("OPT-13B", "OPT-66B", "OPT-175B")
    oracle, orca_max = (
        [f"{model}, ShareGPT: times the load of Orca ({x})" for model in models]
        for x in ("Oracle", "Max")
    )
    alpaca = [
        f"OPT-13B, Alpaca{x}: times the load of Orca (Oracle)"
        for x in ("", ", beam width 6")
    ]
    saved = (
        "pages saved by 2 answers, short",
        "pages saved by beam search of width 6, l",
    )
    unseen, load_claims = (
        [f"{out} left out, {x}" for x in ("end-to-end mean", "first token median")]
        for out in ("model", "load")
    )
    begin = [f"requests that begin with the same {x} tokens" for x in (80, 341)]
    chat = [f"paged memory sustains twice the load of Orca ({x})" for x in orca]
    chat_loads = [f"load of paged memory, times that of Orca ({x})" for x in orca]
    ways = [f"openchat, {x}: " for x in ("mixed only", "chunks only", "both")]
    split = "OPT-13B, prompts of 512 and answers of 64 tokens: two GPUs that read"
    starts = rows("bench_start")
    fits = {x["method"]: x for x in rows("bench_fit")}
    kernels = {
        x["spec"]: x["ratio"]
        for x in rows("bench_kernels")
        if x.get("implementation") == "reference"
    }
    steps = {
        key: np.median([x[key] for x in rows("bench_simulate")])
        for key in ("steps_per_s_vmapped", "steps_per_s_python")
    }

    def faster(record: str) -> list[float]:
        """Returns the ratios to the best peer by width."""
        rates: dict[int, dict[str, float]] = {}
        for row in rows(record):
            of_width = rates.setdefault(row["width"], {})
            of_width[row["implementation"]] = row["tokens_per_s"]
        return [x.pop("jaxkv") / max(x.values()) for x in rates.values()]

    def started(kind: str) -> float:
        return float(np.median([x["wall_s"] for x in starts if x["kind"] == kind]))

    def ranged(
        key: str, *, of: str = "bench_decode", context: int = 0, sequences: int = 0
    ) -> list[str]:
        """Returns the ratios of one machine with the range over rounds."""
        ranges = []
        for row in rows(of):
            matches = context in (0, row["prompt_tokens"])
            matches &= sequences in (0, row["batch"])
            if matches and row["implementation"] == "jaxkv" and row[key] is not None:
                low, high = row[f"{key}_range"]
                ranges.append(f"{row[key]:.2f} ({low:.2f}-{high:.2f})")
        return [", ".join(ranges)]

    def written(form: str, values: list[float], between: str = ", ") -> str:
        return between.join(form.format(x) for x in values)

    xeon = "bench_decode_xeon"
    loss = json.loads((RECORDS / "isoflop" / "prediction.json").read_text("utf-8"))
    gain = measured("isoflop", "error of the predicted loss of a larger run")[0]
    measured_loss = (loss["predicted"] - gain * loss["best_fitted_loss"]) / (1 - gain)
    span = [kernels[f"decode-b8-1k-32x8-{x}-float32"] for x in ("p16", "p64-uniform")]
    adapts, worst, eagle = measured("speculation_zoo", *SPECULATION)
    rewards = [
        [f"{task}: mean reward of the {part}" for task in ("copying", "brackets")]
        for part in ("first", "last")
    ]
    left_out = "model left out, "
    median = "median over models of the median error"
    tokens = [
        f"{left_out}dense models: {median}, time per token",
        f"{left_out}mixtures: {median} of the time per token",
    ]
    joules = [
        f"{left_out}{x}: median error of the energy per token"
        for x in ("dense models", "mixtures")
    ]
    return {
        "fig. 2:": [written("{:.0f}", measured("memory_waste", *parts))],
        "fig. 12,": [
            written("{:.2f}", measured("latency_vs_rate", *oracle)),
            drawn("latency_vs_rate", *oracle),
        ],
        "the same, of Orca (Max)": [
            written("{:.2f}", measured("latency_vs_rate", *orca_max)),
            drawn("latency_vs_rate", *orca_max),
        ],
        "figs. 12d, 14f:": [
            written("{:.2f}", measured("latency_vs_rate", *alpaca)),
            drawn("latency_vs_rate", *alpaca),
        ],
        "figs. 12 to 14, 17:": [median_difference()],
        "fig. 15:": [written("{:.1f}", measured("sharing", *saved), " to ")],
        "fig. 16:": [
            written("{:.2f}", measured("sharing", *begin)),
            written("{:.2f}", measured("sharing_paper", *TRANSLATIONS)),
        ],
        "fig. 17:": [
            written("{:.2f}", measured("chatbot", *chat)),
            drawn("chatbot", *chat_loads),
        ],
        "Sarathi-Serve:": [
            written("{:.2f}", measured("chunked_prefill", *(x + end for x in ways)))
            for end in ("P99 time between tokens", "median time to the first token")
        ],
        "DistServe:": [
            written("{:.2f}", measured("disaggregation", split)),
            written("{:.1f}", measured("disaggregation", GAIN)),
        ],
        "Mooncake:": [written("{:.1f}", measured("prefix_caching", CHUNKS))],
        "vLLM servers": [
            written(
                "{:.1f} %", measured("calibration", *(f"{x}: med" for x in unseen))
            ),
            written(
                "{:.1f} %", measured("calibration", *(f"{x}: med" for x in load_claims))
            ),
            written("{:.1f}", measured("calibration", *(f"{x}: lar" for x in unseen))),
        ],
        "public servers": [
            written("{:.1f} %", measured("public_servers", *tokens)),
            written("{:.1f} %", measured("public_servers", *joules)),
        ],
        "Sardana et al.:": [
            f"{measured('total_cost', 'to serve 2e12 tokens')[0]:.2f}B",
            f"{measured('total_cost', 'that 7B saves')[0]:.1f} %",
        ],
        "cheapest model to train": [
            written("{:.1e}", measured("total_cost", "without a load", "if a served")),
        ],
        "a policy by search": [
            f"{measured('policy_search', TRAFFICS)[0]:.0f}; "
            f"{measured('policy_search', SHIPPED)[0]:.3f}",
        ],
        "larger public runs": [
            written("{:.2f}", measured("forecasting", *HELD_OUT)),
            f"; {measured('forecasting', 'a fifth of the compute')[0]:.2f} |",
        ],
        "64 branches of one": [
            f"{measured('counterfactual', 'the branch with the unchanged')[0]:.0f}; "
            f"{measured('counterfactual', 'branches of one program')[0]:.2f}; "
            f"{measured('counterfactual', '64 mapped simulations')[0]:.1f}",
        ],
        "Chinchilla's loss": [
            f"{loss['predicted']:.3f} ({loss['low']:.3f}-{loss['high']:.3f})",
            f"came to {measured_loss:.3f}",
        ],
        "a forecast committed": [
            written("{:.2f}", measured("forecast_targets", *FORECAST_SKILLS))
        ],
        "mixtures against dense": [written("{:.2f}", measured("experts", SEVENTH))],
        "latent against": [written("{:+.3f}", measured("deepseek", LATENT))],
        "LSTM against": [written("{:.1f}", measured("rivals", "lstm, to equal loss"))],
        "learn rewards from a program": [
            written("{:.2f}", measured("grpo", *part)) for part in rewards
        ],
        "decode at a context of 128": ranged("ratio", context=128),
        "decode at a context of 768": ranged("ratio", context=768),
        "decode at a context of 2,048": ranged("ratio", context=2048),
        "| prefill of 128": ranged("prefill_ratio", sequences=1),
        "Xeon (AVX-512), context 128": ranged("ratio", of=xeon, context=128),
        "Xeon, context 768": ranged("ratio", of=xeon, context=768),
        "Xeon, context 2,048": ranged("ratio", of=xeon, context=2048),
        "Xeon, prefill of": ranged("prefill_ratio", of=xeon, sequences=1),
        "| training, width": [written("{:.2f}", faster("bench_train"))],
        "Xeon, training": [written("{:.2f}", faster("bench_train_xeon"))],
        "First answer of the bundled": [
            written("{:.1f} s", [started("cold"), started("warm")])
        ],
        "4,000 bootstrap fits": [f"{fits['NumPy gradient + SciPy BFGS']['ratio']:.0f}"],
        "simulated steps per second": [f"{np.divide(*steps.values()):.1f}"],
        "speculation over": [f"{adapts:.2f}, {worst:.2f}; {eagle:.2f}"],
        "attention: decode": [
            written("{:.2f}", span, " and "),
            f"{kernels['decode-b1-1k-9x3d64-p16-float32']:.2f}",
            f"{kernels['tree-b2-t26-1k-32x8-p16-float32']:.2f}",
        ],
    }


ADAPTS = "an adaptive draft length against plain decoding"
SPECULATION = [
    f"{ADAPTS}, over batches",
    f"{ADAPTS}: the worst",
    "a trained drafter of",
]
TRANSLATIONS = [f"translations that begin with the same {x} tokens" for x in (80, 341)]
TRAFFICS = "the policy found has a P90 job time at least 10 % below"
SHIPPED = "on held-out hours of sessions the policy found is no worse"
HELD_OUT = [
    f"90 % intervals contain held-out runs with more compute: {x}"
    for x in ("Epoch", "Apple", "Llama 3", "Marin", "misfits")
]
CHUNKS = "mooncake_synthetic: chunks found by a cache of all pages"
LATENT = "latent attention reaches a lower loss than multi-head attention"
FORECAST_SKILLS = [
    f"{x}, targets: CRPS of the law's forecast over that of log-linear"
    for x in ("text", "language")
]
GAIN = "OPT-13B, prompts of 512 and answers of 64 tokens: each GPU"
SEVENTH = "for equal loss a dense model needs seven times"


def test_the_results_page_has_the_numbers_of_the_records() -> None:
    lines = [x for x in read("docs/results.md").splitlines() if x.startswith("| ")]
    first = next(i for i, x in enumerate(lines) if x.startswith("| claim | ours"))
    last = next(i for i, x in enumerate(lines) if x.startswith("| attention: decode"))
    cited = [x for x in lines[first + 1 : last + 1] if any(map(str.isdigit, x))]
    unrecorded = ("Gadre et al.", "figs. 18, 19", "| | jaxkv")
    for start, expected in expected_numbers().items():
        [line] = [x for x in cited if start in x]
        cited.remove(line)
        for number in expected:
            assert number in line, f"{number} is not in {line}"
    assert not [x for x in cited if not any(cell in x for cell in unrecorded)]


# Rows of the front page, and the rows of the results page with the same numbers.
FRONT = {
    "decode at a context of 768 tokens": "decode at a context of 768",
    "prefill of 128": "| prefill of 128",
    "training at width": "| training, width",
    "first answer of the bundled": "First answer of the bundled",
    "load that paged memory sustains": "fig. 12,",
    "simulated steps per second": "simulated steps per second",
    "4,000 bootstrap fits": "4,000 bootstrap fits",
    "loss of a larger run": "Chinchilla's loss",
    "latency of vLLM servers": "vLLM servers",
}


def test_the_front_page_has_numbers_and_verdicts_of_the_results_page() -> None:
    front = read("README.md")
    results = read("docs/results.md").splitlines()
    section = front.partition("## Nine results")[2].partition("\n[All results]")[0]
    rows = [x for x in section.splitlines() if x.startswith("| ") and "| | " not in x]
    assert len(rows) == len(FRONT)
    expected = expected_numbers()
    for row in rows:
        [start] = [x for x in FRONT if row.startswith(f"| {x}")]
        for number in expected[FRONT[start]]:
            assert number in row, f"{number} is not in {row}"
        [full] = [x for x in results if x.startswith("| ") and FRONT[start] in x]
        assert re.findall(r"\*\*.*?\*\*", row) == re.findall(r"\*\*.*?\*\*", full)
    counted = re.search(
        r"of publications' outcomes, simulated, (.*? be compared)", front
    )
    assert counted is not None
    assert counted[1] in "\n".join(results)


# By row of the results page: the claims that it is about, by record.
JUDGED = {
    "fig. 2:": {"memory_waste": r"(Orca|the paged).*: (token|reserv|inter|exter)"},
    "fig. 12, ShareGPT": {"latency_vs_rate": r".*ShareGPT: times .*Oracle"},
    "the same, of Orca (Max)": {"latency_vs_rate": r"OPT.*ShareGPT: times .*Max"},
    "figs. 12d, 14f:": {"latency_vs_rate": r"OPT-13B.*Alpaca(, beam width 6)?: times"},
    "figs. 12 to 14, 17:": {"causes": "figure"},
    "fig. 15:": {"sharing": "pages saved", "sharing_paper": "pages saved"},
    "fig. 16:": {"sharing": "requests that begin", "sharing_paper": "translations"},
    "fig. 17:": {"chatbot": "(load of )?paged memory"},
    "Sarathi-Serve:": {"chunked_prefill": "openchat"},
    "DistServe:": {"disaggregation": "OPT-13B", "causes": "OPT-13B"},
    "Mooncake:": {"prefix_caching": "mooncake_synthetic: chunks"},
    "vLLM servers": {"calibration": "(model|load) left out"},
    "public servers": {"public_servers": "(model|developer) left out"},
    "Sardana et al.:": {"total_cost": "to serve 2e12|that 7B saves"},
    "cheapest model to train": {"total_cost": "without a load|if a served"},
    "a policy by search": {"policy_search": "the policy found|on held-out hours of"},
    "larger public runs": {"forecasting": "90 .*(Ep|Ap|Ll|Ma|mis)|a fifth of"},
    "64 branches of one": {"counterfactual": ""},
    "Chinchilla's loss": {"isoflop": "error of the predicted loss"},
    "a forecast committed": {"forecast_targets": "(text|language), targets"},
    "mixtures against": {"experts": "for equal loss"},
    "latent against": {"deepseek": ".*than multi-head attention"},
    "learn rewards from a program": {"grpo": "copying|brackets|bytes"},
    "LSTM against": {"rivals": "lstm, to equal loss"},
}
WORDS = {
    "hold": "holds",
    "fail": "fails",
    "check": "checks",
    "recomputed": "recomputes",
}


def test_the_results_page_has_the_dates_of_old_records() -> None:
    envs = {x.parent.name: x for x in RECORDS.glob("*/env.json")}
    days = {
        name: json.loads(path.read_text("utf-8"))["started_at"][:10]
        for name, path in envs.items()
    }
    named = re.findall(r"`(\w+)` \((2026-\d\d-\d\d)\)", read("docs/results.md"))
    assert dict(named) == {name: x for name, x in days.items() if x < "2026-11-29"}


def test_the_results_page_has_the_verdicts_of_the_records_by_kind() -> None:
    page = read("docs/results.md")
    counted: Counter[tuple[str, str]] = Counter()
    for path in RECORDS.glob("*/claims.json"):
        rows = json.loads(path.read_text("utf-8"))
        counted.update((row["kind"], row["verdict"]) for row in rows)
    for line in (
        f"{counted['reproduces', 'holds']} hold, {counted['reproduces', 'fails']} fail",
        f"{counted['cannot compare', 'differs']} cannot be compared",
        f"{sum(n for (kind, _), n in counted.items() if kind == 'calibrated')} are cal",
        f"{counted['recomputes', 'holds']} hold and "
        f"{counted['recomputes', 'fails']} fail",
        f"{counted['checks', 'holds']} hold, {counted['checks', 'fails']} fail and "
        f"{counted['checks', 'differs']} cannot be compared",
    ):
        assert line in page, line
    for start, about in JUDGED.items():
        [line] = [x for x in page.splitlines() if x.startswith("| ") and start in x]
        verdicts = set()
        for record, pattern in about.items():
            text = (RECORDS / record / "claims.json").read_text("utf-8")
            for row in json.loads(text):
                if re.match(pattern, row["claim"]):
                    kind = row["kind"]
                    decided = ("checks", "reproduces", "recomputes")
                    verdicts |= {kind} - {"reproduces"}
                    verdicts |= {row["verdict"]} if kind in decided else set()
                    verdicts |= {row.get("direction", "")} - {""}
        cited = {WORDS.get(x, x) for x in re.findall(r"\*\*(.*?)\*\*", line)}
        assert cited == verdicts, line


def test_records_page_has_no_duplicate_table_rows() -> None:
    page = read("experiments/records/README.md")
    cited = [
        x for x in page.splitlines() if x.startswith("| ") and re.search(r"\d\.\d", x)
    ]
    assert len(cited) == len(set(cited))
