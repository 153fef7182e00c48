"""Clusters: devices by their data sheets, and the links between them."""

from dataclasses import dataclass, fields

from gcore_placement.errors import check_above_0, check_positive, refusal


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, by its peaks; `Efficiency` has the shares of these that programs reach.

    Raises:
        PlacementError: a number is not finite or not above 0.
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
        """Return one of DEVICES.

        Raises:
            PlacementError: it is not one of them.
        """
        if name not in DEVICES:
            raise refusal("device", name, f"one of {', '.join(DEVICES)}")
        return DEVICES[name]

    @classmethod
    def matching(cls, full_name: str) -> "Device":
        """Return the known device whose name occurs in the one that a driver reports, as in `NVIDIA H100 80GB HBM3`.

        Raises:
            PlacementError: there is none.
        """
        for name, device in DEVICES.items():
            if name in full_name:
                return device
        raise refusal("device", full_name, f"a name that holds one of {', '.join(DEVICES)}")


def _sheet(name: str, *, gb: float, tflops: float, memory_tb_s: float, link_gb_s: float, host_gb_s: float) -> Device:
    return Device(
        name=name,
        memory_bytes=gb * 1e9,
        flops_per_s=tflops * 1e12,
        memory_bytes_per_s=memory_tb_s * 1e12,
        link_bytes_per_s=link_gb_s * 1e9,
        host_bytes_per_s=host_gb_s * 1e9,
    )


DEVICES = {
    device.name: device
    for device in (
        _sheet("B200", gb=180, tflops=2250, memory_tb_s=8.0, link_gb_s=900, host_gb_s=64),
        _sheet("H200", gb=141, tflops=989, memory_tb_s=4.8, link_gb_s=450, host_gb_s=64),
        _sheet("H100", gb=80, tflops=989, memory_tb_s=3.35, link_gb_s=450, host_gb_s=64),
        _sheet("H800", gb=80, tflops=989, memory_tb_s=3.35, link_gb_s=200, host_gb_s=64),
        _sheet("H20", gb=96, tflops=148, memory_tb_s=4.0, link_gb_s=450, host_gb_s=64),
        _sheet("A100", gb=80, tflops=312, memory_tb_s=2.039, link_gb_s=300, host_gb_s=32),
        _sheet("A800", gb=80, tflops=312, memory_tb_s=2.039, link_gb_s=200, host_gb_s=32),
        _sheet("L40S", gb=48, tflops=362, memory_tb_s=0.864, link_gb_s=32, host_gb_s=32),
    )
}
"""NVIDIA's data sheets, of the SXM form where there is one. Bfloat16 without sparsity; NVLink and PCIe at half of the
two-way rate that the sheets give; GB are 10^9 bytes, which leaves the surplus of the real chips to the driver."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices of one kind in nodes.

    Raises:
        PlacementError: a number is not above 0.
    """

    num_devices: int
    device: Device
    devices_per_node: int = 8
    inter_node_bytes_per_s: float = 50e9
    """Bytes per second of each device to other nodes, one way: a 400 Gb/s adapter for each."""
    host_memory_bytes: float = 200e9
    """Host memory per device, for weights and states that leave the device."""

    def __post_init__(self) -> None:
        check_positive("num_devices", self.num_devices)
        check_positive("devices_per_node", self.devices_per_node)
        check_above_0("inter_node_bytes_per_s", self.inter_node_bytes_per_s)
        check_above_0("host_memory_bytes", self.host_memory_bytes)

    def sizes(self) -> list[int]:
        """Return the numbers of devices that a job may use, largest first: whole nodes, or part of one node.

        The sizes of a cluster are among those of any larger one, so more devices never make a plan worse.
        """
        nodes = [n * self.devices_per_node for n in range(1, self.num_devices // self.devices_per_node + 1)]
        parts = list(range(1, min(self.num_devices, self.devices_per_node - 1) + 1))
        return (parts + nodes)[::-1]

    def link_bytes_per_s(self, group_size: int) -> float:
        """Return the rate of each device in a group of neighbours: within a node where the group fits into one."""
        if group_size <= self.devices_per_node:
            return self.device.link_bytes_per_s
        return min(self.inter_node_bytes_per_s, self.device.link_bytes_per_s)
