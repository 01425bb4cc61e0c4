"""Drawings as plain SVG: `svg` has what they are made of and two axes to draw on, `charts` whole charts."""

from narrowcast.figures.charts import Series as Series
from narrowcast.figures.svg import COLOURS as COLOURS
from narrowcast.figures.svg import LINE as LINE
from narrowcast.figures.svg import WIDTH as WIDTH
from narrowcast.figures.svg import Axis as Axis
from narrowcast.figures.svg import Markup as Markup
from narrowcast.figures.svg import Plot as Plot
from narrowcast.figures.svg import drawing as drawing
from narrowcast.figures.svg import join as join
from narrowcast.figures.svg import line as line
from narrowcast.figures.svg import lines as lines
from narrowcast.figures.svg import lone as lone
from narrowcast.figures.svg import mark as mark
from narrowcast.figures.svg import number as number
from narrowcast.figures.svg import pad_range as pad_range
from narrowcast.figures.svg import place as place
from narrowcast.figures.svg import place_labels as place_labels
from narrowcast.figures.svg import points as points
from narrowcast.figures.svg import spread as spread
from narrowcast.figures.svg import tag as tag
from narrowcast.figures.svg import text as text
from narrowcast.figures.svg import text_width as text_width
from narrowcast.figures.svg import tick_names as tick_names
