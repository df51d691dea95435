"""What is measured once is found again; what cannot be kept is not an error."""

from pathlib import Path

import pytest

from lamina.kernels import tuning_cache


def test_what_was_saved_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINA_CACHE_DIR", str(tmp_path))
    path = tuning_cache.file_for("speeds", "NVIDIA H200", "1.0")
    assert tuning_cache.load(path, dict[str, float]) is None
    tuning_cache.save(path, {"read": 4.8})
    assert tuning_cache.load(path, dict[str, float]) == {"read": 4.8}
    assert tuning_cache.load(path, dict[str, list[int]]) is None, "written by another version"


def test_a_place_that_cannot_be_written_to_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LAMINA_CACHE_DIR", str(tmp_path / "file"))
    tuning_cache.save(tuning_cache.file_for("speeds", "cpu"), 1.0)
    assert "cannot be stored" in caplog.text
