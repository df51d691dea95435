"""Which errors of libraries mean that memory is short."""

import pytest
import torch

from lamina.core.errors import is_out_of_memory


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), True),
        (RuntimeError("cudaErrorMemoryAllocation: out of memory"), True),
        (RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory"), True),
        (RuntimeError("an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_of_libraries(error: Exception, short: bool) -> None:
    assert is_out_of_memory(error) == short
