"""Comparison of speculative methods: metrics from counts, and claims."""

import types
from typing import Any

import numpy as np
import pytest

from experiments.decoding.speculation import held_out, serving
from experiments.decoding.speculation.on_text import DecodingRuns
from experiments.decoding.speculation_zoo import experiment
from experiments.decoding.speculation_zoo.experiment import CONFIGS, Config, Result
from jaxkv.progress import QUIET
from jaxkv.text import ByteTokenizer
from tests.support import smoke
from tests.support.mutation import replace

STUDY = experiment.STUDY


def rows(*ways: tuple[str, int, int, int, float], rounds: int = 3) -> DecodingRuns:
    """Returns methods of 100 steps: drafts, batch, tokens, and cost of a step."""
    plain = np.full(rounds, 1e-3)
    return DecodingRuns.of(
        (
            method,
            num,
            batch,
            0.0,
            100,
            emitted,
            100 * num,
            80,
            cost * plain,
            plain,
            9,
            0,
        )
        for method, num, batch, emitted, cost in ways
    )


def test_claims_on_counts_and_times() -> None:
    ways = rows(
        ("n-gram", 4, 1, 300, 2.0),
        ("Medusa, chain", 4, 1, 200, 2.0),
        ("Medusa, tree", 8, 1, 250, 5.0),
        ("EAGLE, chain", 2, 1, 240, 2.0),
    )
    adaptive = rows(
        ("n-gram, adaptive", 4, 1, 200, 1.0), ("n-gram, adaptive", 4, 8, 100, 2.0)
    )
    zoo_result = Result(ways, adaptive, output_tokens=200, device="cpu")
    ours = smoke.measured_values(experiment.claims(zoo_result))

    def measured(words: str) -> float:
        [value] = [value for claim, value in ours.items() if words in claim]
        return value

    assert measured("no method changes a token of 54") == 0
    assert measured("geometric mean") == pytest.approx(1.0)
    assert measured("worst case") == pytest.approx(0.5)
    assert measured("more than 75 %") == pytest.approx(1.2)
    assert measured("trees against chains") == pytest.approx(1.25)
    assert measured("prompt lookup") == 3.0
    assert measured("EAGLE: ") == 2.4
    assert len(experiment.summary(zoo_result)) == 2
    assert smoke.draw(STUDY, zoo_result)


def test_an_empty_run_has_no_claims() -> None:
    nothing = Result(
        DecodingRuns.of([]), DecodingRuns.of([]), output_tokens=200, device="cpu"
    )
    assert experiment.summary(nothing) == []
    assert [*experiment.claims(nothing)] == []
    assert smoke.draw(STUDY, nothing)


def test_batches_are_whole() -> None:
    class Tokens:
        def encode(self, text: str) -> list[int]:
            return [*text.encode()]

        def decode(self, tokens: list[int]) -> str:
            return bytes(tokens).decode(errors="replace")

    config = Config()
    for batch in config.batches:
        texts, asks = config.requests(Tokens(), (batch, 1.0))
        assert len(texts) == len(asks) == max(8, batch)
        assert {len(text) for text in texts} == {config.prompt_tokens}
        assert len({ask.seed for ask in asks}) == len(asks)


class AdaptingServer:
    """A server with one more step in every turn, each of two tokens."""

    def __init__(self, method: str, bounds: Any):
        self.way = method
        self.turn = 0
        self.name = f"{method} {bounds.max_drafts}"
        self.served = []


def test_adaptive_counts_are_means_over_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everyone = []

    def serve(method: str, bounds: Any) -> Any:
        everyone.append(AdaptingServer(method, bounds))
        return everyone[-1]

    def decode(server: AdaptingServer, texts: list[Any], asks: list[Any]) -> Any:
        server.turn += server.way != serving.PLAIN_DECODING
        server.served.append(len(texts))
        num = 10 + server.turn
        counts = serving.DecodeCounts(num, 2 * num, 3 * num, 4 * num, 0.5, 10)
        return [[7] for _ in texts], counts

    replace(monkeypatch, serving, "decode_batches", decode)
    model: Any = types.SimpleNamespace(tokenizer=ByteTokenizer(256))
    ways = [("n-gram", 4), ("n-gram, adaptive", 4)]
    rows = held_out.decode_in_turns(
        Config(), model, [(1, 0.0)], lambda _: ways, QUIET, rounds=3, serve=serve
    )
    runs = DecodingRuns.of(rows)
    # The first turn compiles; adaptive methods also adapt in it, so they get all texts.
    assert [one.served for one in everyone] == [[1, 8, 8, 8]] * 2 + [[8] * 4]
    assert runs.steps.tolist() == [13, 13]
    assert runs.emitted.tolist() == [26, 26]
    np.testing.assert_allclose(runs.speed, 2.0)
    assert runs.num_tokens.tolist() == [8, 8]


@pytest.mark.slow
def test_tokens_equal_those_of_plain_decoding() -> None:
    result: Any = smoke.run("speculation_zoo").result
    smallest = CONFIGS["smoke"]
    assert result.ways.way.tolist() == [method for method, _ in smallest.ways]
    assert result.adaptive.batch.tolist() == [2]
    for runs in (result.ways, result.adaptive):
        assert (runs.num_tokens == 80).all()
        assert (runs.num_other == 0).all()
    assert (result.ways.drafted > 0).all()
