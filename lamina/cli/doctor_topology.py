"""`lamina doctor --topology`: which cores, memory, GPUs and network interfaces of this machine are close together."""

from collections.abc import Iterator

from lamina.cluster.locality import Card, Locality, core_list


def lines(found: Locality) -> Iterator[tuple[str, str]]:
    """What to show of a machine: (part, what is known of it)."""
    for node in found.nodes:
        memory = f", {node.memory_bytes / 2**30:.1f} GiB" if node.memory_bytes else ""
        yield f"NUMA node {node.number}", f"cores {core_list(node.cores) or 'none'}{memory}"
    if not found.nodes:
        yield "NUMA", "the kernel does not report nodes"
    for nic in found.nics:
        yield nic.name, _about(found, nic)
    if not found.nics:
        yield "network", "no interface with a device of its own"
    for gpu in found.gpus:
        yield gpu.name, _about(found, gpu)
        yield "", _neighbours(found, gpu)
    if not found.gpus:
        yield "GPUs", "none"


def _about(found: Locality, card: Card) -> str:
    node = found.node(card)
    where = f"NUMA node {node}" if node >= 0 else "NUMA node unknown"
    return ", ".join(filter(None, (card.about, card.address, where)))


def _neighbours(found: Locality, gpu: Card) -> str:
    """What a worker on this GPU should use."""
    nearest, cores = found.nearest(gpu), found.cores(gpu)
    interface = "no network interface" if nearest is None else f"{nearest[0].name} is {nearest[1]}"
    run = f"its worker runs on cores {core_list(cores)}" if cores else "its worker runs on any cores"
    if len(found.gpus) == 1:
        return f"{run}; {interface}"
    others = ", ".join(other.name for other in found.reached(gpu)) or "no other GPU"
    return f"{run}; {interface}; it writes into the memory of {others}"
