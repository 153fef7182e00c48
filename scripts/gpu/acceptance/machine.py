"""The machine of a run: ``python -m acceptance.machine DEVICE`` prints it as JSON; and the peak of its GPU."""

import datetime
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acceptance.trial import Trial

ROOT = Path(__file__).parents[3]
"""The repository."""
_PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "tensorstore", "peft", "numpy")
_OTHER_FORMS = {"H100 PCIe": 756e12, "H100 NVL": 835e12}
"""Dense bfloat16 FLOPs per second of NVIDIA's data sheets, of forms slower than the one that gcore-placement has."""
_MATMUL_SIZE = 8192


def describe(device: str) -> dict[str, Any]:
    """Return the machine, its GPU and driver, the versions, the date and the commit."""
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    }
    facts["commit"] = (
        _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD") or "unknown"
    )
    if _output("git", "-C", str(ROOT), "status", "--porcelain"):
        facts["commit"] += ", with changes"
    if device.startswith("cuda"):
        import torch

        properties = torch.cuda.get_device_properties(0)
        facts["device"] = f"{properties.name}, {properties.total_memory / 1e9:.1f} GB"
        facts["driver"] = (
            _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
            or "unknown"
        )
        facts["cuda"] = torch.version.cuda
    else:
        facts["device"] = "cpu"
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts["host"] = (
        f"{len(os.sched_getaffinity(0))} cores, {memory_bytes / 1e9:.0f} GB, {platform.release()}"
    )
    facts["python"] = platform.python_version()
    return facts | {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _output(*command: str) -> str:
    """Return what a command prints; nothing where it is missing or fails."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def matmul_flops_per_s(trial: "Trial") -> float:
    """Measure the FLOPs per second of a large bfloat16 matrix product."""
    import torch

    size = 256 if trial.is_small else _MATMUL_SIZE
    a, b = (torch.randn(size, size, device=trial.device, dtype=torch.bfloat16) for _ in range(2))
    trial.measure_seconds(lambda: [a @ b for _ in range(3)])
    repeats = 10
    seconds = min(trial.measure_seconds(lambda: [a @ b for _ in range(repeats)]) for _ in range(3))
    return 2.0 * size**3 * repeats / seconds


def peak_flops_per_s(trial: "Trial") -> float:
    """Return the dense bfloat16 peak of the GPU by its name, or what a large matrix product reaches, and note which."""
    import torch

    from gcore_placement import Device, PlacementError

    if trial.device.startswith("cuda"):
        name = torch.cuda.get_device_name()
        other = next((flops for form, flops in _OTHER_FORMS.items() if form in name), None)
        try:
            peak = other or Device.matching(name).flops_per_s
        except PlacementError:
            pass
        else:
            trial.note(
                f"Peak: {peak / 1e12:,.0f} TFLOP/s, dense bfloat16, by the data sheet of {name}."
            )
            return peak
    measured = matmul_flops_per_s(trial)
    trial.note(
        f"Peak: unknown by name; {measured / 1e12:,.3g} TFLOP/s are those of a measured matrix product."
    )
    return measured


if __name__ == "__main__":
    print(json.dumps(describe(sys.argv[1])))
