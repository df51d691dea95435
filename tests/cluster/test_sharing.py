"""Which part of a GPU each of the workers gets that share it."""

from pathlib import Path

import pytest

from lamina.cluster.local_workers import limits, mps_runs
from lamina.core.topology import Role

LIMIT = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "60"}


@pytest.mark.parametrize(
    ("role", "beside", "expected"),
    [
        ("compute", [], {}),
        ("compute", ["memory"], {}),
        ("memory", [], {}),
        ("memory", ["memory"], {}),
        ("memory", ["compute"], LIMIT),
        ("memory", ["memory", "compute"], LIMIT),
    ],
)
def test_memory_workers_beside_a_compute_worker_are_limited(
    role: Role, beside: list[Role], expected: dict[str, str]
) -> None:
    assert limits(role, beside, mps=True, variables={"HOME": "/root"}) == expected
    assert limits(role, beside, mps=False, variables={}) == {}, "they take turns"


@pytest.mark.parametrize("own", ["25", "100", ""])
def test_a_limit_of_the_user_is_left_alone(own: str) -> None:
    variables = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": own}
    assert limits("memory", ["compute"], mps=True, variables=variables) == {}


def test_the_service_is_found_where_its_processes_meet(tmp_path: Path) -> None:
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert not mps_runs(variables)
    (tmp_path / "control").touch()
    assert mps_runs(variables)
