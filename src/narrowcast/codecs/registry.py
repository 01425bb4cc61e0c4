"""The list of codecs, and `codec(spec)`."""

from __future__ import annotations

import difflib
from functools import lru_cache

from narrowcast.codecs.base import Codec
from narrowcast.codecs.cast import Cast
from narrowcast.codecs.haar import Haar
from narrowcast.codecs.low_rank import AlternatingRank, LowRank, Rank
from narrowcast.codecs.mstop import MsTop
from narrowcast.codecs.planned import Affine, NvFp4, Signs
from narrowcast.codecs.rotated import Rotated
from narrowcast.codecs.scaled import Scaled, every_small_format
from narrowcast.codecs.spec import Spec, parse
from narrowcast.codecs.spike import Spike
from narrowcast.codecs.top import Top
from narrowcast.codecs.transformed import Transformed
from narrowcast.formats import all_formats, names_in_use, on_unregister

# asked in this order; Scaled takes any head that is a format, so it comes last
FAMILIES: list[type[Codec]] = [Cast, NvFp4, Signs, Affine, Scaled]
# an option of these changes what the rest of the spec encodes
TRANSFORMS: list[type[Transformed]] = [Top, MsTop, Spike, Rotated, Haar]
# an option of these makes another kind of call, for what the rest of the spec encodes
LOW_RANKS: list[type[LowRank]] = [Rank, AlternatingRank]


@lru_cache(maxsize=1024)
def _from_text(text: str) -> Codec:
    return _understand(parse(text))


def _understand(spec: Spec) -> Codec:
    for wrappers in (LOW_RANKS, TRANSFORMS):
        chosen = [one for one in wrappers if one.option in spec.options]
        if len(chosen) > 1:
            raise spec.error(f"choose one of {' and '.join(f'+{one.option}' for one in chosen)}")
        if chosen:
            return _wrap(chosen[0], spec)
    for family in FAMILIES:
        codec = _ask(family, spec)
        if codec is not None:
            return codec
    raise spec.error(f"unknown format {spec.head!r}; {_suggestion(spec.head)}")


on_unregister(_from_text.cache_clear)
# a format of such a name could not be used: specs mean the codec
names_in_use(lambda name: name in _own_heads())


def _wrap(wrapper: type[LowRank] | type[Transformed], spec: Spec) -> Codec:
    return wrapper.from_inner(spec, _understand(wrapper.inner_spec(spec)))


def _ask(family: type[Codec], spec: Spec) -> Codec | None:
    try:
        return family.from_spec(spec)
    except ValueError as error:
        # a format's own complaint does not know which spec it stands in
        raise error if "codec spec" in str(error) else spec.error(str(error)) from None


def codec(spec: str | Codec) -> Codec:
    """The codec that a spec such as "int8/256" names; see docs/specs.md. A codec is returned as it is."""
    if isinstance(spec, str):
        return _from_text(spec)
    if isinstance(spec, Codec):
        return spec
    raise TypeError(f"codec: give a spec such as 'int8/256', got {type(spec).__name__}")


def _own_heads() -> list[str]:
    return [head for family in FAMILIES for head in family.heads]


def _heads() -> list[str]:
    return _own_heads() + [fmt.name for fmt in all_formats() if fmt.bits <= 8]


def _suggestion(head: str) -> str:
    near = difflib.get_close_matches(head, _heads(), n=3, cutoff=0.5)
    hint = f"nearest: {', '.join(near)}; " if near else ""
    return f"{hint}`narrowcast codecs` lists them all"


def all_specs() -> list[str]:
    """The canonical spec of every listed codec: the examples of each family, and one for each small format."""
    written = [text for family in [*FAMILIES, *TRANSFORMS] for text in family.examples] + every_small_format()
    return list(dict.fromkeys(str(codec(text)) for text in written))


def low_rank_specs() -> list[str]:
    """The same of those that name another kind of call: what goes over flat values has no use for them."""
    return [str(codec(text)) for family in LOW_RANKS for text in family.examples]
