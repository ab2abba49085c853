"""What `jaxkv plan` is asked, looked up and checked: law, offers, and the budget."""

import contextlib
import difflib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

from experiments.cli.plan.command import MOST, Options
from experiments.framework import config_json
from scaling.fits import FitResult
from scaling.fits.fit import from_json
from scaling.laws import Law, Optimum, TwoPowers, published
from scaling.logs import files
from scaling.plan import Family, HalfLives, Offer, budgets, designs, pricing

DAY_S = 86_400.0
USUAL = {"vocab_size": 32_000, "sequence": 4096}
"""Of architectures, where neither the options nor a sweep say otherwise."""
_SHAPE = {"vocab_size": int, "sequence": int, "tie_embeddings": bool}


class Belief(NamedTuple):
    """What is believed of losses.

    Attributes:
      name: of the constants, or the file.
      law: the law.
      coefficients: by name.
      powers: how it falls with parameters and tokens.
      half_lives: of repeated data.
      fit: it comes from, or None for published constants.
      count: which parameters it counts; None where it does not say.
      doubts: about the log behind it, in sentences.
      shape: what its runs have in common, as `folder.shape` gives it.
    """

    name: str
    law: Law
    coefficients: Mapping[str, float]
    powers: TwoPowers
    half_lives: HalfLives
    fit: FitResult | None = None
    count: designs.Count | None = None
    doubts: tuple[str, ...] = ()
    shape: Mapping[str, int | bool] = MappingProxyType({})


class Case(NamedTuple):
    """What is asked, looked up and checked.

    Attributes:
      options: as given.
      belief: of losses.
      offers: of devices.
      offer: the best of them, or None where none is given.
      flops: the budget, as operations at the training's utilisation.
      served: tokens to serve, weighted with how much worse serving uses devices.
      family: of the architectures, with what N counts.
    """

    options: Options
    belief: Belief
    offers: tuple[Offer, ...]
    offer: Offer | None
    flops: float
    served: float
    family: Family

    @property
    def rate(self) -> float | None:
        """Operations per second of one device, as training uses it."""
        return None if self.offer is None else self.offer.flops_per_s * self.options.mfu

    def loss(self, num_params: Any, num_tokens: Any) -> Any:
        """The loss that is believed, repetition included."""
        return budgets.loss(self.belief.powers, *self.worth(num_params, num_tokens))

    def worth(self, num_params: Any, num_tokens: Any) -> tuple[Any, Any]:
        """Parameters and tokens, less what repetition takes."""
        unique, belief = self.options.unique_tokens, self.belief
        if unique is None:
            return num_params, num_tokens
        halves = belief.half_lives
        return budgets.effective(belief.powers, halves, num_params, num_tokens, unique)

    def allocate(self) -> Optimum:
        """The best division of the budget."""
        powers, unique = self.belief.powers, self.options.unique_tokens
        serving = {"inference_tokens": self.served}
        if unique is None:
            return budgets.allocate(powers, self.flops, **serving)
        return budgets.allocate_repeating(
            powers, self.belief.half_lives, self.flops, unique, **serving
        )

    def needed(self) -> float:
        """The smallest budget that reaches the loss that is asked for.

        Raises:
          ValueError: none does.
        """
        assert self.options.target_loss is not None
        halves, unique = self.belief.half_lives, self.options.unique_tokens
        return budgets.needed(
            self.belief.powers,
            self.options.target_loss,
            inference_tokens=self.served,
            repeating=None if unique is None else (halves, unique),
        )


