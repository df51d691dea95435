"""What only a GPU can show of attention: the interpreter's tests on it, captured graphs, dispatch, memory errors."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from lamina.core.types import KvElement
from lamina.kernels import attention
from lamina.kernels.gpu.attention import Attention, KvSlab, StepCapacity, pair_table, write_words
from lamina.kernels.gpu.tables import PageTables
from lamina.kernels.gpu.tilings import Choices
from tests.support import reference_attention
from tests.support.kernel_cases import decode, make_case, make_spec, table
from tests.support.shared_prefixes import check_shared_prefixes

pytestmark = pytest.mark.gpu
KERNEL_TESTS = ["tests/kernels/test_triton_attention.py", "tests/kernels/test_triton_plan.py"]
SANITIZED = {
    "attention": (
        KERNEL_TESTS,
        "(test_decode_batch and 8-128 or test_appends and bfloat16 or test_prompt_chunk) and (bfloat16 or int8) or "
        "test_merge_equals and 5",
    ),
    "shared prefixes": (["tests/gpu/test_attention_on_gpu.py"], "shared_prefixes"),
    "polling": (["tests/gpu/test_polling_on_gpu.py"], "in_order or deadline or abort"),
}
ON_CARD = os.environ | {"TRITON_INTERPRET": "0"}
DEADLINE_S = 240.0


@pytest.mark.parametrize("file", KERNEL_TESTS)
def test_the_interpreters_tests_pass_on_the_card(file):
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "8", "--dist", "worksteal", "-m", "not slow", file],
        env=ON_CARD,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on the PATH")
@pytest.mark.parametrize("what", SANITIZED)
def test_compute_sanitizer_finds_nothing(what):
    files, tests = SANITIZED[what]
    # Only what kernels do: CUDA's own libraries ask the driver for functions that it may not have. Every array is an
    # allocation of its own, as within a pool nobody sees where one ends.
    sanitizer = ["compute-sanitizer", "--report-api-errors", "no", "--error-exitcode", "9"]
    tests_without_pool = "import cupy, pytest, sys; cupy.cuda.set_allocator(None); sys.exit(pytest.main(sys.argv[1:]))"
    command = [*sanitizer, sys.executable, "-c", tests_without_pool, "-q", "-k", tests, *files]
    run = subprocess.run(command, env=ON_CARD, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if "Device not supported" in run.stdout + run.stderr:
        pytest.skip("compute-sanitizer does not support this machine's device")
    assert run.returncode == 0, run.stdout[-4000:]


@pytest.mark.parametrize("samples", [2, 9])
def test_shared_prefixes_are_read_once_for_all(samples):
    from lamina.kernels.gpu.cuda import Cuda

    check_shared_prefixes(Cuda(0), samples)


def test_slabs_in_the_hosts_memory_are_read_and_written(monkeypatch):
    from lamina.kernels.gpu.cuda import Cuda

    backend = Cuda(0)
    monkeypatch.setattr(backend, "memory", lambda: (0, 0))
    check_shared_prefixes(backend, 2)


def expected(case):
    return reference_attention.partial(case.q, case.k, case.v, case.segments, case.spec, threads=1)


def test_dispatch_takes_arrays_of_the_card():
    import cupy

    case = make_case([decode(700), decode(3)], make_spec(2, 4, 64), "float32")
    q, k, v = (cupy.asarray(each) for each in (case.q, case.k, case.v))
    out, lse = attention.partial(q, k, v, case.segments, case.spec, threads=1)
    for got, wanted in zip((out, lse), expected(case), strict=True):
        np.testing.assert_allclose(cupy.asnumpy(got), wanted, atol=3e-5)


def test_dispatch_refuses_what_kernels_would_misread():
    import cupy

    case = make_case([decode(9)], make_spec(2, 4, 64), "float32")
    q, k, v = (cupy.asarray(each) for each in (case.q, case.k, case.v))
    with pytest.raises(ValueError, match=r"strides .* give C-contiguous ones"):
        attention.partial(q, cupy.asfortranarray(k), v, case.segments, case.spec, threads=1)
    with pytest.raises(ValueError, match="k is float64"):
        attention.partial(q, k.astype(np.float64), v, case.segments, case.spec, threads=1)


def test_a_captured_layer_follows_the_tables():
    """Replayed while sequences grow and one ends: every replay attends to the tables as they are then."""
    import cupy

    from lamina.kernels.gpu.cuda import Cuda

    backend, spec, capacity = Cuda(0), make_spec(2, 4, 64), 4096
    stream = cupy.cuda.Stream(non_blocking=True)
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((capacity, 2, 64)).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((3, 8, 64)).astype(np.float32)
    shuffled = rng.permutation(capacity).astype(np.int32)
    slots = [shuffled[:1000], shuffled[1000:1500], shuffled[1500:1600]]
    tables = PageTables(8192)
    with stream:
        slab = KvSlab(KvElement.FLOAT32, cupy.asarray(k), cupy.asarray(v))
        words = backend.empty((8192,), np.int32)
        queries, out, lse = cupy.asarray(q), cupy.empty((3, 8, 64), np.float32), cupy.empty((3, 8), np.float32)
        layer = Attention(backend, StepCapacity(3, 3), Choices(""))
        graph = None
        for lengths in ((100, 300, 64), (101, 301, 65), (900, 302, 0), (1, 500, 100)):
            for sequence, length in enumerate(lengths):
                tables.update(sequence, slots[sequence][:length])
            write_words(backend, words, tables.changes())
            pairs = [decode(length) for length in lengths]
            held = np.concatenate([each[:length] for each, length in zip(slots, lengths, strict=True)])
            segments = table(pairs, held)
            layer.upload_pairs(pair_table(segments, np.array([tables.start(sequence) for sequence in range(3)])))
            if graph is None:
                layer.partial(queries, slab, words, spec, out, lse)
                stream.begin_capture()
                layer.partial(queries, slab, words, spec, out, lse)
                graph = stream.end_capture()
            graph.launch(stream)
            stream.synchronize()
            wanted = reference_attention.partial(q, k, v, segments, spec, threads=1)
            for got, right in zip((out, lse), wanted, strict=True):
                np.testing.assert_allclose(got.get(), right, atol=3e-5)
