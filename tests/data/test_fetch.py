"""Fetching: from where it stopped, checked before anyone sees it, and clear words where it cannot be."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from data.server import Server, serving

from narrowcast.data.fetch import DataError, debian, fetch, npm

CONTENT = bytes(range(256)) * 5000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def test_a_connection_that_breaks_is_taken_up_where_it_broke(tmp_path: Path) -> None:
    with serving(Server(CONTENT, break_after=500_000, breaks=2)) as server:
        path = fetch(server.address, tmp_path / "file", SHA256)
    assert path.read_bytes() == CONTENT
    assert server.asked == [None, "bytes=500000-", "bytes=1000000-"]


def test_a_part_of_an_earlier_call_is_continued(tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT[:1000])
    seen: list[tuple[int, int | None]] = []
    with serving(Server(CONTENT)) as server:
        path = fetch(server.address, tmp_path / "file", SHA256, lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert server.asked == ["bytes=1000-"]
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert not (tmp_path / "file.part").exists()


def test_a_server_without_ranges_is_read_from_the_start(tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(b"something else")
    with serving(Server(CONTENT, ranges=False)) as server:
        assert fetch(server.address, tmp_path / "file", SHA256).read_bytes() == CONTENT


def test_a_part_that_is_complete_already_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT)
    with serving(Server(CONTENT)) as server:
        assert fetch(server.address, tmp_path / "file", SHA256).read_bytes() == CONTENT


def test_a_file_that_is_here_is_not_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    with serving(Server(b"")) as server:
        fetch(server.address, tmp_path / "file", SHA256)
    assert server.asked == []


def test_what_has_another_checksum_is_thrown_away(tmp_path: Path) -> None:
    with serving(Server(CONTENT[:-1])) as server, pytest.raises(DataError, match=f"expected {SHA256}"):
        fetch(server.address, tmp_path / "file", SHA256)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_not_there_leaves_the_part_and_says_so(tmp_path: Path) -> None:
    with serving(Server(CONTENT)) as server:
        pass
    (tmp_path / "file.part").write_bytes(CONTENT[:1000])
    with pytest.raises(DataError, match="1000 bytes are kept, call again"):
        fetch(server.address, tmp_path / "file", SHA256)
    assert (tmp_path / "file.part").stat().st_size == 1000


def test_a_file_may_be_given_instead_of_an_address(tmp_path: Path) -> None:
    (tmp_path / "given").write_bytes(CONTENT)
    assert fetch(tmp_path / "given", tmp_path / "file", SHA256).read_bytes() == CONTENT
    with pytest.raises(DataError, match="no such file"):
        fetch(tmp_path / "missing", tmp_path / "other", SHA256)


def test_a_tool_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match=r"npm is not installed.*--from"):
        npm("some-package", "1.0.0")


@pytest.mark.parametrize("tool, ask", [("npm", npm), ("apt-get", debian)])
def test_a_tool_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tool: str, ask: object) -> None:
    script = tmp_path / tool
    script.write_text("#!/bin/sh\necho 'could not resolve the host' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match=r"could not resolve the host.*is there a network"):
        ask("some-package", "1.0.0")  # type: ignore[operator]


def test_addresses_are_read_from_what_the_tools_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for tool, said in (("npm", "http://here/p-1.tgz"), ("apt-get", "'http://here/p_1.deb' p_1.deb 12 SHA256:ab")):
        script = tmp_path / tool
        script.write_text(f'#!/bin/sh\necho "{said}"\n')
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert npm("p", "1") == "http://here/p-1.tgz"
    assert debian("p", "1") == "http://here/p_1.deb"
