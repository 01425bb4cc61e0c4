"""`python -m golden` in tests/: compare with hashes.json. `--write` renews it, and the diff shows what changed."""

from __future__ import annotations

import sys

from golden.hashes import ALL, compared, written


def main() -> int:
    if "--write" in sys.argv[1:]:
        written()
        return 0
    different = compared(ALL)
    for name in different:
        print(f"differs: {name}")
    print(f"{len(different)} differ")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
