"""Numbers of a simulated load: latencies with intervals, throughput, objectives.

Each draw of the coefficients has several factors of its latencies, which include the
discrepancy of the model (`find_latency_factors`). Intervals are over draws and factors.
"""

from statistics import NormalDist
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jaxkv.workloads import SustainedRate, goodput
from scaling.calibration import (
    ENERGY_DISCREPANCY,
    JOULES_PER_KWH,
    POWER_DISCREPANCY,
    LoadSizes,
    ServerRun,
    draw_noise_scales,
    find_latency_factors,
    find_outside_sizes,
    find_run_energy,
    tail_factor,
)
from scaling.cli.simulate.case import REQUESTS_FOR, ServerCase
from scaling.cli.simulate.options import LATENCY_OPTIONS, LatencyObjective

LEVEL = 0.9
"""Probability of intervals."""
PROBABILITIES = (0.9, 0.5, 0.1)
"""Probabilities of the objective at which a sweep reports its rate."""
_NUM_FACTORS = 64
"""Factors of each draw."""
_MEMORY_STEP_S = 0.05
"""Spacing of the times at which memory is read."""


type Samples = Float[np.ndarray, "factors draws"]


class RunSummary:
    """Statistics of a run, and their uncertainty.

    Attributes:
      run: the run.
      num_measured: requests in the window.
      overloaded: True for draws whose queue grows.
      outside: sizes of the load that the fitted stages do not cover.
    """

    def __init__(self, case: ServerCase, run: ServerRun) -> None:
        """Draws the factors of the latencies."""
        values = run.latencies()
        sizes = _find_sizes(
            case, run, float(np.median(values.end_to_end_s.mean(axis=1)))
        )
        self.outside = find_outside_sizes(case.posterior.fitted_sizes, sizes)
        factors = find_latency_factors(case.posterior, case.fitted_model or "", sizes)
        draws = factors.draw(_NUM_FACTORS)
        self._case = case
        self._factors = {
            "e2e": draws[..., 0],
            "ttft": draws[..., 1],
            "tpot": draws[..., 0],
        }
        scales = draw_noise_scales(case.posterior)
        self._scales = dict(zip(LATENCY_OPTIONS, scales.T[[0, 1, 0]], strict=True))
        self.run = run
        self.num_measured = int(run.load.is_measured.sum())
        self.overloaded = run.is_overloaded()
        if case.session is not None:  # a session sends no request before an answer
            self.overloaded = np.zeros_like(self.overloaded)
        self.latencies = dict(
            zip(
                LATENCY_OPTIONS,
                (values.end_to_end_s, values.first_token_s, values.inter_token_s),
                strict=True,
            )
        )

    def samples(self, latency: str, statistic: str) -> Samples | None:
        """Returns samples of a statistic; None if the window has too few requests."""
        if self.num_measured < REQUESTS_FOR[statistic]:
            return None
        values = self.latencies[latency]
        if statistic == "mean":
            per_draw = values.mean(axis=1)
        else:
            percent = float(statistic[1:])
            per_draw = np.percentile(values, percent, axis=1)
            if percent > 50:
                median = np.median(values, axis=1)
                scale = self._scales[latency]
                per_draw = per_draw * tail_factor(
                    per_draw, median, percent / 100, scale
                )
        return per_draw * self._factors[latency]

    def probability(self, objectives: tuple[LatencyObjective, ...]) -> float | None:
        """Returns the share of samples that meet all objectives; None without any.

        An overloaded draw does not meet them.
        """
        if not objectives:
            return None
        met = np.broadcast_to(~self.overloaded, self._factors["e2e"].shape)
        for x in objectives:
            samples = self.samples(x.latency, x.statistic)
            assert samples is not None
            met = met & (samples <= x.limit_s)
        return float(met.mean())

    def goodput(self, objectives: tuple[LatencyObjective, ...]) -> Samples | None:
        """Returns samples of the requests per second within all limits."""
        if not objectives:
            return None
        met = np.ones((1, 1, self.num_measured), bool)
        for x in objectives:
            values = self.latencies[x.latency] * self._factors[x.latency][..., None]
            met = met & (values <= x.limit_s)
        return np.sum(met, axis=-1) / self.run.load.window_s

    def document(self, rate: float) -> dict[str, Any]:
        """Returns the numbers as a JSON document."""
        case = self._case
        load = self.run.load
        fields: dict[str, Any] = {
            "rate_per_s": rate,
            "num_requests": self.num_measured,
            "warm_up_s": load.warm_up_s,
            "window_s": load.window_s,
        }
        for latency in LATENCY_OPTIONS:
            samples = {x: self.samples(latency, x) for x in REQUESTS_FOR}
            fields[f"{latency}_s"] = {
                **{name: _middle(x) for name, x in samples.items()},
                "interval": {name: _interval(x) for name, x in samples.items()},
            }
        finished = self.run.num_finished()
        tokens = self.run.num_tokens()
        good = self.goodput(case.objectives)
        return fields | {
            "requests_per_s": _middle(finished / load.window_s),
            "tokens_per_s": _middle(tokens / load.window_s),
            "goodput": None
            if good is None
            else {"per_s": _middle(good), "interval": {"per_s": _interval(good)}},
            "objective_probability": self.probability(case.objectives),
            "overloaded_share": float(self.overloaded.mean()),
            "memory": self._memory(),
            "usd": self._dollars(finished, tokens),
            "energy": self._energy(),
            "sessions": self._sessions(),
            "outside_fitted": {name: x._asdict() for name, x in self.outside.items()},
        }

    def _dollars(
        self, finished: Int[np.ndarray, " draws"], tokens: Int[np.ndarray, " draws"]
    ) -> dict[str, Any] | None:
        """Returns the price of the window, by answers and by their tokens."""
        price = self._case.usd_per_hour
        if price is None:
            return None
        hours = self.run.load.window_s / 3600
        spent = price * self._case.setup.tensor_parallel * hours
        values = {
            "per_answer": spent / np.maximum(finished, 1),
            "per_million_tokens": 1e6 * spent / np.maximum(tokens, 1),
        }
        return {
            **{name: _middle(x) for name, x in values.items()},
            "interval": {name: _interval(x) for name, x in values.items()},
        }

    def _energy(self) -> dict[str, Any] | None:
        """Returns power and energy; None if the board power is unknown."""
        setup = self._case.setup
        if not setup.device.board_watts:
            return None
        watts, token_joules = find_run_energy(setup, self.run)
        output = np.asarray(self.run.load.workload.output)
        values = {
            "watts": watts,
            "joules_per_token": token_joules,
            "joules_per_answer": token_joules * output.mean(),
            "joules_per_million_tokens": 1e6 * token_joules,
        }
        if (grams := self._case.grams_per_kwh) is not None:
            for name in ("answer", "million_tokens"):
                joules = values[f"joules_per_{name}"]
                values[f"grams_per_{name}"] = joules * grams / JOULES_PER_KWH
        levels = (np.arange(_NUM_FACTORS) + 0.5) / _NUM_FACTORS
        normal = np.array([NormalDist().inv_cdf(x) for x in levels])
        intervals = {}
        for name, draws in values.items():
            spread = POWER_DISCREPANCY if name == "watts" else ENERGY_DISCREPANCY
            intervals[name] = _interval(draws * np.exp(spread * normal)[:, None])
        return {
            **{name: _middle(x) for name, x in values.items()},
            "interval": intervals,
        }

    def _sessions(self) -> dict[str, Any] | None:
        """Returns the times from the first request of a session to its last token."""
        session = self._case.session
        if session is None:
            return None
        shape = len(self.run.arrival_s), int(session.max()) + 1
        begin = np.full(shape, np.inf)
        end = np.full(shape, -np.inf)
        for draw in range(shape[0]):
            np.minimum.at(begin[draw], session, self.run.arrival_s[draw])
            np.maximum.at(end[draw], session, self.run.finish_s[draw])
        values = {"mean": np.mean(end - begin, axis=1)}
        for name in REQUESTS_FOR:
            if name != "mean" and shape[1] >= REQUESTS_FOR[name]:
                values[name] = np.percentile(end - begin, float(name[1:]), axis=1)
        return {
            "num": shape[1],
            "duration_s": {
                **{name: _middle(x) for name, x in values.items()},
                "interval": {name: _interval(x) for name, x in values.items()},
            },
        }

    def memory_curves(
        self,
    ) -> tuple[Float[np.ndarray, " times"], Float[np.ndarray, "draws times"]] | None:
        """Returns times in the window in s, and the share of blocks in use then."""
        start_s = self.run.step_start_s
        used = self.run.step_used_share
        if start_s is None or used is None:
            return None
        load = self.run.load
        num = max(2, int(load.window_s / _MEMORY_STEP_S))
        times = load.warm_up_s + load.window_s * np.arange(num) / num
        at = [np.searchsorted(x, times, side="right") - 1 for x in start_s]
        curves = [row[np.maximum(k, 0)] for row, k in zip(used, at, strict=True)]
        return times, np.stack(curves)

    def _memory(self) -> dict[str, Any]:
        setup = self._case.setup
        memory: dict[str, Any] = {
            "num_blocks": setup.num_kv_blocks,
            "block_size": setup.block_size,
            "mean_share": _middle(self.run.used_share),
            "p99_share": None,
            "peak_share": None,
            "interval": {"mean_share": _interval(self.run.used_share)},
        }
        if (curves := self.memory_curves()) is not None:
            _, used = curves
            shares = {
                "mean_share": used.mean(axis=1),
                "p99_share": np.percentile(used, 99, axis=1),
                "peak_share": used.max(axis=1),
            }
            memory |= {name: _middle(x) for name, x in shares.items()}
            memory["interval"] = {name: _interval(x) for name, x in shares.items()}
        return memory


