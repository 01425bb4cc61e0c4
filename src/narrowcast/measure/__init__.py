"""Measuring: a clock for every device, the slowest rank, a rank as a process, sums over a link, what the machine is.

Stands on `collectives`; what measures (parallel, bench, lab, predict, study) takes it from here.
"""

from narrowcast.measure.clock import CPU as CPU
from narrowcast.measure.clock import ROUNDS as ROUNDS
from narrowcast.measure.clock import DeviceClock as DeviceClock
from narrowcast.measure.clock import Timing as Timing
from narrowcast.measure.clock import interleaved as interleaved
from narrowcast.measure.clock import torch_threads as torch_threads
from narrowcast.measure.link import InterfaceCount as InterfaceCount
from narrowcast.measure.link import MatrixSum as MatrixSum
from narrowcast.measure.link import WireSum as WireSum
from narrowcast.measure.link import count_interface as count_interface
from narrowcast.measure.link import link_bytes as link_bytes
from narrowcast.measure.machine import LoadWatch as LoadWatch
from narrowcast.measure.machine import cpu_name as cpu_name
from narrowcast.measure.machine import describe_machine as describe_machine
from narrowcast.measure.machine import wait_until_quiet as wait_until_quiet
from narrowcast.measure.ranks import GPU_BACKEND as GPU_BACKEND
from narrowcast.measure.ranks import PROGRESS as PROGRESS
from narrowcast.measure.ranks import first_decides as first_decides
from narrowcast.measure.ranks import from_barrier as from_barrier
from narrowcast.measure.ranks import mean as mean
from narrowcast.measure.ranks import need_cuda as need_cuda
from narrowcast.measure.ranks import process_group as process_group
from narrowcast.measure.ranks import rank_device as rank_device
from narrowcast.measure.ranks import run_rank as run_rank
from narrowcast.measure.ranks import slowest as slowest
from narrowcast.measure.ranks import tell_progress as tell_progress
from narrowcast.measure.ranks import until_all_done as until_all_done
