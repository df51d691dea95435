"""Decode steps over local memory as one CUDA graph each: the logits of steps that run slice by slice."""

import pytest

from lamina.lowering.gpu_slices import Main
from tests.support.local_steps import LocalWorker, check_steps

pytestmark = pytest.mark.gpu
CAPACITY = 600


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_recorded_step_gives_the_logits_of_slices(family: str) -> None:
    """For changing lengths, batches that grow and shrink, and page tables that move to larger memory."""
    from lamina.compute.device.cuda import Cuda

    class Unfused(Cuda):
        """Fuses no operators, which would take a minute."""

        def compiled(self, graph: Main) -> Main | None:
            return None

    kit = Unfused(0)
    recorded = LocalWorker(family, kit, "cuda:0", CAPACITY)
    usual = LocalWorker(family, kit, "cuda:0", CAPACITY, records=False)
    assert recorded.steps is not None
    recorded.steps.reserve(4)
    check_steps(recorded, usual, seed=1, steps=36, most=9, longest=24, tolerance=1e-4)
