"""Options of `jaxkv fit CURVES --law schedule`."""

from typing import Annotated

from jaxkv.validation import ConfigRecord, NonNegativeFloat, Range
from scaling.laws import CURVE_LAWS, CurveLaw

ALL_CURVE_LAWS = "schedule"
"""Value of `--law` that fits all laws of curves; the first one predicts."""


class CurveFitConfig(ConfigRecord):
    """Training curves, the laws to fit to them, and the schedules to predict."""

    log: str
    """Table with a row for each step of each curve: step, learning rate, loss; and
    where they differ the size of the model and the name of the curve. The first row of
    a curve is the end of its warm-up."""
    law: str = ALL_CURVE_LAWS
    """schedule for all laws of curves, or names separated by commas; the first one
    predicts."""
    predict: str = ""
    """Table of schedules to predict, with the same columns; losses may be missing."""
    hold_out: str = ""
    """Rule for whole curves to hold out and score, such as 'schedule != "cosine"'."""
    size: str = ""
    """Column of the model size; found by name if not given, like the columns below."""
    curve: str = ""
    """Column of the curve's name."""
    step: str = ""
    """Column of the step."""
    lr: str = ""
    """Column of the learning rate."""
    loss: str = ""
    """Column of the loss."""
    level: Annotated[float, Range(0, 1, "()")] = 0.9
    """Probability of the bands."""
    best_size: NonNegativeFloat = 0.0
    """Model size of the best schedule; 0 is the largest one."""
    best_steps: NonNegativeFloat = 0.0
    """Steps of the best schedule; 0 is the length of the longest curve of this size."""
    peak: NonNegativeFloat = 0.0
    """Peak rate of the best schedule; 0 is the largest rate of the curves."""
    lowest: NonNegativeFloat = 0.0
    """Lowest rate of the best schedule; 0 is that of the curves."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        _ = self.laws

    @property
    def laws(self) -> tuple[CurveLaw, ...]:
        """The laws to fit."""
        laws = {}
        for name in (x.strip() for x in self.law.split(",")):
            if name == ALL_CURVE_LAWS:
                laws |= CURVE_LAWS
            elif name in CURVE_LAWS:
                laws[name] = CURVE_LAWS[name]
            else:
                raise ValueError(
                    f"no law of curves {name!r}; there are {ALL_CURVE_LAWS}, "
                    f"{', '.join(CURVE_LAWS)}"
                )
        return tuple(laws.values())


def names_curve_laws(law: str) -> bool:
    """Returns True if a value of `--law` names laws of curves."""
    return law.split(",")[0].strip() in (ALL_CURVE_LAWS, *CURVE_LAWS)
