"""Training in parallel with fewer bits: `attach` for gradients, `Wires` for activations, `LocalSGD` between rounds.

`tensor`, `tensor_styles`, `expert`, `pipeline` and `integrations` are modules to import by name.
"""

from narrowcast.parallel import local_sgd as local_sgd
from narrowcast.parallel import overlap as overlap
from narrowcast.parallel import policy as policy
from narrowcast.parallel import seeds as seeds
from narrowcast.parallel import wires as wires
from narrowcast.parallel.attachment import attach as attach
from narrowcast.parallel.autopilot import Autopilot as Autopilot
from narrowcast.parallel.autopilot import DescribedLink as DescribedLink
from narrowcast.parallel.autopilot import DescribedRoad as DescribedRoad
from narrowcast.parallel.autopilot import Replay as Replay
from narrowcast.parallel.autopilot import auto as auto
from narrowcast.parallel.autopilot import errors as errors
from narrowcast.parallel.autopilot import half_road as half_road
from narrowcast.parallel.autopilot import lines as lines
from narrowcast.parallel.autopilot import replay as replay
from narrowcast.parallel.autopilot.solve import Problem as Problem
from narrowcast.parallel.autopilot.solve import solve as solve
from narrowcast.parallel.ddp import buckets as buckets
from narrowcast.parallel.ddp.buckets import BUCKET_BYTES as BUCKET_BYTES
from narrowcast.parallel.ddp.buckets import FIRST_BYTES as FIRST_BYTES
from narrowcast.parallel.ddp.buckets import assign_buckets as assign_buckets
from narrowcast.parallel.ddp.buckets import first_buckets as first_buckets
from narrowcast.parallel.ddp.buckets import rebuilt_buckets as rebuilt_buckets
from narrowcast.parallel.ddp.hook import DDPState as DDPState
from narrowcast.parallel.ddp.hook import ddp_hook as ddp_hook
from narrowcast.parallel.handle import Handle as Handle
from narrowcast.parallel.levels import inner_codec as inner_codec
from narrowcast.parallel.levels import inside_of as inside_of
from narrowcast.parallel.levels import list_nodes as list_nodes
from narrowcast.parallel.levels import nodes_by_host as nodes_by_host
from narrowcast.parallel.local_sgd.local_sgd import LocalSGD as LocalSGD
from narrowcast.parallel.local_sgd.settings import LocalUpdates as LocalUpdates
from narrowcast.parallel.overlap import Contention as Contention
from narrowcast.parallel.overlap import Span as Span
from narrowcast.parallel.overlap import WireDecision as WireDecision
from narrowcast.parallel.policy import MIN_VALUES as MIN_VALUES
from narrowcast.parallel.policy import Schedule as Schedule
from narrowcast.parallel.policy import TensorInfo as TensorInfo
from narrowcast.parallel.policy import Watch as Watch
from narrowcast.parallel.policy import Watching as Watching
from narrowcast.parallel.policy import schedule as schedule
from narrowcast.parallel.stats import TensorRow as TensorRow
from narrowcast.parallel.wires import Wires as Wires
from narrowcast.parallel.wires import activation_codecs as activation_codecs
