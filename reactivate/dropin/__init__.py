"""Other libraries' checkpoint functions, with their signatures, on this engine.

`dropin.torch` has those of `torch.utils.checkpoint`, `dropin.xla` that of torch_xla. `dropin.install()` puts the first in
the place of torch's own wherever these are bound, so that every library that calls them runs on this engine without an
edit.
"""

from reactivate.dropin import torch, xla
from reactivate.dropin._install import Installation, install

__all__ = ["Installation", "install", "torch", "xla"]
