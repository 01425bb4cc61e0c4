"""A cluster in a box: hosts in network namespaces, joined by links that hold a rate. Needs root and iproute2."""

from .errors import LabError as LabError
from .job import Job as Job
from .job import Line as Line
from .job import Result as Result
from .lab import Counters as Counters
from .lab import Lab as Lab
