"""A new float format: this file, and nothing else. Six bits, and a bias that puts every value below one."""

from narrowcast.formats import register
from narrowcast.formats.floats import FloatFormat, Specials

TINY6 = register(FloatFormat("tiny6", exp_bits=3, man_bits=2, specials=Specials.FINITE, bias_override=8))
