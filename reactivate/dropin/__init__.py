"""Other libraries' checkpoint functions, with their signatures, on this engine.

`dropin.torch` has those of `torch.utils.checkpoint`, `dropin.xla` that of torch_xla, `dropin.transformer_engine` that of
TransformerEngine. `dropin.install()` puts the first in the place of torch's own wherever these are bound, so that every
library that calls them runs on this engine without an edit.
"""

from reactivate.dropin import torch, transformer_engine, xla
from reactivate.dropin._install import Installation, install

__all__ = ["Installation", "install", "torch", "transformer_engine", "xla"]
