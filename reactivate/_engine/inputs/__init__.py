"""Inputs: the function of a region and its arguments, and all that a recomputation reads of them."""
