"""Test cases of the assignments: public ones, and hidden ones drawn from a seed.

The expected answers are those of this project.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import jaxkv
from experiments.course.batching_policy import checks
from scaling import costs, plan, shapes
from scaling.laws import CHINCHILLA

type TestCase = tuple[str, float, str, dict[str, Any]]
"""Title, points, name of a function of `checks.py`, and its arguments."""
type CaseMaker = Callable[[np.random.Generator, bool], Iterator[TestCase]]
"""Yields the cases of an assignment; True makes the hidden ones."""


def _page_allocator(rng: np.random.Generator, is_hidden: bool) -> Iterator[TestCase]:
    """Yields walks over small pools: operations, pages and tokens per page."""

    def random_walk(num: int) -> str:
        rows = []
        for _ in range(num):
            method = rng.choice(["append", "append", "fork", "release"])
            first, second = rng.permutation(list("abcde"))[:2]
            last = {"append": rng.integers(1, 6), "fork": second, "release": ""}
            rows.append(f"{method} {first} {last[method]}")
        return ";".join(rows)

    if not is_hidden:
        for title, text in {
            "tables grow page by page": "append a 3;append b 1;append a 2",
            "a refused append changes nothing": (
                "append a 3;append b 7;append a 6;append a 4"
            ),
            "a shared page is copied before a write": (
                "append a 3;fork a b;append b 1;append a 1"
            ),
            "release keeps shared pages": (
                "append a 3;fork a b;release a;append c 3;release c"
            ),
        }.items():
            yield title, 15, "check_walks", {"walks": [(text, 4, 2)]}
        return
    full = "append a 7;fork a b;append b 1;append b 2"
    even = "append a 4;fork a b;append b 1;append a 3"
    walks = [(full, 4, 2), (even, 5, 2)]
    yield "copies of the last page only", 15, "check_walks", {"walks": walks}
    walks = [
        (random_walk(num), int(rng.integers(3, 9)), int(rng.integers(1, 5)))
        for num in (6, 8, 10, 15, 20, 30, 50, 80)
    ]
    yield "random walks", 25, "check_walks", {"walks": walks}


def _batching_policy(rng: np.random.Generator, is_hidden: bool) -> Iterator[TestCase]:
    """Yields states, and loads with the latencies of first come, first served.

    A state has the running sequences (target, length, pages), the tokens of waiting
    requests, the free pages and the budget.
    """

    def random_state() -> list[Any]:
        running = []
        for _ in range(rng.integers(0, 5)):
            length = int(rng.integers(0, 60))
            more = 1 if rng.random() < 0.6 else int(rng.integers(1, 50))
            running.append([length + more, length, -(-length // 16)])
        waiting = rng.integers(1, 90, rng.integers(0, 5)).tolist()
        # The first sequence always fits: the pool is larger than any request.
        free_pages = 8 if len(running) < 2 else int(rng.integers(0, 9))
        if running and running[0][2] * 16 < running[0][0]:
            free_pages = max(free_pages, 4)
        return [running, waiting, free_pages, int(rng.integers(8, 100))]

    def load_case(title: str, num: int, rate: float) -> TestCase:
        is_long = rng.random(num) < 0.25
        load = {
            "arrival_s": np.sort(rng.uniform(0.0, num / rate, num)).tolist(),
            "prompt": np.where(is_long, 400, 20).tolist(),
            "output": rng.integers(5, 60, num).tolist(),
        }
        machine = {"num_pages": 60, "max_length": 1024, "token_budget": 64}
        times = checks.simulate_load(jaxkv.fcfs(), load, machine)
        limits = {name: 1.1 * float(np.mean(x)) for name, x in times.items()}
        arguments = {"load": load, "machine": machine, "limits_s": limits}
        return title, 10, "check_load", arguments

    if is_hidden:
        states = [random_state() for _ in range(60)]
        states.sort(key=lambda x: len(x[0]) + len(x[1]))
        yield "random states", 20, "check_plans", {"states": states}
        yield load_case("serves another load", 30, 8.0)
        return
    decode = [33, 32, 2]
    for title, *states in (
        ("admits at every step", [[], [20], 8, 64], [[decode], [20, 30], 8, 64]),
        ("prompts do not stall decoding", [[[200, 100, 13], decode], [20], 8, 64]),
        ("admits in order", [[decode], [100, 10], 3, 64]),
        ("preempts the last, and the fewest", [[decode] * 3, [10], 1, 64]),
    ):
        yield title, 15, "check_plans", {"states": states}
    yield load_case("serves a load", 30, 4.0)


def _speculative_verifier(
    rng: np.random.Generator, is_hidden: bool
) -> Iterator[TestCase]:
    """Yields pairs of distributions: draft, target, number of calls, and seed."""

    def law(draft, target, num: int = 3000) -> list[Any]:
        return [draft, target, num, int(rng.integers(2**31))]

    if not is_hidden:
        equal = [[0.5, 0.3, 0.2]] * 3
        laws = [law(equal[:2], equal, 50), law([[1.0, 0.0]], [[0.0, 1.0]] * 2, 50)]
        yield "the answer's form", 20, "check_form", {"laws": laws, "lengths": [3, 1]}
        laws = [law([[0.5, 0.5]], [[0.8, 0.2], [0.3, 0.7]])]
        yield "one draft", 20, "check_distribution", {"laws": laws}
        yield "the acceptance rate", 15, "check_acceptance", {"laws": laws}
        return
    draft, target = (rng.dirichlet(np.full(4, 2.0), n).tolist() for n in (2, 3))
    sparse = law([[0.6, 0.4, 0.0]], [[0.2, 0.3, 0.5], [0.1, 0.9, 0.0]])
    peaked = law([[0.1, 0.1, 0.8]], [[0.1, 0.8, 0.1], [0.6, 0.2, 0.2]])
    laws = [sparse, peaked]
    yield "distributions far apart", 15, "check_distribution", {"laws": laws}
    laws = [law(draft, target, 4000)]
    yield "two drafts", 15, "check_distribution", {"laws": laws}
    yield "acceptance far apart", 15, "check_acceptance", {"laws": [sparse, peaked]}


def _online_softmax(rng: np.random.Generator, is_hidden: bool) -> Iterator[TestCase]:
    """Yields scores, values and divisions into parts and blocks."""

    def attend(scores, values, *parts) -> dict[str, Any]:
        return {"scores": scores, "values": values, "parts": parts}

    def random_input(queries: int, keys: int, scale: float, num_parts: int) -> dict:
        scores = rng.normal(size=(queries, keys)) * scale
        scores[rng.random(scores.shape) < 0.2] = -np.inf
        scores[0, : keys // 2] = -np.inf
        values = rng.normal(size=(keys, 3))
        cuts = sorted({0, keys, *rng.integers(1, keys, 4).tolist()})
        blocks = [list(x) for x in itertools.pairwise(cuts)]
        parts = [blocks[i::num_parts] for i in range(num_parts)]
        return attend(scores.tolist(), values.tolist(), *filter(None, parts))

    none = -np.inf
    two = [[10.0], [20.0]]
    one_part = ([[0, 1], [1, 2]],)
    two_parts = ([[0, 1]], [[1, 2]])
    if not is_hidden:
        for title, points, scores, parts in (
            ("two blocks", 20, [1.0, 3.0], one_part),
            ("large scores", 15, [1000.0, 1001.0], one_part),
            ("two parts", 15, [1.0, 3.0], two_parts),
        ):
            arguments = {"inputs": [attend([scores], two, *parts)]}
            yield title, points, "check_outputs", arguments
        return
    inputs = [attend([[none, 2.0], [none, none]], two, *one_part)]
    inputs.append(attend([[none, 2.0]], two, *two_parts))
    yield "masked blocks and rows", 15, "check_outputs", {"inputs": inputs}
    inputs = [random_input(2 + i, 8 + 4 * i, 10.0**i, 1 + i % 3) for i in range(5)]
    yield "random blocks and parts", 20, "check_outputs", {"inputs": inputs}
    inputs = [attend([list(range(8))], [[1.0]] * 8, [[i, i + 1] for i in range(8)])]
    yield "the state does not grow", 15, "check_state_size", {"inputs": inputs}


SHAPE_KEYS = (
    "vocab_size hidden_size num_layers num_q_heads num_kv_heads head_dim mlp_size "
    "is_tied num_experts top_k"
).split()
PUBLIC_SHAPES = {
    "a tiny model": (100, 16, 2, 4, 4, 4, 48, False, 0, 0),
    "Llama-2-7B": (32000, 4096, 32, 32, 32, 128, 11008, False, 0, 0),
    "Mixtral-8x7B": (32000, 4096, 32, 32, 8, 128, 14336, False, 8, 2),
}
HIDDEN_SHAPES = {
    "a tiny tied model": (100, 16, 2, 4, 2, 4, 48, True, 0, 0),
    "a tiny mixture": (100, 16, 2, 4, 4, 8, 24, False, 4, 2),
    "Llama-3.2-1B": (128256, 2048, 16, 32, 8, 64, 8192, True, 0, 0),
    "Llama-3-8B": (128256, 4096, 32, 32, 8, 128, 14336, False, 0, 0),
}


def _model_counter(rng: np.random.Generator, is_hidden: bool) -> Iterator[TestCase]:
    """Yields shapes with the counts of `scaling.costs`."""
    entries: list[dict[str, Any]] = []
    for name, row in (HIDDEN_SHAPES if is_hidden else PUBLIC_SHAPES).items():
        shape: dict[str, Any] = dict(zip(SHAPE_KEYS, row, strict=True))
        sequence = int(rng.integers(10, 5000)) if is_hidden else 10
        size = shape["mlp_size"]
        num_experts = shape["num_experts"]
        attention = ("num_q_heads", "num_kv_heads", "head_dim")
        model = shapes.ModelShape(
            name=name,
            **{key: shape[key] for key in SHAPE_KEYS[:3]},
            attention=shapes.HeadAttention(**{key: shape[key] for key in attention}),
            mlp_size=size,
            experts=shapes.MixtureShape(
                num_experts=num_experts, top_k=shape["top_k"], size=size
            )
            if num_experts
            else None,
            tie_embeddings=shape["is_tied"],
        )
        counts = costs.count_parameters(model)
        terms = costs.forward_terms(model, sequence=sequence, attention="full")
        expected = {
            "total_params": counts.total,
            "active_params": counts.active,
            "forward_flops": costs.total_flops(terms),
            "kv_bytes_per_token": costs.kv_bytes_per_token(model),
            "training_bytes": sum(dataclasses.astuple(costs.MIXED)) * counts.total,
        }
        entries.append(
            {"name": name, "shape": shape, "sequence": sequence, "expected": expected}
        )
    for name in entries[0]["expected"]:
        title = f"{name} of {'other' if is_hidden else 'three'} models"
        yield title, 10, "check_shape_counts", {"name": name, "shapes": entries}


def _budgeted_design(rng: np.random.Generator, is_hidden: bool) -> Iterator[TestCase]:
    """Yields laws with their optima, an allowance and a budget."""
    for i in range(3 if is_hidden else 1):
        law = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}
        allowance = 1e18
        if is_hidden:
            # Ratios D / N of about 1, 1,000 and 100 at the optimum of the budget.
            alpha, beta = [(0.28, 0.40), (0.38, 0.27), (0.33, 0.33)][i]
            ratio = (1.0, 1000.0, 100.0)[i] * float(rng.uniform(0.7, 1.4))
            allowance = float(rng.uniform(0.5, 2.0)) * 1e18
            num_params = (300 * allowance / 6 / ratio) ** 0.5
            # At the optimum, alpha A / N^alpha = beta B / D^beta.
            term = 0.25 * float(rng.uniform(0.8, 1.2))
            law = {"E": float(rng.uniform(1.2, 2.2)), "alpha": alpha, "beta": beta}
            law["A"] = term * num_params**alpha
            law["B"] = alpha / beta * term * (ratio * num_params) ** beta
        budget = 300 * allowance
        best = plan.allocate_budget(plan.law_two_powers(CHINCHILLA, law), budget)
        law |= {"noise": 1e-3, "seed": int(rng.integers(2**31))}
        law |= {"best_loss": best.loss, "best_params": best.num_params}
        arguments = {"law": law, "allowance": allowance, "budget": budget}
        which = f"hidden law {i + 1}" if is_hidden else "the public law"
        points = {"allowance": 5, "design": 10, "prediction": 10}
        points |= {} if is_hidden else {"design": 15, "prediction": 5}
        for subject, score in points.items():
            title = f"{subject}, {which}"
            yield title, score, "check_design", {**arguments, "subject": subject}


CASES: dict[str, CaseMaker] = {
    "page_allocator": _page_allocator,
    "batching_policy": _batching_policy,
    "speculative_verifier": _speculative_verifier,
    "online_softmax": _online_softmax,
    "model_counter": _model_counter,
    "budgeted_design": _budgeted_design,
}
