"""The solver: the fastest choice that fits. No torch."""
