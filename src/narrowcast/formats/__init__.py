"""Number formats: what a code means. A new format is one new file here; nothing else changes."""

import importlib
import pkgutil

from narrowcast.formats.base import Format as Format
from narrowcast.formats.base import Kind as Kind
from narrowcast.formats.registry import all_formats as all_formats
from narrowcast.formats.registry import families as families
from narrowcast.formats.registry import find as find
from narrowcast.formats.registry import format as format
from narrowcast.formats.registry import register as register

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

from narrowcast.formats.codebooks import Codebook as Codebook  # noqa: E402  after every file has registered itself
