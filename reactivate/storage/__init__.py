"""Storages: where tensors that are kept for the backward wait."""

from reactivate._types import Device, Storage
from reactivate.storage.host import Host

__all__ = ["Device", "Host", "Storage"]
