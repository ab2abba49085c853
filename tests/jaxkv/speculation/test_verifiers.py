"""Verified drafts have the right distribution, or exactly the right tokens."""

import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import sampling
from jaxkv.engine import Verifier
from jaxkv.sampling import ACCEPT, DRAFT, Params, Sampling, draw_key, greedy_params
from jaxkv.speculation import (
    Rejection,
    SharedNoiseVerifier,
    Typical,
    draw_drafts,
    draws,
    verifiers,
)
from tests.support import mutation
from tests.support.mutation import Bug
from tests.support.sampled_laws import (
    chi_square,
    law_slowly,
    params_of,
    penalised_slowly,
)

# Enumeration of all outputs of a step


class Case(NamedTuple):
    """Drafts of a few levels, with the distributions of drafter and target."""

    request: Sampling
    """Sampling parameters of the request."""
    drafter: Sampling
    """Sampling parameters of the drafter."""
    levels: int = 1
    """Depth of the draft tree."""
    width: int = 1
    """Children of a node."""
    replacement: bool = False
    chosen: bool = False
    """True if the drafter takes its likeliest tokens, without a distribution."""
    reported: Sampling | None = None
    """Distribution reported to the verifier, if it is a wrong one."""
    distinct: bool = False
    """True if the verifier assumes different siblings, although some may be equal."""

    @property
    def contexts(self) -> list[tuple[int, ...]]:
        """Contexts at each node, the root first, the leaves last."""
        return [
            context
            for level in range(self.levels + 1)
            for context in itertools.product(range(VOCAB), repeat=level)
        ]


VOCAB = 4
PROMPT = (0, 1)
MOST_CONTEXTS = 85
MOST_KNOWN = 5
MOST_ROWS = 160
"""Every case is filled up to as many, so that programs are shared."""


def candidates(
    law: np.ndarray, num: int, replacement: bool
) -> Iterator[tuple[tuple[int, ...], float]]:
    """All tokens that may be sampled from a distribution, in order, with
    probabilities."""
    if num == 0:
        yield (), 1.0
        return
    if not law.any():
        yield (-1,) * num, 1.0
        return
    for token in np.flatnonzero(law):
        left = law.copy()
        if not replacement:
            left[token] = 0
            # A single child may leave a residual that consists of rounding errors.
            left = left / left.sum() if left.any() else left
        for others, chance in candidates(left, num - 1, replacement):
            yield (int(token), *others), float(law[token]) * chance


class Judged(NamedTuple):
    """One sample of children at one node, and the verifier's result."""

    children: tuple[int, ...]
    chance: float
    accept: np.ndarray
    residual: np.ndarray


def drafted(case: Case, logits: np.ndarray) -> list[tuple[tuple[int, ...], float]]:
    """Possible children of a node, with their probabilities."""
    if case.chosen:
        best = np.argsort(-logits)[: case.width]
        return [(tuple(int(token) for token in best), 1.0)]
    law = law_slowly(logits, case.drafter)
    return [*candidates(law, case.width, case.replacement)]


@functools.cache
def law_of_rows() -> Any:
    def law(logits: Any, tokens: Any, num: Any, params: Params) -> Any:
        prompt = jnp.full((MOST_CONTEXTS,), len(PROMPT), jnp.int32)
        changed = sampling.penalise(logits, tokens, prompt, num, params)
        return sampling.probabilities(changed, params)

    return jax.jit(law)


@functools.cache
def rule_of(verifier: Rejection, *code: Any) -> Any:
    """The compiled rule of a verifier, compiled again for a mutated verifier."""
    return jax.jit(lambda *arrays: verifier.rule(*arrays))


def filled(rows: Any, num: int) -> jax.Array:
    """An array padded with copies of its first row."""
    rows = np.asarray(rows)
    return jnp.asarray(np.concatenate([rows, rows[:1].repeat(num - len(rows), 0)]))


def laws_of(case: Case, logits: np.ndarray, request: Sampling) -> np.ndarray:
    """The distribution at every context, computed by the sampler."""
    contexts = [(*PROMPT, *context) for context in case.contexts]
    tokens = np.array(
        [row + (0,) * (MOST_KNOWN - len(row)) for row in contexts], np.int32
    )
    num = np.array([len(row) for row in contexts], np.int32)
    arrays = (filled(x, MOST_CONTEXTS) for x in (logits, tokens, num))
    return np.asarray(law_of_rows()(*arrays, params_of([request] * MOST_CONTEXTS)))


