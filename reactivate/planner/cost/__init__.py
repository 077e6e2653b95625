"""Costs: time and memory of ops, devices and steps."""
