"""Resources of this machine within the limits of a control group."""

from pathlib import Path

import psutil
import pytest

from lamina.worker import process

GIB = 1 << 30


@pytest.mark.parametrize(
    ("limit", "used", "cached", "free"),
    [(8, 7, 5, 6), (8, 7, 0, 1), (8, 2, 1, 7), (8, 9, 0, 0), ("max", 7, 5, 100), (200, 7, 5, 100)],
)
def test_files_that_are_only_cached_leave_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | str, used: int, cached: int, free: int
) -> None:
    """In GiB; the machine has 100 free."""
    monkeypatch.setattr(process, "CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 100 * GIB}))
    (tmp_path / "memory.max").write_text(f"{limit if limit == 'max' else int(limit) * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{used * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\nfile {cached * GIB + 5}\ninactive_file {cached * GIB}\n")
    assert process.free_memory() == free * GIB


def test_where_nothing_bounds_it_the_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CGROUP", tmp_path)
    assert 0 < process.free_memory() <= psutil.virtual_memory().total
