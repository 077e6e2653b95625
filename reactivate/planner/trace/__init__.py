"""Traces of a step: what is alive, op by op, on real tensors or fake ones."""
