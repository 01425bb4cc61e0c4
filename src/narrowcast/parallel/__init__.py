"""One line for whoever trains: `attach`."""

from narrowcast.parallel.ddp.buckets import assign_buckets as assign_buckets
from narrowcast.parallel.ddp.buckets import first_buckets as first_buckets
from narrowcast.parallel.ddp.buckets import rebuilt_buckets as rebuilt_buckets
from narrowcast.parallel.ddp.hook import DDPState as DDPState
from narrowcast.parallel.ddp.hook import ddp_hook as ddp_hook
from narrowcast.parallel.handle import Handle as Handle
from narrowcast.parallel.handle import attach as attach
from narrowcast.parallel.local_sgd.local_sgd import LocalSGD as LocalSGD
from narrowcast.parallel.policy import TensorInfo as TensorInfo
from narrowcast.parallel.policy import schedule as schedule
from narrowcast.parallel.wires import Wires as Wires
