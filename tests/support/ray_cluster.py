"""Ray clusters on this machine, for tests."""

from typing import Any

from tests.support.hosts import free_port

PORTS = ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port", "dashboard_agent_listen_port")
ATTEMPTS = 3


def started(**head: Any) -> Any:
    """A cluster of a head with these arguments. Ray gives a node 30 s to start, which a busy machine may exceed."""
    from ray.cluster_utils import Cluster

    for attempt in range(ATTEMPTS):
        try:
            return Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **head, **ports()})
        except Exception as error:  # Ray raises just that
            if "timed out during startup" not in str(error) or attempt == ATTEMPTS - 1:
                raise
    raise AssertionError


def ports() -> dict[str, int]:
    """Of a node's agents: one that may choose its own has to say which within 15 s, or its node ends."""
    return {name: free_port() for name in PORTS}
