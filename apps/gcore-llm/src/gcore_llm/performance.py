"""How fast and how large training is, under verl's names."""

import resource

PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
}
"""Dense bfloat16 FLOPs a second, by a part of the device's name; more special names first."""


def speed(flops: float, seconds: float, *, num_devices: int, device: str) -> dict[str, float]:
    """Achieved model FLOPs a second and device, and, where the device's peak is known, their share of it (MFU).

    Args:
        flops: of forward and backward passes, recomputation not counted.
        seconds: they took.
        num_devices: that worked on them.
        device: as torch names it.
    """
    achieved = flops / max(seconds, 1e-9) / num_devices
    metrics = {"perf/tflops/actor": achieved / 1e12}
    if device.startswith("cuda"):
        import torch

        name = torch.cuda.get_device_name(device)
        peak = next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
        if peak is not None:
            metrics["perf/mfu/actor"] = achieved / peak
    return metrics


def memory(device: str) -> dict[str, float]:
    """The most memory that this process has used so far, in GB: of the host and, on CUDA, of the device."""
    metrics = {"perf/max_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}
    if device.startswith("cuda"):
        import torch

        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device) / 1e9
    return metrics
