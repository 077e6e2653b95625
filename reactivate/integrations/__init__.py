"""Integrations: the places where other libraries plug in.

`integrations.lightning`, `integrations.transformers` and `integrations.accelerate` apply a policy while these train a model.
Each is imported by its own name, and imports its library: `from reactivate.integrations.lightning import ...`.

`integrations.recipe` reads the configurations of torchtune and torchtitan.

`register_fence` is for a lazy or compiled device, whose compiler would merge a recomputation with the forward pass.
"""

from reactivate._xla.fence import Fence, register_fence
from reactivate.integrations import recipe

__all__ = ["Fence", "recipe", "register_fence"]
__dir__ = __all__.copy