def judged(
    case: Case, target: np.ndarray, guess: np.ndarray
) -> dict[tuple[int, ...], list[Judged]]:
    """Every sample of children at every context, judged in one batch."""
    laws = laws_of(case, target, case.request)
    reported = laws_of(case, guess, case.reported or case.drafter)
    rows = [
        (index, context, drawing)
        for index, context in enumerate(case.contexts)
        for drawing in (
            drafted(case, guess[index])
            if len(context) < case.levels
            else [((-1,) * case.width, 1.0)]
        )
    ]
    at = np.array([index for index, _, _ in rows])
    children = filled(np.array([child for *_, (child, _) in rows], np.int32), MOST_ROWS)
    verifier = Rejection(replacement=case.replacement and not case.distinct)
    rule = rule_of(verifier, Rejection.rule, verifiers._try_child)
    reported = None if case.chosen else filled(reported[at], MOST_ROWS)
    accept, residual = map(
        np.asarray, rule(filled(laws[at], MOST_ROWS), reported, children)
    )
    by_context: dict[tuple[int, ...], list[Judged]] = {}
    for row, (_, context, drawing) in enumerate(rows):
        one = Judged(*drawing, accept[row], residual[row])
        by_context.setdefault(context, []).append(one)
    return by_context


def distance(case: Case, seed: int = 0) -> float:
    """Total variation distance between a step's output, continued plainly, and the
    model.

    The distributions are of strings one token longer than the drafts. Children of a
    child are independent of its siblings, so a tree is summed branch by branch.
    """
    rng = np.random.default_rng(seed)
    shape = (len(case.contexts), VOCAB)
    target, guess = rng.normal(size=(2, *shape)) * 1.5
    exact = {}
    for context, row in zip(case.contexts, target, strict=True):
        tokens = np.array((*PROMPT, *context))
        changed = penalised_slowly(row, tokens, len(PROMPT), len(tokens), case.request)
        exact[context] = law_slowly(changed, case.request)
    with jax.enable_x64(True):
        by_context = judged(case, target, guess)

    @functools.cache
    def wanted(context: tuple[int, ...]) -> np.ndarray:
        if len(context) > case.levels:
            return np.ones(())
        below = [wanted((*context, token)) for token in range(VOCAB)]
        return np.stack([p * law for p, law in zip(exact[context], below, strict=True)])

    @functools.cache
    def emitted(context: tuple[int, ...]) -> np.ndarray:
        total = np.zeros_like(wanted(context))
        for children, chance, accept, residual in by_context[context]:
            for child, taken in zip(children, accept, strict=True):
                if child >= 0:
                    total[child] += chance * taken * emitted((*context, child))
                    chance *= 1 - taken
            for token in range(VOCAB):
                total[token] += chance * residual[token] * wanted((*context, token))
        return total

    np.testing.assert_allclose(wanted(()).sum(), 1, rtol=1e-12)
    return float(np.abs(emitted(()) - wanted(())).sum() / 2)


PLAIN = Sampling()
FLAT = Sampling(temperature=2.0)
CUT = Sampling(temperature=1.3, top_k=3)
NUCLEUS = Sampling(temperature=0.7, top_p=0.8)
PENALISED = Sampling(
    repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3, min_p=0.1
)
EVERYTHING = Sampling(
    temperature=1.6, top_k=4, top_p=0.95, min_p=0.05, repetition_penalty=1.3
)

