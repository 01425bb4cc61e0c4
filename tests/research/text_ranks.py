"""A rank that trains several times in one process group: python text_ranks.py '[["--wire", "plain", ...], ...]'."""

from __future__ import annotations

import json
import sys
import time

from narrowcast_research.text import train

from narrowcast.measure import process_group

if __name__ == "__main__":
    with process_group():
        for words in json.loads(sys.argv[1]):
            train.run(train.parse(words), time.monotonic())
