"""Text for people: words, tables, warnings."""
