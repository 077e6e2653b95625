"""Notes on a pass over a region: its ops, checksums, lines of code, stale tensors, observers."""
