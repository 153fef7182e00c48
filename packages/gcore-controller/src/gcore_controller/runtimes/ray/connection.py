"""Connecting to a Ray cluster, with its token."""

import os
import re
import socket
from typing import Any

import ray

# Private, because Ray has no public way to ask whether it would be let in, or to pass a token to `ray.init`.
from ray._private.authentication.authentication_token_setup import (
    ensure_token_if_auth_enabled,
    maybe_enable_token_auth_if_token_available,
)
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
from ray.exceptions import AuthenticationError, RayError

from gcore_controller.errors import ClusterError

_CONNECT_TIMEOUT_S = 10.0
_HOST_AND_PORT = re.compile(r"[^/]+:\d+")


def connect(address: str | None = None, **options: Any) -> None:
    """Connect this process to a cluster by `ray.init`, with a token if there is one.

    Ray by itself leaves the token aside where the address is given, and retries for 20 seconds when it is refused.

    Args:
        address: As `ray.init` takes it; None: what RAY_ADDRESS names, or a new cluster on this machine.
        options: Other arguments of `ray.init`.

    Raises:
        ClusterError: The cluster requires a token and this process has none, or a wrong one.
        ConnectionError: No cluster answers at the address.
    """
    check_token(address)
    ray.init(address=address, **options)


def check_token(address: str | None = None) -> None:
    """Ask a cluster whether it accepts this process, and use the token from here on if the cluster requires one.

    Raises:
        ClusterError: See `connect`.
        ConnectionError: No cluster answers at the address.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    if address is None or not _HOST_AND_PORT.fullmatch(address):
        return
    host, _, port = address.rpartition(":")
    try:
        # Ray would try again for 40 seconds.
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConnectionError(f"no Ray cluster answers at {address!r}: {error}") from error
    try:
        ensure_token_if_auth_enabled(create_token_if_missing=False)
        try:
            GcsClient(address=address)
        except AuthenticationError:
            # Only now: processes of a cluster without a token could not call one that expects it.
            if not maybe_enable_token_auth_if_token_available(warn_if_disabled=False):
                raise
            GcsClient(address=address)
    except AuthenticationError as error:
        raise ClusterError(f"the Ray cluster at {address!r} does not accept this process: {_token(error)}") from None
    except RayError as error:
        raise ConnectionError(f"what answers at {address!r} is no Ray cluster: {error}") from error


def _token(error: AuthenticationError) -> str:
    """Return in words what is wrong with the token, and what is expected."""
    mode = os.environ.get("RAY_AUTH_MODE", "").lower()
    if "RAY_AUTH_TOKEN_PATH" in str(error.message):
        found = error.message
    elif mode not in ("", "token"):
        found = f"RAY_AUTH_MODE is {mode!r}, so no token was sent"
    elif not mode or "no authentication token" in error.message:
        found = "it has no token"
    else:
        found = f"the token in {_source()} is not the cluster's"
    return (
        f"{found}; expected the token that the cluster was started with (`ray get-auth-token` on its head prints it) "
        "in RAY_AUTH_TOKEN, in the file that RAY_AUTH_TOKEN_PATH names, or in ~/.ray/auth_token, with RAY_AUTH_MODE "
        "unset or 'token'"
    )


def _source() -> str:
    if "RAY_AUTH_TOKEN" in os.environ:
        return "RAY_AUTH_TOKEN"
    return os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
