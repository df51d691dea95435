"""What must hold in a simulated run: after each turn of the engine, and once nothing is left to do."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.cluster import Simulation


def check_turn(run: "Simulation") -> None:
    """Check what must hold whenever the engine has planned."""


def check_quiet(run: "Simulation") -> None:
    """Check what must hold once all requests have ended and no fault comes any more."""
    if run.failure is not None:
        raise run.failure
