"""Decode steps of vLLM, for ``split``: the same model with random weights, on one GPU, without prefix caching.

It runs in a separate process, whose end frees the GPU's memory. A step's time is the difference of a longer and a
shorter generation of the same prompts, so that prompts do not count.
"""

import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

FEW = 8  # tokens of the shorter generation
LOAD_S = 600.0  # to load and compile
CELL_S = 120.0


def measure(model: Path, cells: Sequence[tuple[int, int]], tokens: int) -> list[float] | None:
    """Seconds of a step that decodes ``batch`` requests with ``context`` tokens each; None if vLLM does not run."""
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed")
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "seconds.json")
        command = [sys.executable, "-m", "bench.gpu.vllm_peer", str(model), json.dumps(cells), str(tokens), str(path)]
        try:
            subprocess.run(command, timeout=LOAD_S + CELL_S * len(cells), check=True)
        except subprocess.SubprocessError as error:
            print(f"vLLM was not measured: {error}")
            return None
        found: list[float] = json.loads(path.read_text())
        return found


def main() -> None:
    from vllm import LLM, SamplingParams

    model, cells, tokens, path = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    llm = LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enable_prefix_caching=False,
        max_num_seqs=max(batch for batch, _ in cells),
        max_model_len=max(context for _, context in cells) + FEW + tokens,
    )

    def seconds(batch: int, context: int, count: int) -> float:
        draw = random.Random(context)
        prompts = [{"prompt_token_ids": [draw.randrange(3, 900) for _ in range(context)]} for _ in range(batch)]
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begun

    steps = [seconds(batch, context, FEW + tokens) - seconds(batch, context, FEW) for batch, context in cells]
    path.write_text(json.dumps([each / tokens for each in steps]))


if __name__ == "__main__":
    main()
