"""The files of deploy/: checked against schemas and our command line, and the Slurm script run with a small Slurm."""

import copy
import importlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gcore_llm.cli import parse_train, parse_train_args
from gcore_llm.learning.dry_run import dry_run
from gcore_placement.cli import main as plan
from gcore_runs.doctor.command import DoctorArgs
from gcore_runs.doctor.readings import TESTED
from gcore_runs.settings.parsing import parse_arguments

ROOT = Path(__file__).parents[2]
QWEN = {
    "model_type": "qwen2",
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "architectures": ["Qwen2ForCausalLM"],
}
"""The shape of Qwen2.5-7B."""
DEPLOY = ROOT / "deploy"
SCHEMA: Any = json.loads(Path(__file__).with_name("rayjob_schema.json").read_text())
DOCUMENTS: list[Any] = list(yaml.safe_load_all((DEPLOY / "rayjob.yaml").read_text()))
JOB, POLICY = DOCUMENTS
CLUSTER = JOB["spec"]["rayClusterSpec"]
GROUPS: list[Any] = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def size_bytes(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def test_the_rayjob_has_the_shape_of_kuberay() -> None:
    for document in DOCUMENTS:
        jsonschema.validate(document, SCHEMA)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["spec", "entryPoint"], "gcore-llm train"),
        (["apiVersion"], "ray.io/v1alpha1"),
        (["spec", "rayClusterSpec", "authOptions", "mode"], "tokens"),
        (["spec", "rayClusterSpec", "headGroupSpec", "rayStartParams", "num-gpus"], 0),
        (
            [
                "spec",
                "rayClusterSpec",
                "workerGroupSpecs",
                0,
                "template",
                "spec",
                "volumes",
                0,
                "emptyDir",
                "sizeLimit",
            ],
            "4GiB",
        ),
    ],
)
def test_the_schema_refuses_mistakes(path: list[Any], value: Any) -> None:
    job = copy.deepcopy(JOB)
    *folders, name = path
    place = job
    for folder in folders:
        place = place[folder]
    place[name] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, SCHEMA)


def test_resources_are_requested_in_full_and_hold_the_shared_memory() -> None:
    for group in GROUPS:
        spec = group["template"]["spec"]
        [container] = spec["containers"]
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert requests == limits
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(mounts.values()) == volumes.keys()
        shm = volumes[mounts["/dev/shm"]]["emptyDir"]
        assert shm["medium"] == "Memory"
        # Ray's object store, of 30 % of the memory, must fit into it.
        assert (
            0.3 * size_bytes(limits["memory"])
            < size_bytes(shm["sizeLimit"])
            < size_bytes(limits["memory"]) / 2
        )
        assert container["image"] == "gcore:cuda"


def test_the_cluster_wants_a_token_and_no_other_pod_reaches_its_ports() -> None:
    assert CLUSTER["authOptions"] == {"mode": "token", "secretName": "gcore-ray-token"}
    assert CLUSTER["rayVersion"] == TESTED["ray"]
    labels = POLICY["spec"]["podSelector"]["matchLabels"]
    assert all(group["template"]["metadata"]["labels"] == labels for group in GROUPS)
    own, dashboard = POLICY["spec"]["ingress"]
    assert own == {"from": [{"podSelector": {"matchLabels": labels}}]}
    assert [port["port"] for port in dashboard["ports"]] == [8265]


def test_the_entrypoint_is_parsed_and_fits_on_the_gpus() -> None:
    app, command, *options = shlex.split(JOB["spec"]["entrypoint"])
    assert (app, command) == ("gcore-llm", "train")
    config = parse_train(options)
    assert config.runtime == "ray"
    [shared] = {
        m["mountPath"]
        for g in GROUPS
        for m in g["template"]["spec"]["containers"][0]["volumeMounts"]
    } - {"/dev/shm"}
    assert all(
        Path(path).is_relative_to(shared)
        for path in (config.runs_dir, config.model, *config.data.train_files)
    )
    gpus = sum(
        group["replicas"]
        * int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
        for group in CLUSTER["workerGroupSpecs"]
    )
    # In turns: each engine is on the devices of ranks.
    assert config.takes_turns
    assert config.trainer.num_processes == gpus
    assert config.rollout.num_processes * config.rollout.tensor_parallel_size == gpus


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """Each instruction's name and text, with continued lines joined."""
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", dockerfile, flags=re.MULTILINE))
    return [
        (line.partition(" ")[0], line.partition(" ")[2])
        for line in joined.splitlines()
        if line.strip()
    ]


def test_the_dockerfile_copies_what_exists_and_installs_what_is_declared() -> None:
    found = instructions((DEPLOY / "Dockerfile").read_text())
    assert {name for name, _ in found} <= {
        "ARG",
        "FROM",
        "RUN",
        "WORKDIR",
        "COPY",
        "ENV",
        "USER",
        "CMD",
    }
    copied = [source for name, text in found if name == "COPY" for source in text.split()[:-1]]
    assert "pyproject.toml" in copied
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    assert all((ROOT / source).exists() and source not in ignored for source in copied)
    # All that the environment is made of is copied.
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^members = \["packages/\*", "apps/\*"\]$', pyproject, flags=re.MULTILINE)
    [sync] = [text for name, text in found if name == "RUN" and text.startswith("uv sync")]
    groups = re.findall(r'--group "?([\w${}]+)', sync)
    assert groups == ["cluster", "${ACCELERATOR}"]
    assert all(
        re.search(rf"^{group} = \[", pyproject, flags=re.MULTILINE)
        for group in ("cluster", "cuda", "cpu")
    )
    [command] = [json.loads(text) for name, text in found if name == "CMD"]
    assert command[0] in {
        script.name for script in importlib.metadata.entry_points(group="console_scripts")
    }
    assert parse_arguments(DoctorArgs, command[2:], prog="doctor") == DoctorArgs()
    assert [text for name, text in found if name == "USER"] == ["gcore"]


