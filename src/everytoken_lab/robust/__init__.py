"""Robustness and generalisation: shifted test sets, corruptions, adversarial attacks, transfer, in one table.

    result = everytoken_lab.robust.robustness("runs/first", suite=("val=photos/val", "corrupt"), severities=(1, 3, 5))
    print(result.table)

Nothing heavy is imported until something is done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Interval

from everytoken._lazy import lazy
from everytoken_lab.engine.options import NotNegative, Positive
from everytoken_lab.evaluation import InferenceOptions

if TYPE_CHECKING:
    from everytoken_lab.robust.run import robustness

__getattr__, __dir__ = lazy(__name__, {"everytoken_lab.robust.run": ["robustness"]})
__all__ = ["RobustOptions", "robustness"]

Progress = Callable[..., None]
"""Called with the model and suite, the number of images done, the total, and the current attack if there is one."""


@dataclass(frozen=True, kw_only=True)
class RobustOptions(InferenceOptions):
    """What a model is tested on, and how."""

    suite: tuple[str, ...] = ()
    """What to test on: NAME=FOLDER ...; corrupt, attack and real use val's folder by default."""
    compare: str = ""
    """A second model to compare with, by paired differences."""
    limit: NotNegative = 0
    """Images per suite, chosen by a hash of their names; 0: all."""
    restrict: bool = False
    """Restrict predictions to the data's classes (always the case for the 200 classes of a and r)."""
    real: str = ""
    """ReaL labels (real.json) for the suite `real`; default: timm's copy."""
    corruptions: tuple[str, ...] = ("standard",)
    """standard (all 15), noise, blur, weather, digital, or names."""
    severities: tuple[Annotated[int, Interval(ge=1, le=5)], ...] = (1, 2, 3, 4, 5)
    """Severities to test, 1 to 5."""
    attack: Literal["autoattack", "apgd-ce", "apgd-t", "fab-t", "square"] = "autoattack"
    """AutoAttack, or one of its attacks."""
    eps: tuple[str, ...] = ("4/255",)
    """Sizes of the perturbation (L-infinity) for pixels from 0 to 1."""
    attack_limit: NotNegative = 0
    """Images to attack; 0: the same as limit."""
    attack_steps: Positive = 100
    """Steps of APGD and FAB."""
    queries: Positive = 5000
    """Queries of Square."""
    targets: Positive = 9
    """Target classes of targeted attacks."""
