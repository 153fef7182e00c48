"""The command `doctor`: checks this machine, or every node of a Ray cluster, and says what to do."""

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gcore_runs.doctor.all_reduce import time_all_reduce
from gcore_runs.doctor.checks import Finding, check_machine, check_ports, check_token, judge
from gcore_runs.doctor.node_checks import check_nodes
from gcore_runs.doctor.readings import read_machine
from gcore_runs.logs import one_line
from gcore_runs.settings.checks import Checked, NonNegative
from gcore_runs.settings.parsing import parse_arguments, read_toml

Located = tuple[str, Finding]
"""The name of a node, empty for the machine or the whole cluster, and a finding."""


@dataclass(frozen=True, kw_only=True)
class DoctorArgs(Checked):
    """Check this machine, or every node of a Ray cluster, before a run; exit code 1 if there is an error."""

    ray: str = ""
    """HOST:PORT of a Ray cluster's head, whose nodes are checked; empty: that of RAY_ADDRESS, or this machine alone."""
    nodes: NonNegative = 0
    """How many nodes the cluster is to have; they may take a minute to join."""
    model: str = ""
    """Folder of the model that is to be trained: memory, disk and object stores are compared with its size."""
    runs_dir: str = ""
    """Folder of runs; empty: runs."""
    config: str = ""
    """TOML file of a run: model, runs_dir and ray.address are those of it where they are not given."""
    all_reduce_ranks: NonNegative = 0
    """How many processes of each node take part in a timed all-reduce, on CPU where there are no GPUs; 0: one a GPU."""
    json: bool = False
    """Print the findings as JSON."""


def doctor_command(app: str, args: Sequence[str]) -> None:
    """Check machines and print a line for each check; exit code 1 if one of them is an error."""
    parsed = parse_arguments(DoctorArgs, args, prog=f"{app} doctor")
    values = read_toml(parsed.config) if parsed.config else {}
    address = (
        parsed.ray or values.get("ray", {}).get("address") or os.environ.get("RAY_ADDRESS", "")
    )
    model = parsed.model or values.get("model", "")
    folder = Path(parsed.runs_dir or values.get("runs_dir", "runs"))
    parameters = 0
    if model:
        from gcore_runs.inputs import check_model, count_parameters

        check_model(Path(model))
        parameters = count_parameters(Path(model))
    findings = _findings(address, folder, parsed, parameters=parameters)
    if parsed.json:
        print(
            json.dumps(
                [{"node": node, **dataclasses.asdict(finding)} for node, finding in findings],
                indent=2,
            )
        )
    else:
        print("\n".join(lines(findings)), flush=True)
    if any(finding.verdict == "error" for _, finding in findings):
        raise SystemExit(1)


def _findings(address: str, folder: Path, args: DoctorArgs, *, parameters: int) -> list[Located]:
    machine = read_machine(folder)
    own = check_machine(machine, parameters=parameters)
    if not address:
        own += [*check_ports(machine), *check_token(machine)]
        num_ranks = args.all_reduce_ranks or machine.torch_gpus
        if num_ranks > 1:
            own.append(time_all_reduce(num_ranks))
        return _locate("", own)
    from gcore_controller import ClusterError, check_token as check_access

    try:
        check_access(address)
        from gcore_runs.doctor.cluster import read_cluster

        nodes = read_cluster(address, folder, expected=args.nodes, num_ranks=args.all_reduce_ranks)
    except (ClusterError, ConnectionError) as error:
        advice = (
            "start the head (ray start --head), or give this process its token, or its versions"
        )
        return _locate("", [judge("cluster", one_line(error), error=advice), *own])
    located: list[Located] = []
    for node in nodes:
        if not node.error:
            located += _locate(node.name, check_machine(node.readings, parameters=parameters))
    together = check_nodes(nodes, expected=args.nodes, parameters=parameters, ours=machine)
    return located + _locate("", together)


def _locate(node: str, findings: Iterable[Finding]) -> list[Located]:
    return [(node, finding) for finding in findings]


def lines(findings: Sequence[Located]) -> list[str]:
    """Return a line for each finding. What is in order on several nodes is one line, with the first node's values."""
    groups: dict[tuple[bool, Finding | str], list[Located]] = {}
    for node, finding in findings:
        key = finding.check if node and finding.verdict == "ok" else finding
        groups.setdefault((bool(node), key), []).append((node, finding))
    texts: list[str] = []
    for group in groups.values():
        names = [node for node, _ in group if node]
        finding = group[0][1]
        text = f"{finding.verdict:8} {finding.check:14} "
        if names:
            text += ", ".join(names[:3])
            text += f" and {len(names) - 3} more: " if len(names) > 3 else ": "
        text += finding.found
        if finding.advice:
            text += f"; to do: {finding.advice}"
        texts.append(text)
    counts = Counter(finding.verdict for _, finding in findings)
    parts = [
        f"{counts[verdict] or 'no'} {verdict}{'s' * (counts[verdict] != 1)}"
        for verdict in ("error", "warning")
    ]
    return [*texts, ", ".join(parts)]
