"""One line for whoever trains: `attach`."""

from narrowcast.parallel.attach import attach as attach
from narrowcast.parallel.ddp.hook import DDPState as DDPState
from narrowcast.parallel.ddp.hook import ddp_hook as ddp_hook
from narrowcast.parallel.handle import Handle as Handle
from narrowcast.parallel.local_sgd.local_sgd import LocalSGD as LocalSGD
from narrowcast.parallel.policy import TensorInfo as TensorInfo
from narrowcast.parallel.policy import schedule as schedule
from narrowcast.parallel.wires import Wires as Wires
