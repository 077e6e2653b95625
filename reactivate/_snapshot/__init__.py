"""State that a region must see again; this room knows nothing of regions."""
