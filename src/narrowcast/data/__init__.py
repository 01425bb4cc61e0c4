"""Real data sets, checked byte by byte: `load` one that is here, `get` one that is not."""

from narrowcast.data.dataset import Dataset as Dataset
from narrowcast.data.dataset import folder as folder
from narrowcast.data.fetch import DataError as DataError
from narrowcast.data.library import SOURCES as SOURCES
from narrowcast.data.library import Here as Here
from narrowcast.data.library import get as get
from narrowcast.data.library import help_text as help_text
from narrowcast.data.library import listing as listing
from narrowcast.data.library import load as load
from narrowcast.data.library import pack as pack
from narrowcast.data.readers import read_folder as read_folder
