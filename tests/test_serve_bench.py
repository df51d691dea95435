"""Parts of ``bench.runtime.serve`` that no engine has to run for."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.peers.processor_time import ProcessorTime
from bench.runtime.serve import Turn, Variant, chosen, ratio, tables

BUSY = """
import sys, time
sys.stdin.readline()
while time.process_time() < 0.5:
    pass
print(flush=True)
sys.stdin.readline()
"""


def test_processor_time_counts_children_and_no_waiting() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as busy:
        assert busy.stdin is not None and busy.stdout is not None
        try:
            with ProcessorTime() as processor:
                start = time.monotonic()
                busy.stdin.write(b"\n")
                busy.stdin.flush()
                busy.stdout.readline()
                worked = time.monotonic()
                time.sleep(0.3)
                end = time.monotonic()
        finally:
            busy.kill()
    total = processor.at(end) - processor.at(start)
    assert 0.3 < total < 0.5 + (end - start)  # Python's start took some of the half second before
    assert processor.at(end) - processor.at(worked) < 0.5 * total
    assert processor.at(start) <= processor.at((start + worked) / 2) <= processor.at(worked)


def test_an_engine_is_measured_with_the_weights_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp").mkdir()
    weights = ["bf16", "int8", "q8_0"]
    assert chosen("lamina,llama_cpp", weights, ["auto", "int8"], tmp_path) == [
        Variant("lamina", "bf16"),
        Variant("lamina", "int8"),
        Variant("lamina", "int8", "int8"),
        Variant("llama_cpp", "bf16"),
        Variant("llama_cpp", "q8_0"),
    ]
    with pytest.raises(SystemExit, match="no environment for openvino"):
        chosen("openvino", weights, ["auto"], tmp_path)
    with pytest.raises(SystemExit, match="no type of weights is called 'int3'"):
        chosen("lamina", ["int3"], ["auto"], None)
    with pytest.raises(SystemExit, match="none of unsplit has weights in int8"):
        chosen("unsplit", ["int8"], ["auto"], None)


def turn(variant: Variant, number: int, rate: float) -> Turn:
    return Turn(variant.engine, variant.weights, variant.activation_dtype, 8, 512, number, rate, 1, 1, 1, 100, {})


def test_ratios_are_of_one_round_and_equal_bits() -> None:
    lamina, openvino, llama_cpp = Variant("lamina", "int8"), Variant("openvino", "int8"), Variant("llama_cpp", "q8_0")
    dense = Variant("openvino", "bf16")
    turns = [
        turn(variant, number, rate)
        for variant, rates in (
            (lamina, [10, 30, 30]),
            (openvino, [5, 30, 10]),
            (llama_cpp, [4, 40, 20]),
            (dense, [90] * 3),
        )
        for number, rate in enumerate(rates)
    ]
    assert ratio(turns, "decode", lamina, [openvino, llama_cpp]) == "1.50"  # of 2, 0.75 and 1.5
    heads = {table.title: [str(column.header) for column in table.columns] for table in tables(turns, "3m")}
    assert "lamina int8 / best peer" in heads["3m, weights of 8 bits, decode, tokens/s"]
    assert "openvino bf16" not in heads["3m, weights of 8 bits, decode, tokens/s"]
