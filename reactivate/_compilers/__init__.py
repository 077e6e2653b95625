"""Compilers: regions inside of a trace of torch.compile."""
