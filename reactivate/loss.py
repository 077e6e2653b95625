"""Losses of large vocabularies, computed in parts."""

from reactivate._loss.chunked import chunked_cross_entropy

__all__ = ["chunked_cross_entropy"]
__dir__ = __all__.copy
