"""Clusters: devices by their data sheets, the shares of these that programs reach, and the links between devices."""

import csv
import re
from dataclasses import dataclass, fields
from importlib.resources import files

import numpy as np

from gcore_placement.errors import refusal
from gcore_placement.quantities import (
    Above0,
    Amount,
    CheckedQuantities,
    Floats,
    Positive,
    Share,
    check_above_0,
    check_known,
)


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, by its peaks, all above 0; `Efficiency` has the shares of these that programs reach.

    Example:
        >>> device = Device.matching("NVIDIA H100 80GB HBM3")
        >>> device.name
        'H100'
        >>> device.memory_bytes / 1e9
        80.0
        >>> device.memory_bytes < Device.named("H200").memory_bytes
        True
    """

    name: str
    memory_bytes: float
    flops_per_s: float
    """Dense bfloat16 peak."""
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """Bytes per second to the other devices of its node, one way."""
    host_bytes_per_s: float
    """Bytes per second to the host's memory, one way."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "name":
                check_above_0(f"{self.name}.{field.name}", getattr(self, field.name))

    @classmethod
    def named(cls, name: str) -> "Device":
        """Return the device of DEVICES with this name; PlacementError if there is none."""
        check_known("device", name, DEVICES)
        return DEVICES[name]

    @classmethod
    def matching(cls, full_name: str) -> "Device":
        """Return the device for a driver's name such as `NVIDIA H100 80GB HBM3`; PlacementError if there is none.

        Of several, it is the one with most words: `NVIDIA A100-SXM4-40GB` is A100-40GB and not A100.
        """
        names = [
            name for name in DEVICES if all(_is_word(word, full_name) for word in name.split("-"))
        ]
        if not names:
            raise refusal("device", full_name, f"a name that holds one of {', '.join(DEVICES)}")
        return DEVICES[max(names, key=lambda name: name.count("-"))]

    @classmethod
    def of_memory(cls, name: str, memory_bytes: float) -> "Device":
        """Return a device with all rates 1, for plans of memory alone."""
        rates = dict.fromkeys(
            ("flops_per_s", "memory_bytes_per_s", "link_bytes_per_s", "host_bytes_per_s"), 1.0
        )
        return cls(name=name, memory_bytes=memory_bytes, **rates)


def _is_word(word: str, text: str) -> bool:
    """Return whether a word is in a text, which may have spaces between its letters and its digits."""
    parts = re.findall(r"[A-Za-z]+|\d+", word)
    return re.search(rf"\b{' ?'.join(parts)}\b", text) is not None


def _read_devices() -> dict[str, Device]:
    text = files("gcore_placement").joinpath("devices.csv").read_text(encoding="utf-8")
    devices: dict[str, Device] = {}
    for row in csv.DictReader(text.splitlines()):
        devices[row["name"]] = Device(
            name=row["name"],
            memory_bytes=float(row["memory_gb"]) * 1e9,
            flops_per_s=float(row["tflops"]) * 1e12,
            memory_bytes_per_s=float(row["memory_tb_per_s"]) * 1e12,
            link_bytes_per_s=float(row["link_gb_per_s"]) * 1e9,
            host_bytes_per_s=float(row["host_gb_per_s"]) * 1e9,
        )
    return devices


DEVICES = _read_devices()
"""NVIDIA's data sheets, of the SXM form where there is one; of the RTX cards, A6000 and A40 the white papers of GA102
(2.1), Ada (2.1) and RTX Blackwell. Bfloat16 with float32 sums, without sparsity; NVLink and PCIe at half of the two-way
rate that the sheets give, and NVLink-C2C, which two GB200 share, at a quarter; GB are 10^9 bytes, which leaves the
surplus of the real chips to the driver. Cards without NVLink between all of a node are linked by PCIe: bridges over
pairs of A6000, A40 and RTX3090 are not counted, nor that GeForce cards have no direct access to each other and copy
through the host's memory."""


