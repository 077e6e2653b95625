"""A fuzzer: random stateful training programs, each run plain and checkpointed, and compared bit by bit.

Run it with `python -m fuzz --seconds 600` or `make fuzz SECONDS=600`.
"""
