"""Schedules of the learning rate, and the best one by a law."""

import numpy as np
import pytest

from scaling.curves import ScheduleFrame, best_schedule, cosine_schedule, wsd_schedule
from scaling.laws import CURVE_LAWS, MULTI_POWER_CONSTANTS, RateSchedule, curve_losses
from tests.support.refusals import refused

FRAME = ScheduleFrame(num_steps=24000.0, warmup_steps=2000.0, peak=3e-4, lowest=3e-5)
LAW = CURVE_LAWS["multi-power"]
COEFFICIENTS = MULTI_POWER_CONSTANTS["100M"]


def test_schedules_have_the_frame_and_their_shape() -> None:
    for schedule in (cosine_schedule(FRAME), wsd_schedule(FRAME, 0.2)):
        assert schedule.step[0] == 2000
        assert schedule.step[-1] == 24000
        assert schedule.rate[0] == pytest.approx(3e-4)
        assert schedule.rate[-1] == pytest.approx(3e-5)
        assert (np.diff(schedule.rate) <= 1e-18).all()
    middle = np.interp(13000, *cosine_schedule(FRAME))
    assert middle == pytest.approx(1.65e-4)
    wsd = wsd_schedule(FRAME, 0.2)
    assert np.interp(24000 - 0.21 * 22000, *wsd) == pytest.approx(3e-4)
    assert np.interp(24000 - 0.1 * 22000, *wsd) == pytest.approx(1.65e-4, rel=0.02)


def test_no_falling_schedule_beats_the_best_one() -> None:
    best = best_schedule(LAW, COEFFICIENTS, FRAME)
    assert best.loss == pytest.approx(
        curve_losses(LAW, COEFFICIENTS, best.schedule)[-1], rel=1e-12
    )
    assert best.loss < min(best.other_losses.values())
    cosine = curve_losses(LAW, COEFFICIENTS, cosine_schedule(FRAME))[-1]
    assert best.other_losses["cosine"] == pytest.approx(cosine, rel=1e-12)
    assert (np.diff(best.schedule.rate) <= 0).all()
    assert best.schedule.rate.max() <= FRAME.peak * (1 + 1e-12)
    assert best.schedule.rate.min() >= FRAME.lowest * (1 - 1e-12)
    # Powers of a linear fall over any share of the run, and changes of the best one.
    rng = np.random.default_rng(0)
    share = np.linspace(0, 1, best.schedule.step.size)
    for _ in range(300):
        fall = np.clip((1 - share) / rng.uniform(0.05, 1), 0, 1) ** rng.uniform(0.3, 3)
        other = FRAME.lowest + (FRAME.peak - FRAME.lowest) * fall
        mixture = rng.choice([1.0, 0.1, 0.01])
        rate = (1 - mixture) * best.schedule.rate + mixture * other
        schedule = RateSchedule(best.schedule.step, rate)
        assert curve_losses(LAW, COEFFICIENTS, schedule)[-1] > best.loss - 2e-5


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"peak": 0.0}, "peak=0.0 must be in (0, inf)"),
        ({"warmup_steps": 24000.0}, "warmup_steps=24000 must be in (0, 24000)"),
        ({"lowest": 3e-4}, "lowest=0.0003 must be in (0, 0.0003)"),
    ],
)
def test_bad_frames_are_refused(change: dict[str, float], line: str) -> None:
    with refused(line):
        best_schedule(LAW, COEFFICIENTS, FRAME._replace(**change))
