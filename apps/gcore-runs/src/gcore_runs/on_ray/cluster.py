"""The connection of a run to its cluster, with errors that name the setting."""

import logging
import os
import re
import socket

import ray
from ray._private import worker as ray_worker

from gcore_controller import ClusterError, SizedConfig, check_token, connect as connect_with_token
from gcore_runs.errors import UserError

_CONNECT_TIMEOUT_S = 10.0


def check_cluster(config: SizedConfig) -> None:
    """Check the address and the token before anything is started.

    Raises:
        UserError: no cluster answers at the address, or it does not accept this process's token.
    """
    found = re.fullmatch(r"(?:ray://)?(.+):(\d+)", _address(config))
    if found is None:
        return
    try:
        socket.create_connection((found[1], int(found[2])), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise UserError(
            f"ray.address is {_address(config)!r}: no Ray cluster answers there ({error}); expected HOST:PORT of "
            "its head, or an empty address for a new cluster on this machine"
        ) from error
    _quiet()
    try:
        check_token(_address(config))
    except ClusterError as error:
        raise UserError(f"ray.address: {error}") from None
    except ConnectionError as error:
        raise UserError(f"ray.address: {error}") from error


def _address(config: SizedConfig) -> str:
    return config.ray.address or os.environ.get("RAY_ADDRESS", "")


def connect(config: SizedConfig) -> None:
    """Connect to the cluster of the config or of RAY_ADDRESS, or start one on this machine that is large enough."""
    _quiet()
    setattr(ray_worker, "_worker_logs_enabled", False)  # noqa: B010 - private, and Ray has no other way
    if address := _address(config):
        try:
            connect_with_token(address, log_to_driver=False, logging_level=logging.ERROR)
        except ClusterError as error:
            raise UserError(f"ray.address: {error}") from None
        except (ConnectionError, ValueError) as error:
            raise UserError(f"ray.address is {address!r}: no Ray cluster answers there ({error})") from error
        return
    num_cpus = max(os.cpu_count() or 1, round(config.sizes.num_processes * config.ray.cpus_per_process + 0.5))
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


def _quiet() -> None:
    """Silence Ray's own messages about processes that die; a run reports each in one line."""
    logging.getLogger("ray").setLevel(logging.ERROR)