SLURM = (DEPLOY / "slurm.sh").read_text()


def test_the_slurm_script_is_bash_and_its_commands_are_parsed() -> None:
    subprocess.run(["bash", "-n", DEPLOY / "slurm.sh"], check=True)
    assert os.access(DEPLOY / "slurm.sh", os.X_OK)
    values = {"$host:$port": "10.0.0.1:20001", "$SLURM_NNODES": "2", "$@": ""}
    commands = [
        shlex.split(line)[1:] for line in SLURM.splitlines() if line.startswith("gcore-llm ")
    ]
    doctor, train = ([values.get(word, word) for word in command] for command in commands)
    parsed = parse_arguments(DoctorArgs, doctor[1:], prog="doctor")
    assert (doctor[0], parsed) == ("doctor", DoctorArgs(ray="10.0.0.1:20001", nodes=2))
    [example] = re.findall(r"^#   sbatch deploy/slurm.sh (.*)$", SLURM, flags=re.MULTILINE)
    config = parse_train([*filter(None, train[1:]), *shlex.split(example)])
    assert (train[0], config.runtime, config.ray.address) == ("train", "ray", "10.0.0.1:20001")


PAGE = (ROOT / "docs/on-a-cluster.md").read_text()


def page_commands() -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    # One of them is in a shell of its own, so that only its file is private.
    lines = [
        line.removeprefix("(umask 077; ").removesuffix(")")
        for block in blocks
        for line in block.splitlines()
    ]
    return [shlex.split(line) for line in lines]


def test_commands_of_the_page_are_parsed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the programs that they call; the settings are those that the page shows."""
    scripts = importlib.import_module("ray.scripts.scripts")
    [settings] = re.findall(r"^```toml\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "run.toml").write_text(settings)
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    parsed: list[str] = []
    for program, *arguments in page_commands():
        own = [
            {"run.toml": str(tmp_path / "run.toml")}.get(argument, argument)
            for argument in arguments
        ]
        match program, own:
            case "gcore-llm", ["doctor", *options]:
                parse_arguments(DoctorArgs, options, prog="doctor")
            case "gcore-llm", ["train", *options]:
                config = parse_train(options)
                assert config.ray.address == "HEAD:6379"
                assert (
                    config.rollout.num_processes * config.rollout.tensor_parallel_size
                    == config.trainer.num_processes
                )
                train_args = parse_train_args(options)
                if train_args.dry_run:
                    dry_run(replace(train_args, model=str(tmp_path)))
                    assert capsys.readouterr().out.splitlines()[-1] == "fits"
            case "gcore-placement", own:
                plan(
                    [
                        str(tmp_path / "config.json") if a.startswith("/shared/models") else a
                        for a in own
                    ]
                )
                assert "H100" in capsys.readouterr().out
            case "ray", [command, *options]:
                parse: Any = getattr(scripts, command.replace("-", "_"))
                parse.make_context(
                    command, options[: options.index(">")] if ">" in options else options
                )
            case _:
                continue
        parsed.append(program)
    assert {program: parsed.count(program) for program in parsed} == {
        "ray": 3,
        "gcore-llm": 4,
        "gcore-placement": 1,
    }


def test_files_that_commands_of_the_page_name_exist() -> None:
    named = {
        argument
        for command in page_commands()
        for argument in command
        if argument.startswith("deploy/")
    }
    assert named == {"deploy/Dockerfile", "deploy/rayjob.yaml", "deploy/slurm.sh"}
    assert all((ROOT / name).is_file() for name in named)
    secret = CLUSTER["authOptions"]["secretName"]
    assert any(
        command[:5] == ["kubectl", "create", "secret", "generic", secret]
        for command in page_commands()
    )
    image = GROUPS[0]["template"]["spec"]["containers"][0]["image"]
    assert any(command[:1] == ["docker"] and image in command for command in page_commands())
    [arguments] = [command[2:] for command in page_commands() if command[:1] == ["sbatch"]]
    assert parse_train(arguments).reward == "math-verify"


# Slurm on one machine: two nodes, whose steps are processes here.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = "#!/usr/bin/env bash\nprintf 'node-0\\nnode-1\\n'\n"


@pytest.mark.slow
def test_the_slurm_script_runs_on_two_nodes(tmp_path: Path, own_args: list[str]) -> None:
    """Ray's head and worker are started with a token, the doctor checks both, and the run is complete."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("RAY_A", "SLURM"))
    }
    environment |= {
        "PATH": f"{tmp_path}{os.pathsep}{environment['PATH']}",
        "HOME": str(tmp_path),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node-[0-1]",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_GPUS_ON_NODE": "0",
        # Not 30 % of a machine that others use, too.
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(100 << 20),
    }
    log = tmp_path / "log"
    with log.open("w") as out:
        command = ["bash", DEPLOY / "slurm.sh", *own_args[1:], "--trainer.num-processes", "2"]
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, start_new_session=True
        )
        try:
            code = process.wait(timeout=600)
        finally:
            with suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
    said = log.read_text()
    assert code == 0, said
    assert "nodes          2 nodes: " in said
    assert "ray token      required by the cluster" in said
    assert "\nno errors, " in said
    assert (tmp_path / "runs/default/report.html").is_file()
    assert not list(tmp_path.glob(".ray-token-*"))
    shutil.rmtree(tmp_path / "runs")
