"""The command `doctor`: checks this machine, or every node of a Ray cluster, and says what to do."""

import dataclasses
import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gcore_runs.doctor.checks import Finding, check_machine, check_ports, check_token
from gcore_runs.doctor.node_checks import check_nodes
from gcore_runs.doctor.readings import read_machine
from gcore_runs.errors import one_line
from gcore_runs.settings.bounds import Checked, NonNegative
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
    json: bool = False
    """Print the findings as JSON."""


def doctor_command(app: str, args: Sequence[str]) -> None:
    """Check machines and print a line for each check; exit code 1 if one of them is an error."""
    parsed = parse_arguments(DoctorArgs, args, prog=f"{app} doctor")
    given = read_toml(parsed.config) if parsed.config else {}
    address = parsed.ray or given.get("ray", {}).get("address") or os.environ.get("RAY_ADDRESS", "")
    model = parsed.model or given.get("model", "")
    folder = Path(parsed.runs_dir or given.get("runs_dir", "runs"))
    parameters = _parameters(Path(model)) if model else 0
    found = [*_findings(address, folder, expected=parsed.nodes, parameters=parameters)]
    if parsed.json:
        print(json.dumps([{"node": node, **dataclasses.asdict(finding)} for node, finding in found], indent=2))
    else:
        print("\n".join(lines(found)), flush=True)
    if any(finding.verdict == "error" for _, finding in found):
        raise SystemExit(1)


def _parameters(model: Path) -> int:
    from gcore_runs.inputs import check_model, count_parameters

    check_model(model)
    return count_parameters(model)


def _findings(address: str, folder: Path, *, expected: int, parameters: int) -> Iterable[Located]:
    if not address:
        own = read_machine(folder)
        for finding in [*check_machine(own, parameters=parameters), *check_ports(own), *check_token(own)]:
            yield "", finding
        return
    from gcore_controller import ClusterError, check_token as check_access

    try:
        check_access(address)
        from gcore_runs.doctor.cluster import read_cluster

        nodes = read_cluster(address, folder, expected=expected)
    except (ClusterError, ConnectionError) as error:
        advice = "start the head (ray start --head), or give this process its token, or its versions"
        yield "", Finding(check="cluster", verdict="error", found=one_line(error), advice=advice)
        for finding in check_machine(read_machine(folder), parameters=parameters):
            yield "", finding
        return
    for node in nodes:
        for finding in check_machine(node.readings, parameters=parameters) if node.readings else ():
            yield node.name, finding
    ours = platform.python_version()
    for finding in check_nodes(nodes, expected=expected, parameters=parameters, ours=ours):
        yield "", finding


def lines(found: Sequence[Located]) -> list[str]:
    """Return a line for each finding. What is in order on several nodes is one line, with the first node's values."""
    shown: list[str] = []
    groups: dict[tuple[str, ...], list[Located]] = {}
    for node, finding in found:
        is_shared = node and finding.verdict == "ok"
        key = (finding.check,) if is_shared else (finding.check, finding.verdict, finding.found, finding.advice)
        groups.setdefault(("nodes", *key) if node else ("all", *key), []).append((node, finding))
    for group in groups.values():
        names, (_, finding) = [node for node, _ in group if node], group[0]
        where = f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}: " if names else ""
        advice = f"; to do: {finding.advice}" if finding.advice else ""
        shown.append(f"{finding.verdict:8} {finding.check:14} {where}{finding.found}{advice}")
    counts = {verdict: sum(finding.verdict == verdict for _, finding in found) for verdict in ("error", "warning")}
    return [*shown, ", ".join(f"{count or 'no'} {name}{'s' * (count != 1)}" for name, count in counts.items())]
