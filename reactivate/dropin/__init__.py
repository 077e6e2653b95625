"""Other libraries' checkpoint functions, with their signatures, on this engine.

`dropin.torch` has those of `torch.utils.checkpoint`, `dropin.xla` that of torch_xla, `dropin.transformer_engine` that of
TransformerEngine, `dropin.megatron` those of Megatron-Core and `dropin.deepspeed` those of DeepSpeed. `dropin.install()` puts
the first in the place of torch's own wherever these are bound, so that every library that calls them runs on this engine
without an edit, and `dropin.uninstall()` takes it back; the `install()` of each of the last three does the same for that
library.
"""

from reactivate.dropin import deepspeed, megatron, torch, transformer_engine, xla
from reactivate.dropin._install import install, is_installed, uninstall
from reactivate.dropin._installation import Installation

__all__ = [
    "Installation",
    "deepspeed",
    "install",
    "is_installed",
    "megatron",
    "torch",
    "transformer_engine",
    "uninstall",
    "xla",
]
__dir__ = __all__.copy