EXACT = {
    "one draft": Case(PLAIN, PLAIN),
    "one draft of few": Case(PLAIN, CUT),
    "one draft for few": Case(NUCLEUS, FLAT),
    "one that is chosen": Case(PENALISED, PLAIN, chosen=True),
    "one for a greedy row": Case(Sampling.greedy(), FLAT),
    "a greedy one": Case(CUT, Sampling.greedy()),
    "a chain of two": Case(PENALISED, NUCLEUS, levels=2),
    "a chain of three": Case(EVERYTHING, FLAT, levels=3),
    "a chain that is chosen": Case(EVERYTHING, PLAIN, levels=3, chosen=True),
    "two that may be equal": Case(PLAIN, FLAT, width=2, replacement=True),
    "three that may be equal": Case(NUCLEUS, CUT, width=3, replacement=True),
    "two that differ": Case(CUT, PLAIN, width=2),
    "three that differ": Case(PENALISED, FLAT, width=3),
    "three, of which the law has two": Case(PLAIN, Sampling(top_k=2), width=3),
    "as many as there are": Case(PLAIN, PLAIN, width=4),
    "three that are chosen": Case(EVERYTHING, PLAIN, width=3, chosen=True),
    "three that may be equal, and are passed over": Case(
        PLAIN, FLAT, width=3, replacement=True, distinct=True
    ),
    # A truncated distribution excludes some children, which are skipped.
    "sampled before top-k, reported after": Case(
        PLAIN, FLAT, width=2, reported=Sampling(temperature=2.0, top_k=2)
    ),
    "a tree": Case(EVERYTHING, FLAT, levels=2, width=2),
    "a tree of equals": Case(PENALISED, CUT, levels=2, width=2, replacement=True),
    "a tree that is chosen": Case(PLAIN, PLAIN, levels=2, width=2, chosen=True),
}


@pytest.mark.parametrize("name", EXACT)
def test_rejection_keeps_the_distribution(name: str) -> None:
    assert distance(EXACT[name]) < 1e-6


def check_distance(*names: str) -> None:
    for name in names:
        assert distance(EXACT[name]) < 1e-3


