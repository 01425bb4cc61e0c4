"""`attach(model, "auto")`: the wire of every tensor, found while training."""

from narrowcast.parallel.autopilot.arguments import auto as auto
from narrowcast.parallel.autopilot.history import Decided as Decided
from narrowcast.parallel.autopilot.history import Replay as Replay
from narrowcast.parallel.autopilot.history import half_road as half_road
from narrowcast.parallel.autopilot.history import lines as lines
from narrowcast.parallel.autopilot.history import replay as replay
from narrowcast.parallel.autopilot.link import DescribedLink as DescribedLink
from narrowcast.parallel.autopilot.link import DescribedRoad as DescribedRoad
from narrowcast.parallel.autopilot.pilot import Autopilot as Autopilot
