"""State that a recomputation must see as its forward saw it: noted, rewound in place, and put back."""
