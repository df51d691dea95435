"""OpenVINO GenAI: continuous batching, weights in bfloat16, int8 or int4. See ``offline.py``.

With bfloat16 weights, arithmetic and KV are in bfloat16. With weights in int8 and int4, all but the number of threads
and the optimisation for latency is OpenVINO's default: it rounds what these layers multiply to 8 bits, and KV too.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from bench.peers.offline import STEP_TOKENS, Cell, Generate, run

LATENCY = {"PERFORMANCE_HINT": "LATENCY"}
BFLOAT16 = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16", **LATENCY}
FORMATS = {"bf16": "fp16", "int8": "int8", "int4": "int4"}
"""optimum-cli's name of each type of weights."""


def settings(weights: str) -> dict[str, str]:
    """Return the properties of a pipeline, but the number of threads."""
    return BFLOAT16 if weights == "bf16" else LATENCY


def converted(model: Path, weights: str) -> Path:
    """Return the model in OpenVINO's format, beside the original; made if it is not there."""
    place = model.with_name(f"{model.name}.openvino-{weights}")
    if not place.exists():
        command = Path(sys.executable).with_name("optimum-cli")
        options = ["--task", "text-generation-with-past", "--weight-format", FORMATS[weights]]
        part = place.with_name(place.name + ".part")
        subprocess.run([command, "export", "openvino", "--model", model, *options, part], check=True, stdout=sys.stderr)
        part.rename(place)
    return place


@contextmanager
def load(cell: Cell) -> Iterator[Generate]:
    """All requests in one ``ContinuousBatchingPipeline``, stepped from here."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = STEP_TOKENS
    scheduler.max_num_seqs = cell.batch
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        str(converted(cell.model, cell.weights)),
        scheduler,
        "CPU",
        {**settings(cell.weights), "INFERENCE_NUM_THREADS": cell.threads},
    )
    requests = iter(range(1 << 62))

    def generate(prompts: list[list[int]], tokens: int) -> list[list[float]]:
        config = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        handles = [
            pipeline.add_request(next(requests), openvino.Tensor(np.array([prompt], np.int64)), config)
            for prompt in prompts
        ]
        arrivals: list[list[float]] = [[] for _ in prompts]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.monotonic()
            for handle, times in zip(handles, arrivals, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        times.extend([now] * len(output.generated_ids))
        return arrivals

    yield generate


def about(cell: Cell) -> dict[str, str]:
    return {"openvino_genai": openvino_genai.__version__, **settings(cell.weights)}


if __name__ == "__main__":
    run(load, about)
