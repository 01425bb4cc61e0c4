"""Local updates, exchanged now and then."""

from narrowcast.parallel.local_sgd.copies import Copies as Copies
from narrowcast.parallel.local_sgd.copies import consensus_of as consensus_of
from narrowcast.parallel.local_sgd.copies import pull as pull
from narrowcast.parallel.local_sgd.copies import seen as seen
from narrowcast.parallel.local_sgd.copies import to_send as to_send
from narrowcast.parallel.local_sgd.fragments import Clock as Clock
from narrowcast.parallel.local_sgd.fragments import deal as deal
from narrowcast.parallel.local_sgd.graph import ALL as ALL
from narrowcast.parallel.local_sgd.graph import Neighbourhood as Neighbourhood
from narrowcast.parallel.local_sgd.graph import seat as seat
from narrowcast.parallel.local_sgd.replica import Replica as Replica
from narrowcast.parallel.local_sgd.replica import WirePlan as WirePlan
from narrowcast.parallel.local_sgd.replica import variance as variance
from narrowcast.parallel.local_sgd.settings import LocalUpdates as LocalUpdates
