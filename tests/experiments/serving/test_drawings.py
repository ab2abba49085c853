"""Lengths, loads and step times that the papers draw."""

import numpy as np
import pytest

from experiments.serving.latency_vs_rate import drawings, settings
from jaxkv.workloads import LatencyCurve
from scaling.costs import linear_cost


@pytest.mark.parametrize(
    ("data", "prompt", "output"),
    [("ShareGPT", 161.31, 337.99), ("Alpaca", 19.31, 58.45)],
)
def test_drawn_lengths_have_the_printed_means(
    data: str, prompt: float, output: float
) -> None:
    law = drawings.drawn_law(data, settings.DATASETS[data])
    assert law.prompt.mean == pytest.approx(prompt, rel=0.015)
    assert law.output.mean == pytest.approx(output, rel=0.005)
    assert law.max_length == settings.MAX_LENGTH


def test_figure_12a_reaches_half_a_second_where_it_is_drawn() -> None:
    """Read off the figure by eye: Orca (Oracle) 1.1, the paged system 1.93."""
    curves = drawings.drawn_curves("12a")
    assert drawings.drawn_rate(curves["Orca (Oracle)"], 0.5) == pytest.approx(1.1, 0.01)
    assert drawings.drawn_rate(curves["paged"], 0.5) == pytest.approx(1.93, 0.01)
    assert np.isnan(drawings.drawn_rate(curves["paged"], 9.0))


def test_steps_follow_from_latencies_without_a_queue() -> None:
    """Latencies of a server with 30 ms and 0.2 ms a sequence give these two back."""
    token_s, prompt_s, waiting = 1e-6, 1e-4, 0.03
    rates = np.array([1.0, 5.0, 10.0, 20.0])
    step_s = np.full(4, 0.03)
    for _ in range(100):
        running = rates * 60 * step_s
        step_s = 0.03 + (2e-4 + token_s * 80) * running + prompt_s * 20 * rates * step_s
    cost = linear_cost((1.0, prompt_s, 1.0), (1.0, token_s, 1.0), scale=1.0)
    load = drawings.LowLoad(rates, step_s * (1 + waiting), 20.0, 60.0, 80.0, waiting)
    new_cost = drawings.fit_steps(load, cost)
    np.testing.assert_allclose(new_cost.decode, [0.03, token_s, 2e-4], rtol=1e-4)
    np.testing.assert_allclose(new_cost.prefill, [0.03, prompt_s, 0.0], rtol=1e-4)


def test_points_with_a_queue_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    curves = {
        "Orca (Max)": LatencyCurve(np.array([1.0, 2.0]), np.array([0.03, 0.04])),
        "paged": LatencyCurve(np.array([3.0, 4.0]), np.array([0.035, 0.09])),
        "FasterTransformer": LatencyCurve(np.array([0.1]), np.array([0.01])),
    }
    monkeypatch.setattr(drawings, "drawn_curves", lambda panel: dict(curves))
    load = drawings.low_load("12d", settings.DATASETS["Alpaca"])
    assert load.rates.tolist() == [1.0, 3.0]
