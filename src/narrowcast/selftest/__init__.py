"""Proof on the user's own machines: what ranks compute against the simulator and the reference, and whether few bits
pay on their link.
"""

from narrowcast.selftest.checks import SECTIONS as SECTIONS
from narrowcast.selftest.checks import SPECS as SPECS
from narrowcast.selftest.checks import Found as Found
from narrowcast.selftest.checks import Given as Given
from narrowcast.selftest.checks import Scope as Scope
from narrowcast.selftest.checks import options as options
from narrowcast.selftest.checks import same as same
from narrowcast.selftest.checks import specs_for as specs_for
from narrowcast.selftest.checks import takes as takes
from narrowcast.selftest.checks import values as values
from narrowcast.selftest.runner import Report as Report
from narrowcast.selftest.runner import run as run
from narrowcast.selftest.runner import run_alone as run_alone
