"""Every place that opens a port, or unpickles what another process has sent, is known, and where it is documented."""

import re
from collections.abc import Iterator
from pathlib import Path

from house import DISTRIBUTIONS, ROOT, relative

PAGE = ROOT / "docs/on-a-cluster.md"

LISTENS = re.compile(
    r"\bcreate_server\(|\bstart_server\(|\bstart_http_server\(|(?<!signature)\.bind\(|\bHTTPServer\(|\bListener\(|\bTCPStore\(|\bTCPSite\("
)
PORTS = {
    "packages/gcore-agents/src/gcore_agents/server.py": "the endpoint of agents",
    "packages/gcore-controller/src/gcore_controller/runtimes/ray/trainer_group.py": "rendezvous (torch's TCPStore)",
    "packages/gcore-rollout/src/gcore_rollout/engines/servers/local_server.py": "an SGLang server that the run starts",
    "apps/gcore-runs/src/gcore_runs/doctor/cluster.py": "`gcore-llm doctor --ray`",
    "apps/gcore-runs/src/gcore_runs/trackers/prometheus.py": "metrics for Prometheus",
}
"""Files that listen on a port, and their row in the table of sockets."""

UNPICKLES = re.compile(
    r"\bpickle\.loads?\(|\bUnpickler\(|\btorch\.load\(|broadcast_object_list\(|\ball_gather_object\(|\.recv\(\)"
)
PICKLES = {
    "packages/gcore-ckpt/src/gcore_ckpt/tools/dcp.py": "a file, by an unpickler that makes records alone",
    "packages/gcore-ckpt/src/gcore_ckpt/tools/torch_file.py": "a file, with weights_only",
    "packages/gcore-controller/src/gcore_controller/runtimes/local.py": "a pipe",
    "packages/gcore-rollout/src/gcore_rollout/engines/remote/fork_server.py": "a socket pair",
    "packages/gcore-rollout/src/gcore_rollout/engines/remote/session.py": "a socket pair, or a call of Ray",
    "packages/gcore-rollout/src/gcore_rollout/engines/remote/ray_actor.py": "a call of Ray",
    "packages/gcore-rollout/src/gcore_rollout/engines/remote/ray_engine.py": "a call of Ray",
    "packages/gcore-rollout/src/gcore_rollout/rewards/process.py": "a socket pair",
    "packages/gcore-rollout/src/gcore_rollout/weight_sync/shared_weights.py": "a socket pair",
    "packages/gcore-rollout/src/gcore_rollout/images/models.py": "a file, with weights_only",
    "packages/gcore-trainer/src/gcore_trainer/megatron/architecture.py": "torch.distributed",
    "packages/gcore-trainer/src/gcore_trainer/megatron/pieces.py": "torch.distributed",
    "packages/gcore-trainer/src/gcore_trainer/megatron/trainer.py": "torch.distributed",
    "packages/gcore-trainer/src/gcore_trainer/trainer.py": "torch.distributed",
}
"""Files that unpickle, and from where: nothing from a port of `PORTS`."""


def places(pattern: re.Pattern[str]) -> Iterator[str]:
    for each in DISTRIBUTIONS:
        if each.name != "gcore-bench":
            yield from (relative(path) for path in each.files() if pattern.search(path.read_text()))


def test_what_listens_is_in_the_table() -> None:
    found = set(places(LISTENS))
    assert found == PORTS.keys(), "enter it in PORTS, and in the table of docs/on-a-cluster.md"
    table = PAGE.read_text().partition("## Sockets")[2]
    assert [row for row in PORTS.values() if row not in table] == []


def test_what_unpickles_reads_from_no_port_of_ours() -> None:
    found = set(places(UNPICKLES))
    assert found == PICKLES.keys(), (
        "enter it in PICKLES; a message from a port without authentication must not be"
    )
    assert [path for path in PORTS if path in PICKLES] == []


def test_the_files_are_there() -> None:
    assert all(Path(ROOT / path).is_file() for path in [*PORTS, *PICKLES])
