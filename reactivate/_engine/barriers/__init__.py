"""Barriers: regions on devices whose compiler would merge a recomputation with the forward pass."""
