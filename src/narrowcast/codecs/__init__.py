"""Codecs: n floats <-> exactly nbytes(n) bytes. A new codec is one new file here and one line in registry.py.

What others ask of a codec (`takes_scale`, `agrees_on_scales`, `is_identity`, ...) `Codec` answers; no other package
looks at the class of one.
"""

from narrowcast.codecs.base import Codec as Codec
from narrowcast.codecs.base import Law as Law
from narrowcast.codecs.base import refuse_differences as refuse_differences
from narrowcast.codecs.base import refuse_low_rank as refuse_low_rank
from narrowcast.codecs.factors import KeptFactors as KeptFactors
from narrowcast.codecs.factors import Matrix as Matrix
from narrowcast.codecs.factors import MatrixPart as MatrixPart
from narrowcast.codecs.factors import Sent as Sent
from narrowcast.codecs.factors import exchanged_factors as exchanged_factors
from narrowcast.codecs.factors import factor_bytes as factor_bytes
from narrowcast.codecs.factors import following as following
from narrowcast.codecs.factors import name_and_side as name_and_side
from narrowcast.codecs.factors import parts_of as parts_of
from narrowcast.codecs.factors import simulate_low_rank as simulate_low_rank
from narrowcast.codecs.feedback import ErrorFeedback as ErrorFeedback
from narrowcast.codecs.planned import PlanCodec as PlanCodec
from narrowcast.codecs.registry import all_specs as all_specs
from narrowcast.codecs.registry import codec as codec
from narrowcast.codecs.registry import low_rank_specs as low_rank_specs
from narrowcast.codecs.report import SLACK as SLACK
from narrowcast.codecs.report import ErrorReport as ErrorReport
from narrowcast.codecs.report import error_report as error_report
from narrowcast.codecs.scaled import largest_finite as largest_finite
