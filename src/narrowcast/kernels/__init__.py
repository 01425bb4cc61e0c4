"""How codes are computed: `ops` says what each op promises, `reference` is the oracle, `native` and Triton are fast.

Other packages take names from here. Five modules are used as such, since the names in them say too little alone:
`ops` (`ops.encode`), `native` (`native.set_isa`), `reference` with its `blocks`, `matmul` (`matmul.explain`)
and `low_rank`.
"""

from narrowcast.kernels import low_rank as low_rank
from narrowcast.kernels import matmul as matmul
from narrowcast.kernels import native as native
from narrowcast.kernels import ops as ops
from narrowcast.kernels import reference as reference
from narrowcast.kernels import triton_loader as triton_loader
from narrowcast.kernels.arithmetic import NO_FINISH as NO_FINISH
from narrowcast.kernels.arithmetic import Feedback as Feedback
from narrowcast.kernels.arithmetic import Finish as Finish
from narrowcast.kernels.arithmetic import keeps_subnormals as keeps_subnormals
from narrowcast.kernels.arithmetic import plus as plus
from narrowcast.kernels.arithmetic import saturate as saturate
from narrowcast.kernels.arithmetic import with_one_nan_ as with_one_nan_
from narrowcast.kernels.checks import FLOATS as FLOATS
from narrowcast.kernels.checks import Stretch as Stretch
from narrowcast.kernels.checks import are_plain_rows as are_plain_rows
from narrowcast.kernels.checks import check_apart as check_apart
from narrowcast.kernels.checks import check_count as check_count
from narrowcast.kernels.checks import check_floats as check_floats
from narrowcast.kernels.checks import check_integer as check_integer
from narrowcast.kernels.checks import check_plain as check_plain
from narrowcast.kernels.checks import check_same_device as check_same_device
from narrowcast.kernels.checks import check_seed as check_seed
from narrowcast.kernels.checks import check_written as check_written
from narrowcast.kernels.checks import mark_written as mark_written
from narrowcast.kernels.checks import overlap as overlap
from narrowcast.kernels.checks import shares_places as shares_places
from narrowcast.kernels.checks import stands_alone as stands_alone
from narrowcast.kernels.dispatch import OPS as OPS
from narrowcast.kernels.dispatch import KernelChoice as KernelChoice
from narrowcast.kernels.dispatch import explain as explain
from narrowcast.kernels.dispatch import runs_over_host as runs_over_host
from narrowcast.kernels.matmul.accumulator import FLOAT32 as FLOAT32
from narrowcast.kernels.matmul.accumulator import Accumulator as Accumulator
from narrowcast.kernels.matmul.accumulator import accumulator as accumulator
from narrowcast.kernels.noise import ALIGNMENT as ALIGNMENT
from narrowcast.kernels.noise import MASK as MASK
from narrowcast.kernels.noise import NO_NOISE as NO_NOISE
from narrowcast.kernels.noise import Noise as Noise
from narrowcast.kernels.noise import as_signed as as_signed
from narrowcast.kernels.noise import as_unsigned as as_unsigned
from narrowcast.kernels.noise import derive as derive
from narrowcast.kernels.ops import ROW_ALIGNMENT as ROW_ALIGNMENT
from narrowcast.kernels.ops import Rounder as Rounder
from narrowcast.kernels.ops import aligned_rows as aligned_rows
from narrowcast.kernels.ops import round_to as round_to
from narrowcast.kernels.ops import rounder as rounder
from narrowcast.kernels.ops import traced_round as traced_round
from narrowcast.kernels.plan import TINY as TINY
from narrowcast.kernels.plan import AnyPlan as AnyPlan
from narrowcast.kernels.plan import CastPlan as CastPlan
from narrowcast.kernels.plan import CustomPlan as CustomPlan
from narrowcast.kernels.plan import Method as Method
from narrowcast.kernels.plan import Plan as Plan
from narrowcast.kernels.plan import Rule as Rule
from narrowcast.kernels.plan import Store as Store
from narrowcast.kernels.plan import Transform as Transform
from narrowcast.kernels.plan import TransformPlan as TransformPlan
from narrowcast.kernels.reference import blocks as blocks
from narrowcast.kernels.reference.blocks import pack as pack
from narrowcast.kernels.reference.methods import find_scales as find_scales
from narrowcast.kernels.reference.rotation import MAX_ROTATED as MAX_ROTATED
from narrowcast.kernels.reference.rotation import MIN_ROTATED as MIN_ROTATED
from narrowcast.kernels.reference.rotation import Rotation as Rotation
from narrowcast.kernels.reference.rounding import SR_BITS as SR_BITS
