"""The backward's side of a region: tensors that autograd saved, recomputed when it asks for the first of them."""

from __future__ import annotations

import functools
from _thread import get_ident
from weakref import ref

from torch import Tensor

from reactivate._engine.accounts import NotKept, counting_threads, note_shortage
from reactivate._engine.barriers.fencing import FencedRecomputation
from reactivate._engine.kept_calls.kept import SiteSlot
from reactivate._engine.kept_calls.saved_sites import ForwardLog
from reactivate._engine.mismatch import refusals
from reactivate._engine.recompute import recompute
from reactivate._engine.record import (
    Record,
    Slot,
    observers,
    tell,
)
from reactivate._engine.requests import idle as idle_storages, refuse_silence
from reactivate._engine.sharing import current_group, groups, is_read_by_another
from reactivate._torch.autograd import (
    current_backward,
    on_backward_end,
)
from reactivate._torch.dynamo import leave_out_of_graphs


class BackwardSide(Record):
    """A record that a backward goes through."""

    __slots__ = ("forward_log",)
    forward_log: ForwardLog | None  # of the calls that the policy saves

    def unpack(self, slot: Slot) -> Tensor:
        """The backward wants what `slot` stands for."""
        value = slot.value
        if value is None:
            with self.lock:  # autograd has a thread for each device; the one that comes second finds its value
                while (value := slot.value) is None:  # again, if another backward has taken it, or let go of it
                    if isinstance(slot, SiteSlot) and slot.kept is not None and self.tokens is None:
                        return self._load(slot)
                    if self.tokens is not None and self.forward_log is not None:
                        self.forward_log.rerun_all("a backward inside of the region reads what is there by then")
                    if counting_threads and get_ident() in counting_threads:
                        raise NotKept
                    self._recompute()
                self._limit_lifetime()
        if value._version != slot.version:
            raise self.options.exception(refusals.written_after_saved(self, slot))
        if not slot.is_read_again and not (groups and is_read_by_another()):
            slot.value = None
        return value

    def _recompute(self, gradient: Tensor | None = None) -> Tensor | None:
        """Fill the slots; what a backward has brought to an exit is given back behind the fence."""
        if idle_storages:
            refuse_silence()
        behind = None if self.fence is None else FencedRecomputation(*self.fence, gradient)
        if observers:
            tell(self.context, "recomputation_begins", self)
        try:
            recompute(self, behind)
        except BaseException as error:
            note_shortage(error)
            raise
        return None if behind is None else behind.gradient

    def recompute_behind(self, gradient: Tensor) -> Tensor | None:
        """A backward has come to an exit: what it will read of the region is computed from here on, not before."""
        with self.lock:
            slots = [slot for reference, *_ in self.saved if (slot := reference()) is not None]
            is_filled = any(slot.value is not None for slot in slots)  # from another exit, or for another backward
            if is_filled or not any(map(_is_empty, slots)):
                return gradient
            fenced = self._recompute(gradient)
            self._limit_lifetime()
            return fenced

    def _load(self, slot: SiteSlot) -> Tensor:
        """Return what a saved call keeps."""
        try:
            return slot.kept.load()  # type: ignore[no-any-return]
        except RuntimeError as error:
            if not refusals.is_of_a_write(error):
                raise
            raise self.options.exception(refusals.written_after_saved(self, slot)) from None

    def _limit_lifetime(self) -> None:
        """See to it that what was recomputed goes, also if the graph and its slots are retained."""
        group = current_group() if groups else None
        if group is not None:
            group.keep(self)
        elif len(self.saved) == 1 and self.fence is None:  # it has been taken already
            return
        elif current_backward() == -1:
            self.forget()  # somebody looks at `grad_fn._saved_...`
        else:
            on_backward_end(functools.partial(_forget, ref(self)))


leave_out_of_graphs(BackwardSide.unpack)


def _is_empty(slot: Slot) -> bool:
    """Return whether only a recomputation can fill it."""
    return slot.value is None and getattr(slot, "kept", None) is None


def _forget(reference: ref[BackwardSide]) -> None:
    region = reference()
    if region is not None:
        region.forget()
