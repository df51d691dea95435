"""Fixtures of all tests."""

import atexit
import gc
import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest

# Properties are tried with so many examples; `make test-all` and --hypothesis-profile=thorough try more. Only they make
# an example that fails smaller: that takes up to five minutes, and a test that hits its time limit meanwhile would show
# none. An ordinary run shows the example that it has found, and the next run tries it first.
_FOUND_FIRST = (hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate)
hypothesis.settings.register_profile("ordinary", max_examples=50, deadline=None, phases=_FOUND_FIRST, print_blob=True)
hypothesis.settings.register_profile("thorough", max_examples=300, deadline=None, print_blob=True)
hypothesis.settings.load_profile("ordinary")

# Triton reads it when it is imported, and torch may import it before any test of a kernel is collected. Kernels run in
# its interpreter unless TRITON_INTERPRET=0 says that there is a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Several tests run at once, and threads of OpenMP that wait actively take the cores from each other. Read by libgomp.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# A shell's background job ignores SIGINT, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Importing PyTorch, Transformers and the tests makes a million objects, which would be looked through again and again.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage again, but only of objects made from now on.

    The interpreter's last collection sees all objects: native ones in cycles would count as leaked.
    """
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)


LONG = (
    *("tests/runtime/", "tests/simulation/", "tests/serve/test_frontends", "tests/cli/", "tests/test_sdk"),
    *("tests/planning/plan/test_serving", "tests/compute/test_recorded", "tests/memory/test_device"),
    *("tests/compute/test_quantization", "tests/kernels/test_gpu_compile", "tests/test_documented"),
)
"""How the names of files begin that take tens of seconds."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first: at the end, processes that run tests wait for each other only briefly.

    pytest-xdist keeps this order with ``--no-loadscope-reorder``; by itself it begins with the files of many tests, and
    ends with those that start clusters.
    """
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What workers keep between starts goes to a folder of this run, not to the user's; its processes share it."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAMINA_CACHE_DIR", str(shared / "cache"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _forked_workers() -> Iterator[None]:
    """Fork the workers that tests start in their own process. Those of servers and of agents start as users' do."""
    from lamina.cluster import local_workers
    from tests.support.forked_workers import Servers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_workers, "start_process", Servers().start_process)
        yield
