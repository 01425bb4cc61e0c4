"""A cluster in a box: hosts in network namespaces, joined by links that hold a rate. Needs Linux and root.

Names are imported at their first use, so that `import narrowcast` stays free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowcast.lazy import lazy_front

if TYPE_CHECKING:
    from narrowcast.lab.check import TOLERANCE as TOLERANCE
    from narrowcast.lab.check import RateCheck as RateCheck
    from narrowcast.lab.check import check_rates as check_rates
    from narrowcast.lab.connection import LabError as LabError
    from narrowcast.lab.connection import clean as clean
    from narrowcast.lab.job import Job as Job
    from narrowcast.lab.job import Line as Line
    from narrowcast.lab.job import Policy as Policy
    from narrowcast.lab.job import Process as Process
    from narrowcast.lab.job import Result as Result
    from narrowcast.lab.lab import Counters as Counters
    from narrowcast.lab.lab import Lab as Lab
    from narrowcast.lab.lab import check_machine as check_machine
    from narrowcast.lab.launch import DEFAULTS as DEFAULTS
    from narrowcast.lab.launch import INTERFACE as INTERFACE
    from narrowcast.lab.launch import find_mpirun as find_mpirun
    from narrowcast.lab.topology import MOST_HOSTS as MOST_HOSTS
    from narrowcast.lab.topology import parse_rate as parse_rate

HOMES = {
    "TOLERANCE": "check",
    "RateCheck": "check",
    "check_rates": "check",
    "LabError": "connection",
    "clean": "connection",
    "Job": "job",
    "Line": "job",
    "Policy": "job",
    "Process": "job",
    "Result": "job",
    "Counters": "lab",
    "Lab": "lab",
    "check_machine": "lab",
    "DEFAULTS": "launch",
    "INTERFACE": "launch",
    "find_mpirun": "launch",
    "parse_rate": "topology",
    "MOST_HOSTS": "topology",
}
"""Every public name and the module that holds it."""

__getattr__, __dir__, __all__ = lazy_front(__name__, HOMES)
