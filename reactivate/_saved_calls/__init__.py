"""Saved calls: calls inside of a region whose results a policy keeps, so that recomputations skip them."""
