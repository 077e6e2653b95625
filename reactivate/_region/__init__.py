"""One call of a checkpointed region: its forward (`region`), and its recomputations (`recompute`)."""
