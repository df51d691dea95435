"""Lamina: one compute and one memory worker on the same cores. See ``offline.py``."""

import importlib.metadata
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from offline import STEP_TOKENS, Cell, Generate, run

from lamina import Lamina, RequestOutput, SamplingParams

TIMEOUT_S = 900


@contextmanager
def load(cell: Cell) -> Iterator[Generate]:
    """Requests submitted to the engine as a server does."""
    with Lamina(cell.model, threads=cell.threads, max_num_batched_tokens=STEP_TOKENS) as lamina:
        requests = iter(range(1 << 62))

        def generate(prompts: list[list[int]], tokens: int) -> list[list[float]]:
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            arrivals: list[list[float]] = [[] for _ in prompts]
            unfinished = set(range(len(prompts)))
            done = threading.Event()

            def submit(index: int, prompt: list[int]) -> None:
                def on_output(output: RequestOutput) -> None:
                    times = arrivals[index]
                    times += [time.perf_counter()] * (len(output.outputs[0].token_ids) - len(times))
                    if output.finished:
                        unfinished.discard(index)
                        if not unfinished:
                            done.set()

                lamina.engine.submit(str(next(requests)), prompt, params, on_output)

            for index, prompt in enumerate(prompts):
                submit(index, prompt)
            if not done.wait(TIMEOUT_S):
                raise TimeoutError(f"{len(unfinished)} of {len(prompts)} requests did not end within {TIMEOUT_S} s")
            return arrivals

        yield generate


def about() -> dict[str, str]:
    return {"lamina": importlib.metadata.version("lamina")}


if __name__ == "__main__":
    run(load, about)
