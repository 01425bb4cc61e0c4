"""One line for whoever trains: `attach`."""

from narrowcast.parallel.ddp import DDPState as DDPState
from narrowcast.parallel.ddp import ddp_hook as ddp_hook
from narrowcast.parallel.handle import Handle as Handle
from narrowcast.parallel.handle import attach as attach
from narrowcast.parallel.policy import TensorInfo as TensorInfo
from narrowcast.parallel.policy import schedule as schedule
