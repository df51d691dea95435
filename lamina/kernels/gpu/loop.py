"""A memory worker's inner loop on the card: one graph per layer, replayed for every step."""

from collections.abc import Callable
from typing import Any

from lamina.transport.device.polling import Doorbell, Polling


def capture_layer(
    work: Callable[[], object], polling: Polling, bells: tuple[Doorbell, Doorbell] | None, timeout_s: float
) -> Any:
    """A graph: wait for the message, ``work``, say that the answer is there. Launch it ahead, on the current stream.

    The graph holds addresses: ``polling``, ``bells`` and every array that ``work`` uses must live as long as it does.

    Args:
        work: launches append, attention and what writes the answer into the peer's arena; runs once now, before
            anything is captured, so that all is compiled and allocated.
        bells: the one to wait for and the one to ring; both count on with every replay. None: ``work`` alone.
        timeout_s: how long each replay waits. What follows one that waited in vain still runs, on the former message,
            but rings no bell.

    Raises:
        What ``work`` raises; nothing is being captured then.
    """
    import cupy

    stream = cupy.cuda.get_current_stream()
    work()
    stream.synchronize()
    stream.begin_capture()
    try:
        if bells:
            polling.wait(bells[0], timeout_s)
        work()
        if bells:
            polling.ring(bells[1])
    finally:
        graph = stream.end_capture()
    graph.upload(stream)  # not at its first launch, when kernels that wait may already hold the card
    stream.synchronize()
    return graph
