"""A new codebook: this file, and nothing else. Squares, so that small numbers lie closer together."""

import narrowcast as nc

SQUARES = nc.Codebook([i * abs(i) / 49 for i in range(-7, 8)], name="squares4")