BUGS = {
    "the residual is not normalised": Bug(
        verifiers,
        "_try_child",
        "sampling.normalise(jnp.maximum(target_probs - draft_probs, 0))",
        "jnp.maximum(target_probs - draft_probs, 0)",
        check_distance,
        ("one draft",),
    ),
    "the draft distribution is not subtracted": Bug(
        verifiers,
        "_try_child",
        "jnp.maximum(target_probs - draft_probs, 0)",
        "target_probs",
        check_distance,
        ("one draft",),
    ),
    "the target probability is taken for the acceptance probability": Bug(
        verifiers,
        "_try_child",
        "jnp.minimum(ratio, 1)",
        "jnp.minimum(p, 1)",
        check_distance,
        ("one draft",),
    ),
    "the second child is judged as if it were the first": Bug(
        verifiers.Rejection,
        "rule",
        "chance, residual = _try_child(residual, guess, child)",
        "chance, residual = _try_child(target_probs, guess, child)",
        check_distance,
        ("two that may be equal",),
    ),
    "a rejected child stays in the draft distribution": Bug(
        verifiers.Rejection,
        "rule",
        "jnp.where(is_child, 0, left)",
        "left",
        check_distance,
        ("two that differ",),
    ),
    "the remaining draft distribution is not normalised": Bug(
        verifiers.Rejection,
        "rule",
        "sampling.normalise(jnp.where(is_child, 0, left))",
        "jnp.where(is_child, 0, left)",
        check_distance,
        ("two that differ",),
    ),
    "a chosen child counts as sampled from the model": Bug(
        verifiers.Rejection,
        "rule",
        "is_child.astype(dtype) if left is None",
        "target_probs if left is None",
        check_distance,
        ("one that is chosen",),
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_wrong_rule_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation.assert_noticed(monkeypatch, BUGS[name])


@pytest.mark.parametrize("name", ["one draft", "two that differ", "a tree"])
@pytest.mark.parametrize(
    ("drafter", "reported"),
    [
        (FLAT, PLAIN),
        # Sampled after top-k, reported as if before.
        (Sampling(temperature=2.0, top_k=2), FLAT),
        # The reverse, at another temperature.
        (PLAIN, Sampling(temperature=2.0, top_k=2)),
    ],
)
def test_a_wrong_draft_distribution_is_noticed(
    name: str, drafter: Sampling, reported: Sampling
) -> None:
    case = EXACT[name]._replace(drafter=drafter)
    assert distance(case) < 1e-6
    assert distance(case._replace(reported=reported)) > 1e-3


# The rule at its edges


def ruled(
    target: list[float], law: list[float] | None, *children: int, **fields: Any
) -> tuple[list[float], list[float]]:
    """Applies the rule to one row."""
    accept, residual = Rejection(**fields).rule(
        jnp.array([target], jnp.float32),
        None if law is None else jnp.array([law], jnp.float32),
        jnp.array(children, jnp.int32).reshape(1, -1),
    )
    return accept[0].tolist(), residual[0].tolist()


@pytest.mark.parametrize(
    ("target", "law", "children", "accept", "residual"),
    [
        # Equal distributions: every draft is accepted.
        ([0.25, 0.75], [0.25, 0.75], (1,), [1], [0.25, 0.75]),
        # There is no child, or its draft probability is 0.
        ([0.25, 0.75], [0.5, 0.5], (-1,), [0], [0.25, 0.75]),
        ([0.25, 0.75], [1.0, 0.0], (1,), [0], [0.25, 0.75]),
        ([0.25, 0.75], [0.0, 0.0], (1,), [0], [0.25, 0.75]),
        ([0.25, 0.75], None, (-1,), [0], [0.25, 0.75]),
        ([0.25, 0.75], [0.5, 0.5], (), [], [0.25, 0.75]),
        # Target probability 0 is never accepted, 1 always.
        ([0.0, 1.0], [0.5, 0.5], (0,), [0], [0, 1]),
        ([0.0, 1.0], [0.5, 0.5], (1,), [1], [0, 1]),
        ([0.0, 1.0], None, (0, 1), [0, 1], [0, 1]),
        ([0.5, 0.25, 0.25], None, (0, 2), [0.5, 0.5], [0, 1, 0]),
        # By hand: (1/2, 1/4, 1/4) minus (1/4, 3/4, 0) leaves 1/2 on 0 and 1/2 on 2; the
        # draft distribution without 1 is 1 on 0.
        ([0.5, 0.25, 0.25], [0.25, 0.75, 0.0], (1, 0), [1 / 3, 0.5], [0, 0, 1]),
        # A missing child in between has no effect.
        ([0.5, 0.25, 0.25], [0.25, 0.75, 0.0], (1, -1, 0), [1 / 3, 0, 0.5], [0, 0, 1]),
        # The third child has draft probability 0.
        ([0.5, 0.25, 0.25], [0.25, 0.75, 0.0], (1, 0, 2), [1 / 3, 0.5, 0], [0, 0, 1]),
    ],
)
def test_the_rule_by_hand(
    target: Any, law: Any, children: Any, accept: Any, residual: Any
) -> None:
    ruling = ruled(target, law, *children)
    np.testing.assert_allclose(ruling[0], accept, rtol=1e-6)
    np.testing.assert_allclose(ruling[1], residual, rtol=1e-6)


def test_a_duplicate_child_is_rejected_twice() -> None:
    ruling = ruled([0.5, 0.25, 0.25], [0.25, 0.75, 0.0], 1, 1, replacement=True)
    np.testing.assert_allclose(ruling[0], [1 / 3, 0], rtol=1e-6)
    # The residual is 1/2 on 0 and 1/2 on 2, minus 1/4 on 0.
    np.testing.assert_allclose(ruling[1], [1 / 3, 0, 2 / 3], rtol=1e-6)


def test_a_tiny_residual_is_normalised() -> None:
    # Distributions that differ only in their last bits.
    rng = np.random.default_rng(0)
    target = rng.dirichlet(np.ones(1000), 4).astype(np.float32)
    law = np.nextafter(target, rng.choice([0, 1], target.shape).astype(np.float32))
    children = jnp.asarray(np.arange(12, dtype=np.int32).reshape(4, 3))
    accept, residual = Rejection().rule(jnp.asarray(target), jnp.asarray(law), children)
    assert np.isfinite(accept).all()
    assert (np.asarray(accept[:, 0]) > 0.999999).all()
    np.testing.assert_allclose(
        np.asarray(residual, np.float64).sum(axis=1), 1, rtol=1e-5
    )


# Whole verifiers

COMPANY = [
    Sampling(),
    Sampling.greedy(),
    Sampling(top_k=5, temperature=1.5),
    Sampling(top_p=0.9),
    Sampling(top_p=0.95, seed=5),
    Sampling(min_p=0.05, temperature=0.8),
    Sampling.greedy(seed=5),
]
VERIFIERS = {
    "coupled": SharedNoiseVerifier(),
    "rejection": Rejection(),
    "with replacement": Rejection(replacement=True),
    "typical": Typical(),
}


class Rows(NamedTuple):
    """Arguments of a verifier."""

    logits: Any
    children: Any
    law: Any
    params: Params
    positions: Any
    raw: Any


def company(vocab: int = 300, width: int = 3) -> Rows:
    rng = np.random.default_rng(2)
    rows = len(COMPANY)
    logits = rng.normal(size=(rows, vocab)).astype(np.float32) * 3
    law = sampling.probabilities(
        jnp.asarray(logits + rng.normal(size=logits.shape).astype(np.float32)),
        params_of([Sampling()] * rows),
    )
    children = np.argsort(-logits, axis=1)[:, :width].astype(np.int32)
    children[3, 1] = -1
    return Rows(
        logits=jnp.asarray(logits),
        children=jnp.asarray(children),
        law=law,
        params=params_of(COMPANY),
        positions=jnp.asarray(rng.integers(0, 1000, rows).astype(np.int32)),
        raw=jnp.asarray(logits),
    )


def rows_of(tree: Any, rows: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[np.asarray(rows)]), tree)


@functools.cache
def jitted(name: str) -> Any:
    return jax.jit(lambda *arrays: VERIFIERS[name](*arrays))


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_verifier_is_a_value(name: str) -> None:
    verifier = VERIFIERS[name]
    assert isinstance(verifier, Verifier)
    assert verifier == type(verifier)(**vars(verifier))
    assert hash(verifier) == hash(type(verifier)(**vars(verifier)))
    assert verifier.is_lossless == (name != "typical")
    assert len({*VERIFIERS.values()}) == len(VERIFIERS)


@pytest.mark.parametrize(
    ("name", "with_law"),
    [
        ("coupled", False),
        pytest.param("rejection", True, marks=pytest.mark.thorough),
        *(
            pytest.param(name, False, marks=pytest.mark.thorough)
            for name in ("rejection", "with replacement", "typical")
        ),
    ],
)
def test_greedy_rows_are_the_argmax(name: str, with_law: bool) -> None:
    rows = company()
    rows = rows._replace(law=rows.law if with_law else None)
    mixed = jitted(name)(*rows)
    # The second and third are wrong, and -1 is no child.
    children = rows.children.at[:, 2].set(-1)[:, ::-1]
    alone = jitted(name)(
        *rows._replace(children=children, params=greedy_params(len(COMPANY)))
    )
    best = np.argmax(rows.logits, axis=1)
    np.testing.assert_array_equal(alone.token, best)
    np.testing.assert_array_equal(alone.accept, children == best[:, None])
    for row in (1, 6):
        assert mixed.token[row] == best[row]
        assert mixed.accept[row].tolist() == [1, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [300, 49152])
@pytest.mark.parametrize("name", VERIFIERS)
def test_a_ruling_does_not_depend_on_the_batch(name: str, vocab: int) -> None:
    rows = company(vocab)
    rng = np.random.default_rng(1)
    together = jitted(name)(*rows)
    assert not together.invalid.any()
    for chosen in (*([row] for row in range(7)), rng.integers(0, 7, 5), [1, 6]):
        ruling = jitted(name)(*rows_of(rows, chosen))
        for field, other in zip(ruling, together, strict=True):
            np.testing.assert_array_equal(field, np.asarray(other)[np.asarray(chosen)])


@pytest.mark.parametrize(
    "name",
    [
        "coupled",
        "rejection",
        pytest.param("with replacement", marks=pytest.mark.thorough),
        pytest.param("typical", marks=pytest.mark.thorough),
    ],
)
def test_nothing_follows_a_row_that_is_invalid(name: str) -> None:
    rows = company()
    logits = rows.logits.at[0, 3].set(jnp.nan).at[1].set(-jnp.inf)
    raw = logits.at[1].set(0.0).at[2, 7].set(jnp.inf)
    rows = rows._replace(logits=logits, raw=raw, children=rows.children.at[:, 0].set(0))
    ruling = jitted(name)(*rows)
    before = jitted(name)(*company()._replace(children=rows.children))
    assert ruling.invalid.tolist() == [True] * 3 + [False] * 4
    assert ruling.token[:3].tolist() == [0, 0, 0]
    assert not np.asarray(ruling.accept[:3]).any()
    for field, other in zip(ruling, before, strict=True):
        np.testing.assert_array_equal(field[3:], other[3:])


@pytest.mark.parametrize("greedy", [False, True])
def test_shared_noise_gives_the_token_of_plain_decoding(greedy: bool) -> None:
    rows = company()
    if greedy:
        rows = rows._replace(params=greedy_params(len(COMPANY)))
    plain = jax.jit(sampling.sample)(rows.logits, rows.params, rows.positions)
    guesses = jnp.stack([plain.token + 1, plain.token, plain.token - 1], axis=1)
    ruling = jitted("coupled")(*rows._replace(children=guesses))
    np.testing.assert_array_equal(ruling.token, plain.token)
    np.testing.assert_array_equal(ruling.accept, [[0, 1, 0]] * len(COMPANY))


def test_typical_has_two_bounds() -> None:
    """A sharp law has the fixed bound, a flat one that of its entropy."""
    laws = np.array([[0.95, 0.03, 0.02], [0.4, 0.35, 0.25]], np.float32)
    entropy = -(laws * np.log(laws)).sum(1)
    assert 0.5 * np.exp(-entropy[0]) > 0.3 > 0.25 > 0.5 * np.exp(-entropy[1])
    children = jnp.tile(jnp.arange(3, dtype=jnp.int32), (2, 1))
    accept = Typical(epsilon=0.3, delta=0.5).rule(jnp.asarray(laws), children)
    assert accept.tolist() == [[1, 0, 0], [1, 1, 1]]
    accept = Typical(epsilon=0.025, delta=0.5).rule(jnp.asarray(laws), children)
    assert accept.tolist() == [[1, 1, 0], [1, 1, 1]]


@pytest.mark.thorough
def test_typical_equals_numpy() -> None:
    rows = company(vocab=50, width=20)
    verifier = Typical(epsilon=0.04, delta=0.5)
    ruling = jax.jit(lambda *arrays: verifier(*arrays))(*rows)
    plain = jax.jit(sampling.sample)(rows.logits, rows.params, rows.positions)
    np.testing.assert_array_equal(ruling.token, plain.token)
    for row, request in enumerate(COMPANY):
        law = law_slowly(np.asarray(rows.logits[row]), request)
        entropy = -(law[law > 0] * np.log(law[law > 0])).sum()
        bound = min(verifier.epsilon, verifier.delta * np.exp(-entropy))
        children = np.asarray(rows.children[row])
        passes = np.where(children >= 0, law[children], 0) > bound
        assert ruling.accept[row].tolist() == passes.tolist()
        assert request.temperature == 0 or 1 < passes.sum() < 20


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Typical(epsilon=0.0), "epsilon=0.0 must be in (0, 1]"),
        (lambda: Typical(epsilon=1.5), "epsilon=1.5 must be in (0, 1]"),
        (lambda: Typical(delta=np.nan), "delta=nan must be in (0, 1]"),
        (
            lambda: Typical(delta="much"),  # ty: ignore[invalid-argument-type]
            "delta='much' must be a number, in (0, 1]",
        ),
        (
            lambda: Rejection(replacement=1),  # ty: ignore[invalid-argument-type]
            "replacement=1 must be True or False",
        ),
    ],
)
@pytest.mark.usefixtures("no_type_checks")
def test_invalid_settings_are_refused(make: Any, line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        make()


# Drafts


def draw_tokens(num: int, replacement: bool = False, **changes: Any) -> Any:
    rows = company()
    take = functools.partial(draw_drafts, num=num, replacement=replacement)
    return jax.jit(take)(rows.logits, rows.params._replace(**changes), rows.positions)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "replacement", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_drafts_have_their_distribution(replacement: bool) -> None:
    tokens, law = draw_tokens(7, replacement)
    rows = company()
    for row, request in enumerate(COMPANY):
        expected = law_slowly(np.asarray(rows.logits[row]), request)
        np.testing.assert_allclose(law[row], expected, rtol=3e-5, atol=1e-9)
    chances = np.take_along_axis(np.asarray(law), np.asarray(tokens), axis=1)
    assert (chances > 0)[np.asarray(tokens) >= 0].all()
    best = np.argmax(rows.logits, axis=1)
    for row in range(7):
        row_tokens = tokens[row].tolist()
        real_tokens = [token for token in row_tokens if token >= 0]
        held = int((np.asarray(law[row]) > 0).sum())
        if replacement:
            assert len(real_tokens) == 7
            assert row_tokens[0] == draw_tokens(1)[0][row]
        else:
            assert len({*real_tokens}) == len(real_tokens) == min(7, held)
            assert row_tokens[len(real_tokens) :] == [-1] * (7 - len(real_tokens))
    greedy, _ = draw_tokens(7, replacement, temperature=jnp.zeros(7))
    for row in (1, 6):
        assert tokens[row, 0] == best[row]
        np.testing.assert_array_equal(greedy[row], tokens[row])


def test_invalid_numbers_of_drafts_are_refused() -> None:
    for num in (0, 301):
        with pytest.raises(ValueError, match=rf"num={num} must be in \[1, 300\]"):
            draw_tokens(num)


@pytest.mark.thorough
@pytest.mark.parametrize("replacement", [False, True])
def test_pairs_of_drafts_have_their_joint_distribution(replacement: bool) -> None:
    rows = 20_000
    law = np.array([0.4, 0.3, 0.2, 0.1, 0.0])
    params = jax.tree.map(lambda x: jnp.repeat(x, rows, axis=0), params_of([PLAIN]))
    keys = draw_key(params.key, params.sample, jnp.arange(rows, dtype=jnp.int32), DRAFT)
    laws = jnp.asarray(np.tile(law.astype(np.float32), (rows, 1)))
    pick = functools.partial(draws.gumbel_top_k, num=2, replacement=replacement)
    first, second = np.asarray(jax.jit(pick)(laws, keys)).T
    expected = np.zeros((5, 5))
    for (a, b), chance in candidates(law, 2, replacement):
        expected[a, b] += chance
    observed = np.bincount(first * 5 + second, minlength=25)
    assert chi_square(observed, expected.ravel()) > 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize(("width", "replacement"), [(1, False), (3, False), (3, True)])
def test_drafts_verified_by_coin_flips_keep_the_distribution(
    width: int, replacement: bool
) -> None:
    """The whole step, with the noise that the engine uses."""
    rows = 20_000
    vocab = 12
    rng = np.random.default_rng(width)
    logits, guess = rng.normal(size=(2, vocab)).astype(np.float32) * 1.5
    request = Sampling(top_p=0.95)
    verifier = Rejection(replacement=replacement)
    params = jax.tree.map(lambda x: jnp.repeat(x, rows, axis=0), params_of([request]))

    def emit(logits: Any, guess: Any, params: Params, positions: Any) -> Any:
        tokens, law = draw_drafts(
            guess, params, positions, num=width, replacement=replacement
        )
        ruling = verifier(logits, tokens, law, params, positions, logits)
        keys = draw_key(params.key, params.sample, positions, ACCEPT)
        ranks = jnp.arange(width, dtype=jnp.int32)[None, :]
        accepted = sampling.uniform(keys, ranks) < ruling.accept
        which = jnp.argmax(accepted, axis=1)[:, None]
        child = jnp.take_along_axis(tokens, which, axis=1)[:, 0]
        return jnp.where(jnp.any(accepted, axis=1), child, ruling.token), accepted

    both = (jnp.asarray(np.tile(x, (rows, 1))) for x in (logits, guess))
    token, accepted = jax.jit(emit)(*both, params, jnp.arange(rows, dtype=jnp.int32))
    law = law_slowly(logits, request)
    assert chi_square(np.bincount(token, minlength=vocab), law) > 1e-3
    if width == 1:
        # Some of the drafts, as often as the distributions overlap.
        common = np.minimum(law, law_slowly(guess, request)).sum()
        np.testing.assert_allclose(np.mean(accepted), common, atol=0.015)
