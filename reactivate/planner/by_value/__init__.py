"""Treatments of a unit that save single calls: those that take the most time for each byte."""
