"""Profiles: simulated and measured steps."""
