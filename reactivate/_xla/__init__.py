"""Lazy compilers, and what nothing else needs: fences for recomputations, and the devices of XLA and torch_tpu."""
