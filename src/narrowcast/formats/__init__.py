"""Number formats: what a code means. A new format is one new file here; nothing else changes."""

import importlib
import pkgutil

from narrowcast.formats.base import Format as Format
from narrowcast.formats.base import Kind as Kind
from narrowcast.formats.registry import Family as Family
from narrowcast.formats.registry import all_formats as all_formats
from narrowcast.formats.registry import families as families
from narrowcast.formats.registry import find as find
from narrowcast.formats.registry import format as format
from narrowcast.formats.registry import names_in_use as names_in_use
from narrowcast.formats.registry import on_unregister as on_unregister
from narrowcast.formats.registry import register as register
from narrowcast.formats.registry import register_family as register_family
from narrowcast.formats.registry import unregister as unregister

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

# after every file has registered itself
from narrowcast.formats.codebooks import Codebook as Codebook  # noqa: E402
from narrowcast.formats.codebooks import TableFormat as TableFormat  # noqa: E402
from narrowcast.formats.floats import FloatFormat as FloatFormat  # noqa: E402
from narrowcast.formats.floats import Specials as Specials  # noqa: E402
from narrowcast.formats.integers import Coding as Coding  # noqa: E402
from narrowcast.formats.integers import UniformFormat as UniformFormat  # noqa: E402
from narrowcast.formats.posits import PositFormat as PositFormat  # noqa: E402
