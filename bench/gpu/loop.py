"""Captures a memory worker's inner loop on the GPU: one CUDA graph per layer, replayed for every step."""

from collections.abc import Callable
from typing import Any

from lamina.transport.device.polling import Doorbell, Polling


def capture_layer(
    work: Callable[[], object], polling: Polling, bells: tuple[Doorbell, Doorbell] | None, timeout_s: float
) -> Any:
    """A graph that waits for the message, runs ``work`` and announces the reply; launch it ahead of the message.

    The graph holds addresses: ``polling``, ``bells`` and every array that ``work`` uses must live as long as it does.

    Args:
        work: launches append, attention and the kernels that write the reply into the peer's arena, on the current
            stream. It runs once before the capture, so that everything is compiled and allocated.
        bells: the doorbells to wait for and to ring, incremented with every replay. None: ``work`` alone.
        timeout_s: how long each replay waits. After a timeout, ``work`` still runs, on the previous message, but its
            result is discarded: no doorbell is rung.

    Raises:
        What ``work`` raises; the stream is not capturing then.
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
    graph.upload(stream)  # not at its first launch, when waiting kernels may already occupy the GPU
    stream.synchronize()
    return graph
