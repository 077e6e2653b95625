"""Tensors handed to a storage and taken back: inputs of regions, results of saved calls."""
