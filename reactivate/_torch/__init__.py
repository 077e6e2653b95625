"""Private names of torch: this room is their only importer.

Each file is about one concept of torch's. Each private name says why no public one serves, what it is relied on for, and what
takes its place where it is gone (see `ways`): a probe tries out then whether the name does it, when the package is imported.
"""
