"""Other libraries' checkpoint functions, with their signatures, on this engine.

`dropin.torch` has those of `torch.utils.checkpoint`. `dropin.install()` puts them in the place of torch's own wherever
these are bound, so that every library that calls them runs on this engine without an edit.
"""

from reactivate.dropin import torch
from reactivate.dropin._install import Installation, install

__all__ = ["Installation", "install", "torch"]
