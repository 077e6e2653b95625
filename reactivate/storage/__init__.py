"""Storages: where tensors that are kept for the backward wait."""

from reactivate._types import Device, Storage
from reactivate.storage import contract
from reactivate.storage.disk import Disk
from reactivate.storage.host import Host
from reactivate.storage.sharded import Sharded

__all__ = ["Device", "Disk", "Host", "Sharded", "Storage", "contract"]
__dir__ = __all__.copy
