"""The key file: what it may hold, and that no mistake in it shows a key."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import pytest

from gemmwire_service import new_key
from gemmwire_service.errors import OutputError, SettingsError
from gemmwire_service.keys import ADMIN, INFER, Keys, key_of, make_key, parse_keys, read_keys

HASH = "sha256:" + "0" * 63 + "1"


def test_a_key_is_found_by_all_of_its_bytes_and_nothing_else() -> None:
    """Guards: a comparison of a prefix, of the hash instead of the key, or without regard to case."""
    key = make_key()
    line = key_of("k", [INFER], key).line()
    keys = parse_keys("f", line)
    found = keys.find(key.encode())
    assert found is not None
    assert (found.name, set(found.scopes)) == ("k", {INFER})
    wrong = ["", key[:-1], key + "A", key.swapcase(), key[4:], line.split()[2], line.split()[2][7:], "k"]
    assert [each for each in wrong if keys.find(each.encode()) is not None] == []


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: ==, which ends at the first byte that differs, and a search that ends at the key that fits."""
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def spy(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return compare(a, b)

    keys = [make_key() for _ in range(5)]
    ring = Keys(key_of(f"k{i}", [INFER], key) for i, key in enumerate(keys))
    monkeypatch.setattr("gemmwire_service.keys.hmac.compare_digest", spy)
    for shown in (keys[0], keys[4], "none of them", ""):
        compared.clear()
        ring.find(shown.encode())
        assert len(compared) == 5
        assert {b for _, b in compared} == {hashlib.sha256(shown.encode()).digest()}


def test_drawn_keys_are_long_and_never_the_same() -> None:
    keys = {make_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) == 47 and key.startswith("gmw_") for key in keys)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("", "no key", id="empty"),
        pytest.param("# nothing\n\n", "no key", id="comments"),
        pytest.param("a infer", "line 1: 2 words", id="no-hash"),
        pytest.param(f"a infer {HASH} x", "line 1: 4 words", id="more"),
        pytest.param("\na infer gmw_SECRET", "line 2: the third word", id="key-itself"),
        pytest.param("gmw_SECRET infer " + HASH, "line 1: a key's name", id="key-as-name"),
        pytest.param("gmw_SECRET", "line 1: 1 words", id="key-alone"),
        pytest.param("a infer sha256:" + "G" * 64, "the third word", id="no-hexadecimals"),
        pytest.param("a infer sha512:" + "0" * 128, "the third word", id="another-hash"),
        pytest.param(f"a SECRET {HASH}", "the scopes must be", id="scope"),
        pytest.param(f"a infer, {HASH}", "the scopes must be", id="comma"),
        pytest.param(f"a infer {HASH}\na admin sha256:{'2' * 64}", "line 2: its name or", id="same-name"),
        pytest.param(f"a infer {HASH}\nb admin {HASH}", "line 2: its name or", id="same-key"),
    ],
)
def test_a_line_that_is_none_is_refused_by_its_number(text: str, words: str) -> None:
    """Guards: a key that does not work and nobody knows why; a key that was pasted, in a log."""
    with pytest.raises(SettingsError, match=words) as caught:
        parse_keys("file", text)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"k infer \xc3\xa4"], ids=["binary", "utf-8"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(SettingsError, match="ASCII"):
        read_keys(str(tmp_path / "f"))
    with pytest.raises(SettingsError, match="cannot be read"):
        read_keys(str(tmp_path))
    with pytest.raises(SettingsError, match="cannot be read"):
        read_keys(str(tmp_path / "nowhere"))


def test_the_command_writes_the_hash_and_prints_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards: a key that does not open; the key itself, kept in the file."""
    path = tmp_path / "keys"
    assert new_key.main(["reader", "--file", str(path)]) == 0
    reader = capsys.readouterr().out.strip()
    assert new_key.main(["root", "--scope", "admin", "--scope", "infer", "--file", str(path)]) == 0
    root = capsys.readouterr().out.strip()
    found = [read_keys(str(path)).find(key.encode()) for key in (reader, root)]
    assert [(key.name, set(key.scopes)) for key in found if key] == [
        ("reader", {INFER}),
        ("root", {INFER, ADMIN}),
    ]
    assert reader not in path.read_text()
    assert path.stat().st_mode & 0o022 == 0
    assert list(tmp_path.iterdir()) == [path]


def test_the_command_without_a_file_prints_both(capsys: pytest.CaptureFixture[str]) -> None:
    new_key.main(["k"])
    key, line = capsys.readouterr().out.splitlines()
    assert parse_keys("f", line).find(key.encode())


def test_the_command_spoils_no_file(tmp_path: Path) -> None:
    """Guards: a key file that a second key of the same name, or a full disk, makes useless."""
    path = tmp_path / "keys"
    new_key.main(["k", "--file", str(path)])
    before = path.read_bytes()
    with pytest.raises(SettingsError, match="its name or its key is there"):
        new_key.main(["k", "--file", str(path)])
    with pytest.raises(SettingsError, match="name"):
        new_key.main(["a b", "--file", str(path)])
    with pytest.raises(OutputError, match="cannot be written"):
        new_key.main(["k", "--file", str(tmp_path / "nowhere" / "keys")])
    assert path.read_bytes() == before
    other = tmp_path / "text"
    other.write_text("something else")
    with pytest.raises(SettingsError):
        new_key.main(["k", "--file", str(other)])
    assert other.read_text() == "something else"


def test_a_file_that_everybody_may_write_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    new_key.main(["k", "--file", str(path)])
    read_keys(str(path))
    assert not caplog.text
    path.chmod(0o666)
    read_keys(str(path))
    assert "can write to the key file" in caplog.text
