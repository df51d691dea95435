"""Devices of compute workers, which hold weights and run slices: CPU, GPU or emulated GPU behind one protocol."""

from lamina.compute.device.base import Device
from lamina.core.errors import ConfigError


def make(name: str) -> Device:
    """Return the device ``name``: "cpu", "cuda:INDEX", or "emulated", which runs the code for GPUs on the CPU.

    Raises ConfigError if the device does not exist, or torch cannot use it.
    """
    if name == "cpu":
        from lamina.compute.device.cpu import Cpu

        return Cpu()
    from lamina.compute.device.gpu import Gpu

    kind, _, index = name.partition(":")
    if kind == "emulated":
        from lamina.compute.device.emulated import Emulated

        return Gpu(Emulated())
    if kind != "cuda" or not index.isdecimal():
        raise ConfigError(f"unknown device {name!r}; give cpu, emulated, or cuda:INDEX")
    from lamina.compute.device.cuda import Cuda

    return Gpu(Cuda(int(index)))
