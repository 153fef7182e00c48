"""The files of deploy/: checked against schemas and our command line, and the Slurm script run with a small Slurm."""

import copy
import importlib
import importlib.metadata
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from command_line import option_set, step_rows
from tiny_jobs import HOLDING

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
        (
            [
                "spec",
                "rayClusterSpec",
                "headGroupSpec",
                "template",
                "spec",
                "containers",
                0,
                "image",
            ],
            "gcore:cuda@sha256:12",
        ),
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
    # A label of this job alone.
    assert labels == {"gcore-job": JOB["metadata"]["name"]}
    assert POLICY["metadata"]["name"] == JOB["metadata"]["name"]
    assert all(group["template"]["metadata"]["labels"] == labels for group in GROUPS)
    own, dashboard = POLICY["spec"]["ingress"]
    assert own == {"from": [{"podSelector": {"matchLabels": labels}}]}
    assert [port["port"] for port in dashboard["ports"]] == [8265]


def test_pods_have_no_rights_that_they_do_not_need() -> None:
    """And a user who may write to the volume; Kueue starts all of them or none."""
    [uid] = re.findall(r"useradd --uid (\d+)", (DEPLOY / "Dockerfile").read_text())
    for group in GROUPS:
        spec = group["template"]["spec"]
        assert spec["automountServiceAccountToken"] is False
        user = spec["securityContext"]
        assert user["runAsNonRoot"]
        assert user["runAsUser"] == user["fsGroup"] == int(uid)
        assert user["seccompProfile"] == {"type": "RuntimeDefault"}
        security = spec["containers"][0]["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"]["drop"] == ["ALL"]
    assert JOB["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "gcore"}
    # Kueue admits no other.
    assert JOB["spec"]["shutdownAfterJobFinishes"]
    [workers] = CLUSTER["workerGroupSpecs"]
    [container] = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["rdma/rdma_shared_device_a"] == "1"
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]


def test_kernels_are_compiled_once() -> None:
    """On the volume that all nodes share; the names are those that Triton, torch and vLLM read."""
    for group in GROUPS:
        [container] = group["template"]["spec"]["containers"]
        variables = {entry["name"]: entry["value"] for entry in container["env"]}
        for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT"):
            assert variables.pop(name).startswith("/shared/cache/")


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
    values = {"$host:$port": "10.0.0.1:20001", "$SLURM_NNODES": "2", "$@": "", "&": ""}
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


# Slurm on one machine: two nodes, whose steps are processes here. The head is started as the RayJob starts its own,
# without a GPU; the other node has one, as far as Ray knows.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
[[ " $* " == *" --head "* ]] && set -- "$@" $HEAD_PARAMS
exec "$@"
"""
# A job that is queued again has its nodes at once: the same command continues on the cluster that is still there, and
# after it the RayJob's command is run.
SCONTROL = """#!/usr/bin/env bash
case $1 in
  show) printf 'node-0\\nnode-1\\n' ;;
  requeue)
    echo "queued again: $2"
    rm hold
    gcore-llm train --runtime ray $TRAIN_ARGS
    echo "continued: $?"
    $ENTRYPOINT
    echo "the RayJob: $?"
    ;;
esac
"""


def rayjob_command(args: list[str]) -> list[str]:
    """The entrypoint, with the files and the shape of a small job, and engines for one CPU each."""
    command = shlex.split(JOB["spec"]["entrypoint"])
    changes = {"--runs-dir": "runs", "--device": "cpu", "--rollout.engine": "hf"}
    changes["--rollout.tensor-parallel-size"] = "1"
    for name in ("--model", "--data.train-files", "--reward"):
        changes[name] = args[args.index(name) + 1]
    for name, value in changes.items():
        command = option_set(command, name, value)
    return [*command, "--threads", "1", *args[args.index("--data.train-batch-size") :]]


@pytest.fixture(scope="module")
def job(own_args: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, int]:
    """The folder, the output and the exit code of a job that gets the signal of its time limit in its second step."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "holding.py").write_text(HOLDING)
    job_id = os.getpid()
    args = option_set(own_args[1:], "--reward", "holding.py:reward")
    args = option_set(args, "--trainer.total-training-steps", "4")
    args += ["--trainer.num-processes", "2"]
    hosts = subprocess.check_output(["hostname", "--all-ip-addresses"], text=True).split()
    address = f"{hosts[0]}:{20_000 + job_id % 10_000}"
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / ".venv").symlink_to(sys.prefix)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM"))
    }
    head_params = CLUSTER["headGroupSpec"]["rayStartParams"]
    environment |= {
        "PATH": f"{folder}{os.pathsep}{environment['PATH']}",
        "HOME": str(folder),
        "HEAD_PARAMS": " ".join(f"--{name}={value}" for name, value in head_params.items()),
        "TRAIN_ARGS": " ".join(["--ray.address", address, *args]),
        "ENTRYPOINT": " ".join(["env", f"RAY_ADDRESS={address}", *rayjob_command(own_args)]),
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": str(job_id),
        "SLURM_JOB_NODELIST": "node-[0-1]",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_GPUS_ON_NODE": "1",
        # Others use this machine, too: by default workers give way to them, and the store takes 30 % of the memory.
        "RAY_worker_niceness": "0",
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(100 << 20),
    }
    log = folder / "log"
    metrics = folder / "runs/default/metrics.jsonl"
    with log.open("w") as out:
        process = subprocess.Popen(
            ["bash", DEPLOY / "slurm.sh", *args],
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            while process.poll() is None and not (metrics.exists() and step_rows(metrics.parent)):
                time.sleep(0.02)
            (folder / "hold").touch()
            process.send_signal(signal.SIGUSR1)
            code = process.wait(timeout=600)
        finally:
            with suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
    return folder, log.read_text(), code


@pytest.mark.slow
def test_the_slurm_script_runs_on_two_nodes(job: tuple[Path, str, int]) -> None:
    """Ray's head and worker are started with a token, and the doctor checks both."""
    folder, out, _ = job
    assert "nodes          2 nodes: " in out, out
    assert "ray token      required by the cluster" in out
    assert "\nno errors, " in out
    assert not list(folder.glob(".ray-token-*"))


@pytest.mark.slow
def test_a_slurm_job_saves_before_its_time_is_over_and_continues(
    job: tuple[Path, str, int],
) -> None:
    """SIGUSR1 ends the step; the finished ones are saved, and the same command continues after them."""
    folder, out, code = job
    assert code == 130, out
    before, _, after = out.partition(f"queued again: {os.getpid()}\n")
    assert (
        "gcore-llm: interrupted; the same command continues from the last finished step" in before
    )
    assert re.search(r"resuming after step [1-3] of 4", after), out
    assert "continued: 0\n" in after, out
    assert [row["step"] for row in step_rows(folder / "runs/default")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_the_entrypoint_runs_on_a_cluster_whose_head_has_no_gpu(job: tuple[Path, str, int]) -> None:
    """With the numbers of the RayJob, of which the cluster has capacity for a part, and ranks in turns with engines."""
    folder, out, _ = job
    assert "the cluster has capacity for" in out, out
    assert "the RayJob: 0\n" in out, out
    assert (folder / "runs/grpo/report.html").is_file()
