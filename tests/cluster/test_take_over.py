"""What an engine that takes over the workers of another one adopts of it."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from lamina import launch
from lamina.cluster import bringup, sizing
from lamina.cluster.bringup import Saved
from lamina.config.engine_config import EngineConfig
from lamina.control.messages import Hello
from lamina.core import __version__
from lamina.core.topology import FIRST, Member, Topology
from lamina.models import directory
from lamina.text.tokenizer import Tokenizer
from tests.support.bare_cluster import bare_cluster


def test_limits_and_lanes_are_those_of_the_start_however_many_replicas_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers have reserved memory for them, and the lost replicas are replaced.

    From these settings alone, two lanes on one replica would rotate, and two replicas would run one each.
    """
    config, model = EngineConfig(compute="cpu:2", memory="cpu:1", max_num_seqs=4, lanes=2), directory.find(None)
    kinds: Any = {"compute": {"compute0": "cpu", "compute1": "cpu"}, "memory": {"memory0": "cpu"}}
    greetings = {name: Hello("here", __version__, cores=[0]) for name in ("compute0", "compute1", "memory0")}
    plan = sizing.cluster_plan(config, model, [], kinds, greetings, is_open=False, trace=False)
    limits = replace(plan.limits, max_model_len=77)
    assert limits.max_sequences == plan.compute_setup.sequences == 8
    cluster = bare_cluster(["compute1"], {"memory0": 99}, [], plan.pipeline.with_replicas(1))
    left = Topology(FIRST, (Member("compute1", "compute", "cpu", ""), *cluster.topology.members[1:]), plan.pipeline)
    greetings.pop("compute0")
    sizes: Any = {"prefill": 0, "compute": 2, "memory": 1}
    saved = Saved(
        left, cluster.loaded, plan.compute_setup, cluster.memory_setup, limits, greetings, {}, [], wanted=sizes
    )
    home = launch.Home(1, b"s" * 32, -1, Mock(), msgspec.msgpack.encode(saved), lambda state: None)
    monkeypatch.setattr(launch, "ControlServer", Mock())
    monkeypatch.setattr(bringup, "take_over", lambda control, workers, plan, saved: saved)
    assert home.saved is not None
    _, taken, cluster = launch._take_over(config, model, Tokenizer(model), home, home.saved, False)
    assert taken.limits == limits and taken.compute_setup == plan.compute_setup
    assert taken.pipeline == plan.pipeline
    found: object = cluster  # what the fake above returns
    assert found == saved
