"""Compressed collectives: who sends what to whom."""

from narrowcast.collectives.api import all_gather as all_gather
from narrowcast.collectives.api import all_reduce as all_reduce
from narrowcast.collectives.api import all_to_all as all_to_all
from narrowcast.collectives.api import broadcast as broadcast
from narrowcast.collectives.api import irecv as irecv
from narrowcast.collectives.api import isend as isend
from narrowcast.collectives.api import recv as recv
from narrowcast.collectives.api import reduce_scatter as reduce_scatter
from narrowcast.collectives.api import send as send
from narrowcast.collectives.residuals import Residuals as Residuals
from narrowcast.collectives.runtime.agreement import DisagreementError as DisagreementError
from narrowcast.collectives.runtime.channel import BrokenChannelError as BrokenChannelError
from narrowcast.collectives.transports.base import TransportError as TransportError
from narrowcast.collectives.work import Work as Work