def _find_sizes(case: ServerCase, run: ServerRun, end_to_end_s: float) -> LoadSizes:
    """Returns the sizes of the measured part of a load."""
    load = run.load
    w = run.load.workload
    prompt = np.asarray(w.prompt)
    if w.context is not None:
        prompt = prompt + np.asarray(w.context)
    rate = load.is_measured.sum() / load.window_s
    return LoadSizes(
        prompt_tokens=float(prompt[load.is_measured].mean()),
        answer_tokens=float(np.asarray(w.output)[load.is_measured].mean()),
        batch=min(rate * end_to_end_s, case.setup.max_num_seqs),
    )


def find_largest_rates(
    rates: tuple[float, ...], probabilities: list[float]
) -> dict[float, SustainedRate]:
    """Returns the largest rate at which the objective has each of `PROBABILITIES`.

    The probability is interpolated linearly between two rates.
    """
    rate_by_level = {}
    for level in PROBABILITIES:
        relation = "is"
        if probabilities[0] < level:
            relation = "below"
        elif min(probabilities) >= level:
            relation = "at least"
        rate = goodput(np.array(rates), np.array(probabilities), share=level)
        rate_by_level[level] = SustainedRate(max(rate, rates[0]), relation)
    return rate_by_level


def _middle(samples: np.ndarray | None) -> float | None:
    return None if samples is None else float(np.median(samples))


def _interval(samples: np.ndarray | None) -> list[float] | None:
    if samples is None:
        return None
    tail = (1 - LEVEL) / 2
    return np.quantile(samples, [tail, 1 - tail]).tolist()
