"""Tensors without memory (`explain(fake=True)`): torch has no public name for them."""

from __future__ import annotations

from reactivate._torch.ways import find

FakeTensor, FakeTensorMode = find("torch._subclasses.FakeTensor"), find("torch._subclasses.FakeTensorMode")

# What runs with no fake tensor among its arguments can run for real: the fake mode is put aside for the time.
unset_fake_temporarily = find("torch._subclasses.fake_tensor.unset_fake_temporarily")

# What a fake tensor raises that is asked for its value.
DataDependentError: type[Exception] = find("torch._subclasses.fake_tensor.DataDependentOutputException")
