"""A policy on a whole model: `apply`, and what stands in the model while it is applied."""
