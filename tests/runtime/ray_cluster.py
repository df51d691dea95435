"""Ray clusters on this machine, for tests."""

from typing import Any

ATTEMPTS = 4


def started(**head: Any) -> Any:
    """A cluster of a head with these arguments. Ray gives a node 30 s to start, which a busy machine may exceed."""
    from ray.cluster_utils import Cluster

    for attempt in range(ATTEMPTS):
        try:
            return Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **head})
        except Exception as error:  # Ray raises just that
            if "timed out during startup" not in str(error) or attempt == ATTEMPTS - 1:
                raise
    raise AssertionError
