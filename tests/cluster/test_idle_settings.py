"""Settings that have no effect with the workers of the start are said, with what would give them one."""

import logging
from typing import Any

import pytest

from lamina.cluster.idle_settings import idle_settings
from lamina.cluster.local_workers import LocalWorkers
from lamina.cluster.pool import Devices
from lamina.cluster.refusals import require_allowed
from lamina.config.engine_config import EngineConfig
from lamina.control.agent_messages import Start
from lamina.core.errors import ConfigError
from lamina.launch import launch

BALANCED = {"slo_ttft_ms": 500, "slo_tbt_ms": 50}


def idle(settings: dict[str, Any], computes: int, memories: list[str]) -> list[str]:
    spill = "/tmp" if "kv_overcommit" in settings else None
    config, pools = EngineConfig(kv_spill_dir=spill, **settings), (["cpu"] * computes, memories)
    require_allowed(config, *pools)
    return [str(one) for one in idle_settings(config, *pools)]


ONE_PLACE: list[dict[str, Any]] = [
    {"balance": "ledger"},
    {"balance": "bandwidth"},
    {"partition": "token"},
    {"partition": "head"},
    {"kv_tokens_per_worker": 64},
]


@pytest.mark.parametrize("settings", ONE_PLACE)
def test_nothing_is_divided_or_moves_where_one_worker_has_all_kv(settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    for memory in ("cpu", "local"):
        (said,) = idle(settings, 1, [memory])
        assert said.startswith(f"{name} {value} has no effect: one worker holds all KV; give --memory cpu:2, let")
    assert idle(settings, 1, ["cpu", "cpu"]) == []
    assert idle({**settings, "autoscale": "memory=1:2"}, 1, ["cpu"]) == []
    if settings != {"partition": "head"}:
        assert idle(settings, 2, ["local"]) == idle(settings, 1, ["local", "cpu"]) == []
        staged: list[dict[str, Any]] = [{"pipeline_parallel": 2}, {"compute": "cpu:4/pp2"}]
        assert [len(idle({**settings, **each}, 4, ["local"])) for each in staged] == [int("balance" in settings)] * 2
        assert idle({**settings, "pipeline_parallel": 2}, 4, ["local", "cpu", "cpu"]) == []
        assert len(idle({**settings, "prefill": "cpu:1"}, 2, ["local"])) == 1, "prefill workers hold no KV"


def test_other_settings_without_effect() -> None:
    (said,) = idle({"prompt_attention": "memory"}, 2, ["local"])
    assert said.startswith("prompt_attention memory has no effect: every replica attends to the KV in its own memory")
    assert idle({"prompt_attention": "memory", "prefill": "cpu:1"}, 2, ["local"]) == []
    (said,) = idle({"kv_overcommit": 2.0, "prefix_cache": False}, 1, ["cpu"])
    assert said.endswith("prefix_cache is off; leave out one of them")


class Unstartable(LocalWorkers):
    """Fails the test as soon as a worker is started."""

    def start(self, worker: Start) -> None:
        pytest.fail(f"{worker.name} is started")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"compute": "", "prefill": "cpu:1"}, "the pool is empty; give kind:count"),
        ({"compute": "local", "prefill": "cpu:1"}, "local is memory of the compute workers.* Use --compute cpu:1"),
        ({"compute": "local", "prefill": "cpu:2/tp2"}, "local is memory of the compute workers.* Use --compute cpu:1"),
        ({"compute": "cpu:1", "prefill": "local"}, "local is memory of the compute workers.* Use --prefill cpu:1, or"),
        ({"compute": "cpu:2", "autoscale": "prefill=2:2", **BALANCED}, "at least one must always decode"),
        ({"compute": "cpu:2", "prefill": "cpu:1", "tensor_parallel": 2}, "give --prefill a multiple of 2"),
        (
            {"compute": "cpu:4", "tensor_parallel": 4, "memory": "local"},
            "2 ranks of a replica share each of the 2 KV heads, which local memory",
        ),
    ],
)
def test_wrong_combinations_are_one_error_before_any_worker_starts(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        launch(EngineConfig(load_format="dummy", **settings), workers=Unstartable())
    assert "\n" not in str(raised.value)


def test_weights_that_no_device_holds_are_an_error_before_any_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Devices(2, 2**30, ("NVIDIA A100",), gpu_bytes=(100_000,))
    monkeypatch.setattr("lamina.launch.find_devices", lambda: small)
    with pytest.raises(ConfigError, match=r"compute0 on a100 has 0.0 GB of memory.* raise tensor_parallel"):
        launch(EngineConfig(compute="a100:1"), workers=Unstartable())


def test_a_start_says_what_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    """And goes on, up to the first worker."""
    with caplog.at_level(logging.WARNING), pytest.raises(pytest.fail.Exception, match="compute0 is started"):
        launch(EngineConfig(memory="cpu:1", balance="ledger", load_format="dummy"), workers=Unstartable())
    assert ["balance ledger has no effect" in one.message for one in caplog.records] == [True]
