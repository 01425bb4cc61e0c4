"""A process that owns a lab, run as a script: argv are the package's folder, how it ends, and perhaps `gpu`.

It prints its guard's pid when its ranks run, and goes on when a line comes in.
"""

from __future__ import annotations

import os
import signal
import sys
import types

# a stand-in for the package, so that torch is not imported
narrowcast = sys.modules["narrowcast"] = types.ModuleType("narrowcast")
narrowcast.__path__ = [sys.argv[1]]

from helpers import running, wait_until  # noqa: E402  beside this file

from narrowcast.lab import Lab  # noqa: E402


def main(end: str, gpu: bool) -> None:
    with Lab(2, "1gbit", gpu=gpu, delay="1ms") as lab:
        job = lab.start(["sh", "-c", "sleep 600 & setsid sleep 600 & wait"], grace=0.2)
        assert wait_until(lambda: running(lab, "sleep 600") == 4)
        assert lab._connection is not None
        print(lab._connection.guard.pid, flush=True)
        sys.stdin.readline()
        match end:
            case "exit":
                return
            case "exception":
                raise ZeroDivisionError
            case "_exit":
                os._exit(0)
            case "abort":
                os.abort()
            case "rank":
                job.signal(signal.SIGKILL, rank=0)
                job.wait()
            case "wait":
                job.wait()
            case "fork":
                os.fork()  # the child has a copy of the socket to the supervisor
                signal.pause()


if __name__ == "__main__":
    main(sys.argv[2], sys.argv[3:] == ["gpu"])
