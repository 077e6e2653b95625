"""What torch has no public name for: the only importer of its private ones.

Each file is about one concept of torch's. Each private name says why no public one serves, what it is relied on for, which a
probe tries out when the package is imported, and what takes its place where it is gone (see `ways`).
"""
