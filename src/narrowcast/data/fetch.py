"""Fetch one file: from where it stopped the last time, checked against its sha256 before anyone sees it.

Where a package lies is asked of the tools that know: npm and apt, as they are set up on this machine.
"""

from __future__ import annotations

import hashlib
import http.client
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

Progress = Callable[[int, int | None], None]
"""Called with the bytes that are here and, where known, the bytes in all."""

CHUNK = 1 << 18
TIMEOUT = 30.0
TOOL_SECONDS = 120
ATTEMPTS = 4
TOO_FAR = 416
"""The server's word for a range that begins at or after the end: what we have is as long as the file or longer."""


class DataError(RuntimeError):
    """A data set could not be fetched or read; the message says what to do."""


def fetch(where: str | Path, to: Path, sha256: str, progress: Progress | None = None) -> Path:
    """Bring `where` (a file or an address) to `to`. A part that an earlier call left is continued."""
    if to.is_file() and checksum(to) == sha256:
        return to
    to.parent.mkdir(parents=True, exist_ok=True)
    part = to.with_name(to.name + ".part")
    if "://" in str(where):
        _download(str(where), part, progress)
    elif Path(where).is_file():
        shutil.copyfile(where, part)
    else:
        raise DataError(f"{where}: there is no such file")
    digest = checksum(part)
    if digest != sha256:
        part.unlink()
        raise DataError(f"{where}: its sha256 is {digest}, expected {sha256}; it was thrown away, fetch it again")
    part.replace(to)
    return to


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(address: str, part: Path, progress: Progress | None) -> None:
    """Try a few times where the connection breaks."""
    failure: Exception | None = None
    for _ in range(ATTEMPTS):
        try:
            failure = None
            if _continue(address, part, progress):
                return
        except (OSError, http.client.HTTPException) as error:
            failure = error
            if isinstance(error, urllib.error.HTTPError):
                break
    kept = part.stat().st_size if part.exists() else 0
    raise DataError(
        f"{address}: {failure or 'the connection ended early'}; {kept} bytes are kept, call again to go on from there, "
        "or fetch the file elsewhere and give it with --from FILE"
    )


def _continue(address: str, part: Path, progress: Progress | None) -> bool:
    """One connection, from the byte where the last one ended; whether the file is complete now."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == TOO_FAR:
            return True
        raise
    with answer:
        resumed = answer.status == http.client.PARTIAL_CONTENT
        have = have if resumed else 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length else None
        with part.open("ab" if resumed else "wb") as file:
            while chunk := answer.read(CHUNK):
                file.write(chunk)
                have += len(chunk)
                if progress is not None:
                    progress(have, total)
    return total is None or have >= total


def npm(package: str, version: str) -> str:
    """The address of a package's archive in the registry that npm is configured for."""
    answer = _ask("npm", "view", f"{package}@{version}", "dist.tarball")
    return _first_match(r"\S+://\S+", answer, f"npm knows no {package}@{version}")


def debian(package: str, version: str) -> str:
    """The address of a Debian package on the mirror that apt is configured for."""
    answer = _ask("apt-get", "download", "--print-uris", f"{package}={version}")
    return _first_match(r"'([^']+://[^']+)'", answer, f"apt knows no {package} of version {version}")


def _ask(tool: str, *arguments: str) -> str:
    if shutil.which(tool) is None:
        raise DataError(
            f"{tool} is not installed: install it, or fetch the file elsewhere and give it with --from FILE"
        )
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=TOOL_SECONDS, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = str(getattr(error, "stderr", "") or error).strip().splitlines()
        raise DataError(
            f"{tool} {' '.join(arguments)}: {said[-1] if said else error}; is there a network? "
            "A file fetched elsewhere can be given with --from FILE"
        ) from error
    return done.stdout


def _first_match(pattern: str, text: str, otherwise: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise DataError(f"{otherwise}; fetch the file elsewhere and give it with --from FILE")
    return match.group(match.lastindex or 0)