def look_up(options: Options) -> Case:
    """Reads the law and the offers, chooses the device, and counts the budget."""
    offers = tuple(map(_offer, options.gpu))
    offer = pricing.best(offers, options.mfu) if offers else None
    flops = _flops(options, offer)
    belief = read_law(options.law, options.group)
    served = options.inference_tokens
    if options.serve_mfu is not None:
        served *= options.mfu / options.serve_mfu
    if served > MOST:
        raise ValueError(
            f"serving takes {served:.4g} tokens' worth: more than {MOST:g}"
        )
    case = Case(
        options=options,
        belief=belief,
        offers=offers,
        offer=offer,
        flops=flops,
        served=served,
        family=_family(options, belief),
    )
    if options.target_loss is not None:
        try:
            case = case._replace(flops=case.needed())
        except ValueError as error:
            raise ValueError(
                f"--target-loss {options.target_loss:g} by {belief.name}: {error}"
            ) from None
    if case.flops > MOST:
        line = f"a budget of {case.flops:.4g} FLOPs is too large for any design"
        raise ValueError(line)
    return case


def _family(options: Options, belief: Belief) -> Family:
    """What all architectures share: what was asked, or else as in the fitted runs."""
    asked = {name: getattr(options, name) for name in USUAL}
    given = {name: value for name, value in asked.items() if value is not None}
    sizes: dict[str, Any] = {**USUAL, **belief.shape, **given}
    return Family(
        vocab_size=sizes["vocab_size"],
        sequence=sizes["sequence"],
        tie_embeddings=options.tie_embeddings or sizes.get("tie_embeddings", False),
        count=options.count or belief.count or "total",
        attention=options.attention,
    )


def read_law(name: str, group: str | None = None) -> Belief:
    """Finds published constants, or reads a fit.

    Args:
      name: of the constants, of a fit.json, or of a folder that holds one.
      group: which of the fits to read, where a log was fitted by groups.

    Raises:
      ValueError: there is none, or it has no compute optimum.
    """
    if group is not None and (name in published.CONSTANTS or not Path(name).exists()):
        raise ValueError(f"--group {group}: --law {name} is no fit of groups")
    if name in published.CONSTANTS:
        return believe(name, published.CHINCHILLA, published.CONSTANTS[name])
    path = Path(name)
    if not path.exists():
        if name in published.LAWS:
            raise ValueError(
                f"--law {name} has no published constants here: fit it with "
                f"`jaxkv fit`, or take one of: {', '.join(published.CONSTANTS)}"
            )
        raise ValueError(_unknown_law(name))
    path = path / "fit.json" if path.is_dir() else path
    try:
        document = _of_group(_json(path), group)
        fit = from_json(document)
        found = believe(str(path), fit.find_law(), fit.coefficients)
        if not {"num_params", "num_tokens"} <= {*fit.inputs}:
            raise ValueError(f"a fit to {', '.join(fit.inputs)}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--law {path}: {error}") from None
    count, shape = document.get("count"), document.get("shape", {})
    known = get_args(designs.Count.__value__)
    if not isinstance(shape, dict) or any(
        type(shape[name]) is not _SHAPE.get(name) for name in shape
    ):
        raise ValueError(f"--law {path}: {shape=} must hold numbers of {[*_SHAPE]}")
    doubts = document.get("log_warnings", [])
    if not isinstance(doubts, list) or not all(isinstance(x, str) for x in doubts):
        raise ValueError(f"--law {path}: log_warnings must be sentences")
    if document.get("by"):
        found = found._replace(name=f"{path} ({document['by']} {document['group']})")
    return found._replace(
        fit=fit,
        count=count if count in known else None,
        doubts=tuple(doubts),
        shape=shape,
    )


def _unknown_law(name: str) -> str:
    """Says that there is no such law, and what comes near: a law, or a file beside."""
    path = Path(name)
    is_path = "/" in name or name.endswith(".json")
    known = [] if is_path else [*published.CONSTANTS, *published.LAWS]
    with contextlib.suppress(OSError):
        known += [str(path.parent / x) for x in os.listdir(path.parent)]
    line = f"--law {name}: {'' if is_path else f'unknown law {name!r}, '}"
    line += "no such file or folder"
    if near := difflib.get_close_matches(name, known):
        return f"{line}; did you mean {' or '.join(near)}?"
    return line if is_path else f"{line}; one of: {', '.join(published.CONSTANTS)}"


