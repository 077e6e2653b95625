"""The engine: one region's forward pass, and its replays. It is given guards and imports none."""
