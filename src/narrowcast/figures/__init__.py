"""Drawings as plain SVG: `svg` has what they are made of, `charts` whole charts, `plot` two axes to draw on."""

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
