"""For training frameworks, and for those who watch: each needs its own package, asked for when it is used."""

from narrowcast.parallel.integrations.hooks import HookState as HookState
from narrowcast.parallel.stats import Watched as Watched
