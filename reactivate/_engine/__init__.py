"""The engine: one region's forward pass, and its recomputations. It is given guards and imports none."""
