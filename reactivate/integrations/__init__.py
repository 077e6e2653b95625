"""Where other libraries plug in.

`register_fence` is for a lazy or compiled device, whose compiler would merge a recomputation with the forward pass.
"""

from reactivate._backends import Fence, register_fence

__all__ = ["Fence", "register_fence"]
