"""The constructs that programs are made of, by name."""

from __future__ import annotations

from fuzz.construct import Construct
from fuzz.vocabulary import ambient, arguments, attributes, buffers, calculations, layers, parameters, randomness

CONSTRUCTS: dict[str, Construct] = {
    **calculations.CONSTRUCTS,
    **buffers.CONSTRUCTS,
    **layers.CONSTRUCTS,
    **parameters.CONSTRUCTS,
    **attributes.CONSTRUCTS,
    **randomness.CONSTRUCTS,
    **arguments.CONSTRUCTS,
    **ambient.CONSTRUCTS,
}
