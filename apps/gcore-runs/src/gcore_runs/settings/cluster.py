"""The Ray cluster that settings name: whether it answers, and which devices its nodes have."""

import logging
import os
import re
import socket
from collections.abc import Generator
from contextlib import contextmanager

from gcore_controller import ClusterError, check_token, count_cluster_gpus
from gcore_runs.errors import UserError
from gcore_runs.settings.sections import RayConfig


def cluster_address(settings: RayConfig) -> str:
    """Return the address of the cluster in the settings, or of RAY_ADDRESS; empty: a new one on this machine."""
    return settings.address or os.environ.get("RAY_ADDRESS", "")


def check_cluster(settings: RayConfig) -> None:
    """Check the address and the token before anything is started; `UserError` if no cluster accepts them."""
    read_variables(settings)
    address = cluster_address(settings)
    parts = re.fullmatch(r"(?:ray://)?(.+):(\d+)", address)
    if parts is None:
        return
    try:
        socket.create_connection((parts[1], int(parts[2])), timeout=10.0).close()
    except OSError as error:
        raise UserError(
            f"ray.address is {address!r}: no Ray cluster answers there ({error}); expected HOST:PORT of its head, or "
            "an empty address for a new cluster on this machine"
        ) from error
    # Ray's own messages about processes that die: a run reports each in one line.
    logging.getLogger("ray").setLevel(logging.ERROR)
    with translate_refusals(address):
        check_token(address)


def resolve_device(device: str, settings: RayConfig) -> str:
    """Return cuda or cpu for auto: the device of the cluster's nodes, which this machine may not have.

    Nodes that join later do not change it.
    """
    address = cluster_address(settings)
    if device != "auto":
        return device
    with translate_refusals(address):
        return "cuda" if count_cluster_gpus(address) > 0 else "cpu"


def read_variables(settings: RayConfig) -> dict[str, str]:
    """Return the variables of the environment that the processes of the cluster get; `UserError` if one is not set."""
    missing = [name for name in settings.env if name not in os.environ]
    if missing:
        raise UserError(
            f"ray.env holds {missing[0]!r}; expected names of variables that are set for this command"
        )
    return {name: os.environ[name] for name in settings.env}


@contextmanager
def translate_refusals(address: str) -> Generator[None]:
    """Raise `UserError` where a cluster does not accept this process, or where none answers."""
    try:
        yield
    except ClusterError as error:
        raise UserError(f"ray.address is {address!r}: {error}") from None
    except (ConnectionError, ValueError) as error:
        raise UserError(
            f"ray.address is {address!r}: no Ray cluster answers there ({error})"
        ) from error
