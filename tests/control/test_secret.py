"""A cluster's secret: kept where nobody else reads it, and all keys come from it."""

import os
import resource
import stat
from pathlib import Path

import pytest
import zmq

from lamina.control import secret
from lamina.core.errors import ConfigError


def test_a_file_is_made_for_its_owner_alone_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    previous = os.umask(0)
    try:
        made = secret.from_file(file)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert secret.from_file(file) == made
    assert len(made.data) == 32


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    secret.from_file(file)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"has mode {mode:03o}, .* chmod 600"):
        secret.from_file(file)


@pytest.mark.parametrize("text", ["", "secret", "ab" * 31, "ab" * 33, "xy" * 32])
def test_a_file_of_anything_else_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "secret"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="is not a cluster secret"):
        secret.from_file(file)


def test_who_finds_a_file_finds_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine starts just before this one wrote its own; then no file may be so long, as on a full disk."""
    file = tmp_path / "secret"
    found: list[secret.Secret] = []
    make = secret.new

    def new_beside_another() -> secret.Secret:
        made = make()
        if not found:
            found.append(made)
            found.append(secret.from_file(file))
        return made

    monkeypatch.setattr(secret, "new", new_beside_another)
    assert secret.from_file(file) == found[1] != found[0]
    assert secret.from_file(file) == found[1]
    assert os.listdir(tmp_path) == ["secret"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(ConfigError, match="cannot be written"):
            secret.from_file(tmp_path / "other")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == ["secret"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be written to .*nowhere"):
        secret.from_file(tmp_path / "nowhere" / "secret")
    with pytest.raises(ConfigError, match="cannot read the cluster secret in"):
        secret.from_file(tmp_path)


def test_every_purpose_has_a_key_of_its_own_and_no_key_tells_the_secret() -> None:
    one, other = secret.new(), secret.new()
    names = ["engine", "compute0", "memory0"]
    keys = [each.curve_keys(name)[1] for each in (one, other) for name in names]
    keys += [one.data_plane, other.data_plane]
    assert len(set(keys)) == len(keys)
    assert one.data not in keys
    assert secret.Secret(one.data).curve_keys("compute0") == one.curve_keys("compute0")
    public, private = one.curve_keys("compute0")
    assert zmq.curve_public(private) == public
    assert one.data.hex() not in repr(one) and repr(one.data) not in repr(one)


def test_the_variable_serves_where_no_file_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = secret.from_file(tmp_path / "secret")
    assert secret.configured(None) is None
    monkeypatch.setenv("LAMINA_SECRET", made.data.hex())
    assert secret.configured(None) == made == secret.configured(tmp_path / "secret", create=False)
    monkeypatch.setenv("LAMINA_SECRET", "12")
    with pytest.raises(ConfigError, match="LAMINA_SECRET is not a cluster secret: it holds 2 characters") as caught:
        secret.configured(None)
    assert "'12'" not in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        secret.configured(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()
