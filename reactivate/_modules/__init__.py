"""Modules: what their blocks are, a second identity of one, and something else in the place of a `forward`."""
