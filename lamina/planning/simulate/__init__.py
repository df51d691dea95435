"""Simulates serving a trace by discrete events: the runtime's own scheduler, or baselines, under a virtual clock.

    deployment = Deployment(model=model_shapes.find("Llama-2-13B"), compute=catalogue["a100"], compute_workers=2,
                            memory=catalogue["rtx3090"], memory_workers=6)
    result = simulate(deployment, replay(read_trace(file)))
    print(result.tokens_s, result.ttft_s.p50, result.usd_per_million_out)

``docs/simulator.md`` says what is modelled and what is not.
"""

import gc
from collections.abc import Callable, Sequence

from lamina.planning.simulate.baselines import BaselineSimulation, System
from lamina.planning.simulate.result import Result, State, Stops, check_requests_file, write_requests
from lamina.planning.simulate.scenario import (
    Arrivals,
    Deployment,
    Fault,
    check_faults,
    draw,
    parse_failure,
    parse_slowdown,
    replay,
)
from lamina.planning.simulate.virtual_runtime import Simulation

__all__ = [
    "Arrivals",
    "Deployment",
    "Fault",
    "Result",
    "State",
    "System",
    "check_requests_file",
    "draw",
    "parse_failure",
    "parse_slowdown",
    "replay",
    "simulate",
    "write_requests",
]


def simulate(
    deployment: Deployment,
    arrivals: Arrivals,
    system: System = System.LAMINA,
    faults: Sequence[Fault] = (),
    recorded: int = 0,
    on_progress: Callable[[int], None] | None = None,
    stops: Stops | None = None,
) -> Result:
    """Serve ``arrivals`` on ``deployment`` in virtual time until the last request has ended.

    Args:
        deployment: The pools.
        arrivals: The requests.
        system: Lamina and disaggregation use both pools of the deployment (the latter prefills on compute and decodes
            on memory workers); the others use the compute pool alone.
        faults: Failures and slowdowns of workers.
        recorded: How many of the latest spans of Lamina's workers to keep.
        on_progress: Called periodically with the number of requests that have ended.
        stops: Called periodically with the log and the time; True ends the run. Its result then has requests without
            a state.

    Raises ConfigError if the weights do not fit, a pool or a worker is missing or superfluous, or lanes and pipelining
    are incompatible.
    """
    check_faults(deployment, faults)
    collects = gc.isenabled()
    gc.disable()  # there are no reference cycles, and searching for them takes a tenth of the time
    try:
        if system is System.LAMINA:
            return Simulation(deployment, arrivals, faults, recorded).simulate(on_progress, stops)
        return BaselineSimulation(system, deployment, arrivals, faults).simulate(on_progress, stops)
    finally:
        if collects:
            gc.enable()
