"""Metrics of the speed and the memory of training, under verl's names."""

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
"""Dense bfloat16 FLOPs per second, by a part of the device's name; more specific names come first."""


def speed(flops: float, seconds: float, *, num_devices: int, device: str) -> dict[str, float]:
    """Return the model FLOPs per second and device and, if the device's peak is known, the fraction of it (MFU).

    Args:
        flops: of forward and backward passes, without recomputation.
        seconds: the time they took.
        num_devices: number of devices that computed them.
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
    """Return the peak memory of this process so far, in GB: of the host and, on CUDA, of the device."""
    metrics = {"perf/max_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}
    if device.startswith("cuda"):
        import torch

        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device) / 1e9
    return metrics
