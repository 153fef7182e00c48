"""The ports that processes of a run listen on are those of the table in docs/on-a-cluster.md."""

import ipaddress
import socket

import psutil
import pytest
from command_line import Cli


def listening(pid: int) -> set[tuple[str, str]]:
    """Address of each socket on which a process or one that it started listens, and the process's name."""
    found: set[tuple[str, str]] = set()
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            sockets = process.net_connections("tcp")
        except psutil.Error:
            continue
        found |= {(s.laddr.ip, process.name()) for s in sockets if s.status == psutil.CONN_LISTEN}
    return found


@pytest.mark.slow
def test_ranks_and_engines_of_one_machine_listen_to_it_alone(cli: Cli, own_args: list[str]) -> None:
    options = [
        "--trainer.num-processes",
        "2",
        "--rollout.num-processes",
        "2",
        "--trainer.prometheus",
        "19464",
    ]
    command = cli.start(*own_args, *options)
    found: set[tuple[str, str]] = set()
    while not command.has_ended(0.3):
        found |= listening(command.pid)
    finished = command.wait()
    assert finished.code == 0, finished
    assert found, "the exporter and gloo listen"
    assert {ip for ip, _ in found if not ipaddress.ip_address(ip).is_loopback} == set(), found


def test_the_rendezvous_of_ranks_on_ray_is_on_the_address_of_the_node_alone() -> None:
    """As `TrainingRank` opens it: torch by itself would listen on all interfaces."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented, not in __all__

    before = {s.laddr for s in psutil.Process().net_connections("tcp")}
    with socket.create_server(("127.0.0.2", 0)) as own:
        host, port = own.getsockname()
        store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=own.detach()
        )
    opened = [
        s.laddr for s in psutil.Process().net_connections("tcp") if s.status == psutil.CONN_LISTEN
    ]
    assert [tuple(address) for address in opened if address not in before] == [(host, port)]
    store.set("key", "value")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=1.0)
