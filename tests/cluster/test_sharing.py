"""Which part of a GPU each of the workers gets that share it."""

from pathlib import Path

import pytest

from lamina.cluster.sharing import mps_runs, parts
from lamina.topology import Role

LIMIT = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "60"}


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ([], []),
        (["compute"], [{}]),
        (["memory"], [{}]),
        (["memory", "memory"], [{}, {}]),
        (["compute", "memory"], [{}, LIMIT]),
        (["memory", "compute", "memory"], [LIMIT, {}, LIMIT]),
    ],
)
def test_memory_workers_beside_a_compute_worker_are_limited(roles: list[Role], expected: list[dict[str, str]]) -> None:
    assert parts(roles, mps=True, variables={"HOME": "/root"}) == expected
    assert parts(roles, mps=False, variables={}) == [{} for _ in roles], "they take turns"


@pytest.mark.parametrize("own", ["25", "100", ""])
def test_a_limit_of_the_user_is_left_alone(own: str) -> None:
    assert parts(["compute", "memory"], mps=True, variables={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": own}) == [{}, {}]


def test_the_service_is_found_where_its_processes_meet(tmp_path: Path) -> None:
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert not mps_runs(variables)
    (tmp_path / "control").touch()
    assert mps_runs(variables)
