"""All-reduce algorithms: one file each, and one line in this list."""

# in the order of listings and docs
# isort: off
from narrowcast.collectives.algorithms import two_shot as two_shot
from narrowcast.collectives.algorithms import one_shot as one_shot
from narrowcast.collectives.algorithms import ring as ring
from narrowcast.collectives.algorithms import tree as tree
from narrowcast.collectives.algorithms import doubling as doubling
from narrowcast.collectives.algorithms import hierarchical as hierarchical
from narrowcast.collectives.algorithms import native_sum as native_sum