@dataclass(frozen=True, kw_only=True)
class Cluster(CheckedQuantities):
    """Devices of one kind in nodes.

    Example:
        >>> cluster = Cluster(num_devices=24, device=Device.named("H100"))
        >>> cluster.sizes()
        [24, 16, 8, 7, 6, 5, 4, 3, 2, 1]
        >>> cluster.link_bytes_per_s(8) / 1e9
        450.0
        >>> cluster.link_bytes_per_s(16) / 1e9
        50.0
    """

    num_devices: Positive
    device: Device
    devices_per_node: Positive = 8
    inter_node_bytes_per_s: Above0 = 50e9
    """Bytes per second of each device to other nodes, one way: a 400 Gb/s adapter for each."""
    host_memory_bytes: Above0 = 200e9
    """Host memory per device, for weights and states that leave the device."""

    def sizes(self) -> list[int]:
        """Return the numbers of devices that a job may use, largest first: whole nodes, or part of one node.

        They are among those of any larger cluster, so more devices never make a plan worse.
        """
        parts = range(1, min(self.num_devices + 1, self.devices_per_node))
        nodes = range(self.devices_per_node, self.num_devices + 1, self.devices_per_node)
        return [*parts, *nodes][::-1]

    def num_nodes(self, num_devices: int) -> int:
        """Return the number of nodes that so many neighbouring devices are on."""
        return -(-num_devices // self.devices_per_node)

    def link_bytes_per_s(self, group_size: int) -> float:
        """Return the rate of each device in a group of neighbours: within a node where the group fits into one."""
        if group_size <= self.devices_per_node:
            return self.device.link_bytes_per_s
        return min(self.inter_node_bytes_per_s, self.device.link_bytes_per_s)


ADAMW_TRAFFIC_BYTES = 28
"""AdamW reads weight, gradient and two moments, and writes all but the gradient."""


@dataclass(frozen=True, kw_only=True)
class Efficiency(CheckedQuantities):
    """The shares of their data sheets that devices reach, and the overheads of programs.

    The defaults are common values: Megatron trains at 40 to 50 % of the peak (arXiv 2104.04473 and the tables
    of its repository); engines read memory at about three quarters of its rate.

    Example:
        >>> efficiency = Efficiency(free_memory=0.9, links=0.5)
        >>> efficiency.usable_bytes(Device.named("H100")) / 1e9
        72.0
        >>> cluster = Cluster(num_devices=8, device=Device.named("H100"))
        >>> round(gather_seconds(cluster, efficiency, size_bytes=16e9, group_size=8), 4)
        0.0622
    """

    training: Share = 0.45
    """Share of the peak in training's matrix products."""
    experts: Share = 0.2
    """Share of the peak in training's products of a mixture's experts, which have few rows each. Megatron-Core's tables
    of pretraining have about a fifth of an H100's peak; trainers with small micro-batches reach less than a tenth."""
    attention: Share = 0.45
    """Share of the peak in training's attention, between FlashAttention 2 and 3 on H100 (arXiv 2407.08608)."""
    prefill: Share = 0.5
    """Share of the peak in an engine's pass over prompts."""
    decode: Share = 0.4
    """Share of the peak in a decoding step that is limited by products and not by memory."""
    memory: Share = 0.75
    """Share of the memory's rate."""
    links: Share = 0.7
    """Share of the links' rates."""
    host: Share = 0.4
    """Share of the rate to the host's memory."""
    free_memory: Share = 0.92
    """Share of a device's memory that may be planned with; the rest is for contexts, buffers and fragmentation."""
    activations: Amount = 1.25
    """Bytes of activations over the bytes of the formula: transformers' norms, which are not fused, keep more."""
    decode_step_s: Amount = 0.003
    """Seconds that a decoding step takes in addition to its arithmetic."""
    decode_sequence_s: Amount = 5e-6
    """Seconds that each running sequence adds to it."""
    decode_mixture_s: Amount = 1e-4
    """Seconds that each layer with a mixture of experts adds to it: routing, sorting and gathering tokens."""
    all_reduce_s: Amount = 1e-5
    """Seconds of a sum over devices in addition to its bytes."""
    overlap: float = 1.0
    """Overlap of reading or gathering weights with multiplying by them. 1: together they take as long as the longer
    of the two; 0: as long as both, as on a CPU, whose cores do both."""
    host_update_s: Amount = 1.5e-9
    """Seconds of AdamW's update of a parameter on the host's processors: `ADAMW_TRAFFIC_BYTES`, at the about 20 GB/s
    that each of eight devices has of a host's memory. An assumption, not a measurement."""
    micro_batch_s: Amount = 0.02
    """Seconds that a micro-batch takes in addition to its arithmetic."""
    swap_s: Amount = 1.0
    """Seconds to put an engine to sleep, or to wake it, in addition to its bytes."""

    def usable_bytes(self, device: Device) -> float:
        """Return the bytes of a device's memory that may be planned with."""
        return device.memory_bytes * self.free_memory

    def together_s(self, one_s: Floats, other_s: Floats) -> Floats:
        """Return the seconds of two kinds of work with their overlap."""
        return np.maximum(one_s, other_s) + (1 - self.overlap) * np.minimum(one_s, other_s)

    def weight_sync_seconds(
        self,
        cluster: Cluster,
        size_bytes: float,
        *,
        num_ranks: int,
        engine_devices: int,
        devices_per_engine: int,
        colocated: bool,
    ) -> float:
        """Return the seconds in which new weights get from training ranks to engines by way of the hosts' memory.

        For m = `size_bytes`, R ranks, and engines of t devices, the bytes of each step are

            all-gather among the ranks               m (R - 1) / R   at `link_bytes_per_s` or `inter_node_bytes_per_s`
            device to host, of a rank's tensors      m / R           at `host_bytes_per_s`
            host to host, into the shared store      m / R           at half of the rate of the host's memory
            node to node                             see below       at `inter_node_bytes_per_s`
            host to host, to the t ranks; 0 if t = 1 m / t           at half of the rate of the host's memory
            host to device                           m / t           at `host_bytes_per_s`

        and the steps follow each other. The store of a node sends and receives through one of the node's adapters. If
        ranks and engines share N nodes, each node receives m (N - 1) / N. If ranks are on N nodes and engines on K
        others, a node receives m or sends m K / N, whichever is more; nothing if all are on one node.

        Rates are in bytes per second, one way: of the data sheets (`DEVICES`) and the cluster, times `links` or `host`;
        of the host's memory, the share of a device that `host_update_s` assumes, half because a copy reads and writes.

        Args:
            size_bytes: of the whole model, in the data type of the engines.
            engine_devices: devices of all engines.
            colocated: ranks and engines share devices; False: each have devices of their own.
        """
        gather_s = gather_seconds(cluster, self, size_bytes, num_ranks)
        host_s = 1 / (cluster.device.host_bytes_per_s * self.host)
        copy_s = 2 * self.host_update_s / ADAMW_TRAFFIC_BYTES
        rank_nodes = cluster.num_nodes(num_ranks)
        engine_nodes = cluster.num_nodes(engine_devices)
        node_bytes = size_bytes * max(1.0, engine_nodes / rank_nodes)
        if colocated:
            node_bytes = size_bytes * (1 - 1 / max(rank_nodes, engine_nodes))
        elif cluster.num_nodes(num_ranks + engine_devices) == 1:
            node_bytes = 0.0
        network_s = node_bytes / (cluster.inter_node_bytes_per_s * self.links)
        send_s = (host_s + copy_s) * size_bytes / num_ranks
        receive_s = host_s * size_bytes / devices_per_engine
        if devices_per_engine > 1:
            receive_s += copy_s * size_bytes / devices_per_engine
        return gather_s + send_s + network_s + receive_s

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.overlap <= 1:
            raise refusal("overlap", self.overlap, "a number in [0, 1]")


def gather_seconds(
    cluster: Cluster,
    efficiency: Efficiency,
    size_bytes: float,
    group_size: int,
    *,
    span: int | None = None,
    count: int = 1,
) -> float:
    """Return the seconds of gathers, or scatters, of `size_bytes` in all over groups of g devices.

    Each is by a ring, in which (g - 1) / g of the bytes are on every link, after `Efficiency.all_reduce_s` to start.
    A sum over the devices is a scatter and a gather.

    Args:
        span: devices among which a group's are; None: they are neighbours.
        count: number of the gathers.
    """
    if group_size <= 1:
        return 0.0
    rate = cluster.link_bytes_per_s(span or group_size) * efficiency.links
    return size_bytes * (group_size - 1) / group_size / rate + count * efficiency.all_reduce_s
