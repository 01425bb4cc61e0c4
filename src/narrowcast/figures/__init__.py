"""Drawings as plain SVG: `svg` has what they are made of, `charts` whole charts, `plot` two axes to draw on."""

from narrowcast.figures.charts import Series as Series
from narrowcast.figures.plot import LINE as LINE
from narrowcast.figures.plot import WIDTH as WIDTH
from narrowcast.figures.plot import Plot as Plot
from narrowcast.figures.plot import drawing as drawing
from narrowcast.figures.plot import lines as lines
from narrowcast.figures.plot import number as number
from narrowcast.figures.plot import pad_range as pad_range
from narrowcast.figures.plot import place_labels as place_labels
from narrowcast.figures.plot import spread as spread
from narrowcast.figures.plot import text as text
from narrowcast.figures.plot import text_width as text_width
from narrowcast.figures.plot import tick_names as tick_names
from narrowcast.figures.svg import COLOURS as COLOURS
from narrowcast.figures.svg import Axis as Axis
from narrowcast.figures.svg import Markup as Markup
from narrowcast.figures.svg import join as join
from narrowcast.figures.svg import line as line
from narrowcast.figures.svg import lone as lone
from narrowcast.figures.svg import mark as mark
from narrowcast.figures.svg import place as place
from narrowcast.figures.svg import points as points
from narrowcast.figures.svg import tag as tag
