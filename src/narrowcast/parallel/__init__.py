"""One line for whoever trains: `attach`."""

from narrowcast.parallel.ddp import DDPState as DDPState
from narrowcast.parallel.ddp import ddp_hook as ddp_hook
from narrowcast.parallel.handle import Handle as Handle
from narrowcast.parallel.handle import attach as attach
from narrowcast.parallel.local import LocalSGD as LocalSGD
from narrowcast.parallel.policies import Assignment as Assignment
from narrowcast.parallel.policies import AutoScale as AutoScale
from narrowcast.parallel.policies import GradientDiversity as GradientDiversity
from narrowcast.parallel.policy import TensorInfo as TensorInfo
from narrowcast.parallel.policy import schedule as schedule
from narrowcast.parallel.wires import Wires as Wires