def _json(path: Path) -> Any:
    try:
        return json.loads(files.read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"not a fit.json: {error}") from None
    except RecursionError:
        raise ValueError("not a fit.json: nested too deeply") from None


def _of_group(document: Any, group: str | None) -> Any:
    """Chooses the fit of a group, where a log was fitted by groups.

    Raises:
      ValueError: there are several and none is named, or it is not there.
    """
    if not isinstance(document, dict) or not document.get("by"):
        if group is not None:
            raise ValueError(f"--group {group}: it is no fit of groups (fit --by)")
        return document
    fits = [document, *document.get("others", [])]
    known = [*dict.fromkeys(str(fit.get("group")) for fit in fits)]
    if group is None and len(known) > 1:
        raise ValueError(
            f"it has a law for each {document['by']}; --group {known[0]}, or one of: "
            f"{', '.join(known)}"
        )
    if group is not None and group not in known:
        raise ValueError(config_json.unknown("--group", group, known))
    chosen = known[0] if group is None else group
    return document | next(fit for fit in fits if str(fit.get("group")) == chosen)


def believe(name: str, law: Law, coefficients: Mapping[str, Any]) -> Belief:
    """Reads a belief off a law's coefficients.

    Raises:
      ValueError: they are no numbers, or have no compute optimum.
    """
    for key, value in coefficients.items():
        if not isinstance(value, int | float):
            raise ValueError(f"{law.name} with {key}={value!r}, no number")
    half_lives = budgets.MUENNIGHOFF
    if law.name == "data-constrained":
        half_lives = HalfLives(coefficients["R_D"], coefficients["R_N"])
        if not min(half_lives) > 0:
            raise ValueError("R_D and R_N must be positive")
    powers = budgets.two_powers(law, coefficients)
    return Belief(name, law, coefficients, powers, half_lives)


def device_seconds(case: Case, flops: float) -> float | None:
    """Time of one device for so many operations of training."""
    return None if case.rate is None else flops / case.rate


def price(case: Case, device_s: float | None) -> float | None:
    """What so much time of one device costs."""
    if case.offer is None or case.offer.usd_per_hour is None or device_s is None:
        return None
    return device_s / pricing.HOUR_S * case.offer.usd_per_hour


def division(case: Case, device_s: float | None) -> tuple[int | None, float | None]:
    """How many devices train for how long, where one of the two is given."""
    options = case.options
    if device_s is None:
        return options.devices, None if options.days is None else options.days * DAY_S
    if options.devices is not None:
        return options.devices, device_s / options.devices
    if options.days is None:
        return None, None
    # What is a whole number but for rounding shall not need one device more.
    number = max(1, math.ceil(device_s / (options.days * DAY_S) * (1 - 1e-12)))
    return number, device_s / number


def _offer(text: str) -> Offer:
    try:
        return pricing.parse(text)
    except ValueError as error:
        raise ValueError(f"--gpu {error}") from None


def _flops(options: Options, offer: Offer | None) -> float:
    """Counts the budget as operations."""
    both_times = options.days is not None and options.devices is not None
    given = {
        "--budget-usd": options.budget_usd is not None,
        "--flops": options.flops is not None,
        "--days with --devices": both_times,
        "--target-loss": options.target_loss is not None,
    }
    names = [name for name, is_given in given.items() if is_given]
    if not names:
        raise ValueError(f"which budget? One of: {', '.join(given)}")
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)}; which is the budget?")
    if options.flops is not None:
        return options.flops
    if options.target_loss is not None:
        return math.nan  # until the law says
    if offer is None:
        raise ValueError(f"{names[0]} needs --gpu NAME:USD_PER_HOUR:TFLOPS")
    if options.budget_usd is not None:
        return options.budget_usd * offer.flops_per_usd(options.mfu)
    assert options.days is not None
    assert options.devices is not None
    seconds = options.days * DAY_S * options.devices
    return seconds * offer.flops_per_s * options.mfu
