"""Inspection: a step of a model run plain and checkpointed, and what it keeps."""
