"""Mismatches: recomputations that differ from their forward, how they are found, and the errors in words."""
