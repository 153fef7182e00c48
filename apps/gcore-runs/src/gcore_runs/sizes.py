"""Checks of the numbers of processes that settings ask for."""

from gcore_controller import Sizes as Sizes
from gcore_runs.errors import UserError


def check_engines(num_processes: int, *, controllers: int) -> None:
    """Check that each controller has an engine of the policy; 0 engines stand for as many as controllers.

    Raises:
        UserError: there are fewer engines than controllers.
    """
    if 0 < num_processes < controllers:
        raise UserError(
            f"rollout.num_processes is {num_processes} and controllers is {controllers}; expected on ray at least one "
            "for each controller, or 0, which is that"
        )


def check_judges_in_turns(judges: int, *, engines: int, setting: str) -> None:
    """Check that there are as many judges as engines, whose devices they share; 0 stands for as many.

    Raises:
        UserError: the numbers differ.
    """
    if judges not in (0, engines):
        raise UserError(
            f"placement.strategy is 'colocated' and {setting} is {judges}; expected rollout.num_processes = {engines}, "
            "or 0, which is that"
        )
