"""Storages in regions inside of regions: what is stored, loaded and let go of, how often, and every bit (Rules 2, 9, 13).

What a saved call keeps is stored each time that the call really runs: in the forward pass, and in the recomputations of
regions around its own. What the forward pass has stored is loaded once in each backward (a result that the call has saved
as well is stored once, and loaded for both), and goes with the graph; what a recomputation stores is not loaded, and goes
with it.
Only where what a storage gives for a tensor is a tensor, the region around keeps that no more than any other: then what
its recomputations store is loaded.
"""

from __future__ import annotations

import contextlib
import pathlib
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from journal import Journal
from memory import without_collector
from oracle import Case, Ran, assert_same, backward_twice, cotangents, double_backward, run
from surroundings import Failure
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import reactivate
from reactivate import policies
from reactivate._passes.observing import without_regions

# -- storages that count, and move what they are given ----------------------------------------------------------------


class Item:
    def __init__(self, kept: Any) -> None:
        self.kept = kept


class Trap:
    """Raises, once it has been called so often.

    Attributes:
        calls: how often; 0 for never.
        sprung: how often it has raised.
    """

    def __init__(self) -> None:
        self.calls = self.sprung = 0

    def __call__(self) -> None:
        if self.calls:
            self.calls -= 1
            if not self.calls:
                self.sprung += 1
                raise Failure


class Shelf:
    """Keeps NumPy arrays: the number of the tensor, and what is in it.

    Attributes:
        loads: how often each tensor was loaded, in the order in which they were stored.
        trap: called for each use.
    """

    def __init__(self, folder: pathlib.Path, trap: Callable[[], None] = lambda: None) -> None:
        self.folder = folder
        self.trap = trap
        self._saved, self._loaded = Journal(), Journal()

    def save(self, tensor: Tensor) -> Any:
        self.trap()
        assert tensor.is_contiguous() and not tensor.requires_grad
        number = len(self._saved)
        handle = self.put(numpy.array([number, *tensor.flatten().tolist()]))
        is_tensor = isinstance(handle, Tensor)
        is_expired = StorageWeakRef(handle.untyped_storage()).expired if is_tensor else is_gone(handle)
        self._saved.append((tensor.size(), tensor.dtype, is_expired))
        return handle

    def load(self, handle: Any) -> Tensor:
        self.trap()
        data = self.get(handle)
        number = int(data[0])
        self._loaded.append(number)
        size, dtype, _ = self._saved[number]
        return torch.tensor(data[1:], dtype=dtype).view(size)

    def held(self) -> int:
        """Count the tensors that are kept."""
        return sum(not is_expired() for *_, is_expired in self._saved)

    @property
    def loads(self) -> list[int]:
        counts = Counter(self._loaded)
        return [counts[number] for number in range(len(self._saved))]

    def put(self, data: Any) -> Any:
        return Item(data)

    def get(self, handle: Any) -> Any:
        return handle.kept


def is_gone(handle: Any) -> Callable[[], bool]:
    reference = weakref.ref(handle)
    return lambda: reference() is None


class Disk(Shelf):
    """Keeps files."""

    def put(self, data: Any) -> Any:
        path = self.folder / f"{int(data[0])}.npy"
        numpy.save(path, data)
        handle = Item(path)
        weakref.finalize(handle, path.unlink)
        return handle

    def get(self, handle: Any) -> Any:
        return numpy.load(handle.kept)

    def held(self) -> int:
        assert len(list(self.folder.iterdir())) == super().held()
        return super().held()


class Doubles(Shelf):
    """Keeps other tensors, which autograd can keep: so a region around the one that they are for drops them."""

    def put(self, data: Any) -> Any:
        return torch.from_numpy(data)

    def get(self, handle: Any) -> Any:
        return handle.numpy()


STORAGES = [Shelf, Disk, Doubles]


# -- a region inside of a region --------------------------------------------------------------------------------------


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        product = x @ w
        ctx.save_for_backward(x, w, product.cos())
        return product.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w, cosine = ctx.saved_tensors
        gradient = gradient * cosine
        return gradient @ w.t(), x.t() @ gradient


def random_product(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(x, 0.3) @ w


def tanh_of_product(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh()  # which it saves as well


KINDS: dict[str, tuple[Callable[..., Tensor], Any, int]] = {  # and how many tensors a call keeps
    "op": (torch.matmul, partial(policies.save_ops, "matmul"), 1),
    "Function": (lambda x, w: Product.apply(x, w), partial(policies.save_ops, Product), 2),
    "result": (reactivate.site(tanh_of_product, name="product"), partial(policies.save_names, "product"), 1),
    "name": (reactivate.site(random_product, name="product"), partial(policies.save_names, "product"), 3),
}


def inner(product: Callable[..., Tensor], x: Tensor, w: Tensor) -> Tensor:
    return product(x.sin(), w).tanh().exp()


def outer(product: Callable[..., Tensor], inside: Callable[..., Tensor], x: Tensor, w: Tensor) -> Tensor:
    x = product(x.tanh(), w).exp().tanh()
    return reactivate.site(inside, name="region")(x, w).tanh().exp()


def nested(
    kind: str, for_outer: Any, for_region: Any, for_inner: Any, around: Any = contextlib.nullcontext, **options: Any
) -> Case:
    """A case where each of the three is saved to the storage that is given for it, if there is one.

    `around` makes a context for the call of the region inside.
    """
    product, save, _ = KINDS[kind]
    parts = [save(storage=for_outer)] if for_outer else []
    parts += [policies.save_names("region", storage=for_region)] if for_region else []
    region = reactivate.checkpoint(
        partial(inner, product), policy=save(storage=for_inner) if for_inner else None, **options
    )

    def inside(x: Tensor, w: Tensor) -> Tensor:
        with around():
            return region(x, w)  # type: ignore[no-any-return]

    policy = policies.first_match(*parts) if parts else None
    return Case(reactivate.checkpoint(partial(outer, product, inside), policy=policy, **options), (leaf(), leaf()))


def leaf() -> Tensor:
    return torch.randn(4, 4, requires_grad=True)


def plainly(kind: str, backward: Any) -> Ran:
    with without_regions():
        return run(partial(nested, kind, None, None, None), None, backward)


# -- tests ------------------------------------------------------------------------------------------------------------


def chosen(shelves: list[Any], saved: Any) -> list[Any]:
    return [shelf if is_used else None for shelf, is_used in zip(shelves, saved)]


SAVED = [(True, False, False), (False, True, False), (False, False, True), (False, True, True), (True, True, True)]
of_all_kinds = pytest.mark.parametrize("kind", KINDS)
of_all_storages = pytest.mark.parametrize("storage", STORAGES)
of_what_is_saved = pytest.mark.parametrize("saved", SAVED, ids=["outer", "region", "inner", "region and inner", "all"])


@pytest.fixture
def folders(tmp_path: pathlib.Path) -> list[pathlib.Path]:
    found = [tmp_path / name for name in ("outer", "region", "inner")]
    for folder in found:
        folder.mkdir()
    return found


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("backwards", [1, 2])
@of_what_is_saved
@of_all_kinds
@of_all_storages
def test_stored_for_each_run_loaded_for_each_backward_and_let_go_of(
    storage: type[Shelf], kind: str, saved: Any, backwards: int, early_stop: bool, folders: list[pathlib.Path]
) -> None:
    shelves = [storage(folder) for folder in folders]
    held: list[list[int]] = []

    def note() -> None:
        held.append([shelf.held() for shelf in shelves])

    def backward(outputs: list[Tensor], inputs: dict[str, Tensor]) -> None:
        for number in range(1, backwards + 1):
            note()
            torch.autograd.backward(outputs, cotangents(outputs), retain_graph=number < backwards)
        note()

    plain = plainly(kind, backward)
    held.clear()
    used = chosen(shelves, saved)
    with without_collector():
        ours = run(partial(nested, kind, *used, early_stop=early_stop), None, backward)
    assert_same(plain, ours)
    outer_is, region_is, inner_is = saved
    inner_runs = 1 if region_is else 1 + backwards
    assert ours.regions == 1 + inner_runs and ours.recomputations == 2 * backwards

    each = KINDS[kind][2]  # so many tensors
    handles = each * inner_is if storage is Doubles else 0  # that the outer region sees
    stored = [each * outer_is, region_is * (1 + handles), each * inner_is]
    times = backwards * (2 if kind == "result" else 1)
    loads = [[times] * stored[0], ([backwards] + [times] * handles) * region_is, [times] * stored[2]]
    loads[2] += [0] * (stored[2] * (inner_runs - 1))
    if handles and not region_is:  # it drops them: what its recomputations store is loaded
        loads[2] = [0] * each + [times // backwards] * (each * backwards)
    assert [shelf.loads for shelf in shelves] == loads
    if handles:
        stored[2] = 0  # dropped, or handed on to the storage of the region's call
    assert held == [stored] * backwards + [[0, 0, 0]]


@pytest.mark.parametrize("of_inner", STORAGES)
@pytest.mark.parametrize("of_outer", STORAGES)
@of_all_kinds
def test_one_storage_for_both_or_one_for_each(
    kind: str, of_outer: type[Shelf], of_inner: type[Shelf], folders: list[pathlib.Path]
) -> None:
    one, other = of_outer(folders[0]), of_inner(folders[1])
    plain = plainly(kind, backward_twice)
    for used in ((one, one, one), (one, other, one), (one, None, other), (other, one, reactivate.storage.Device())):
        with without_collector():
            assert_same(plain, run(partial(nested, kind, *used), None, backward_twice))
            assert one.held() == other.held() == 0
    assert one.loads and other.loads


@of_all_kinds
@of_all_storages
def test_double_backward(storage: type[Shelf], kind: str, folders: list[pathlib.Path]) -> None:
    plain = plainly(kind, double_backward)
    for saved in SAVED:
        shelves = [storage(folder) for folder in folders]
        assert_same(plain, run(partial(nested, kind, *chosen(shelves, saved)), None, double_backward))
        assert any(shelf.loads for shelf in shelves)


def test_a_graph_that_is_dropped_lets_go_of_what_is_stored(folders: list[pathlib.Path]) -> None:
    shelves = [Disk(folder) for folder in folders]
    case = nested("name", *shelves)
    with without_collector():
        out = case.fn(*case.args)
        assert [shelf.held() for shelf in shelves] == [3, 1, 3]
        del out
        assert [shelf.held() for shelf in shelves] == [0, 0, 0]


@pytest.mark.parametrize("early_stop", [True, False])
@of_all_kinds
@of_all_storages
def test_where_the_region_inside_comes_last(
    storage: type[Shelf], kind: str, early_stop: bool, folders: list[pathlib.Path]
) -> None:
    """So that a recomputation may end where that region hands over to its storage."""
    product, save, each = KINDS[kind]
    shelves = [storage(folder) for folder in folders]

    def make() -> Case:
        inside = reactivate.checkpoint(partial(inner, product), policy=save(storage=shelves[2]), early_stop=early_stop)
        around = lambda x, w: inside(product(x.tanh(), w).exp(), w)  # noqa: E731
        region = reactivate.checkpoint(around, policy=save(storage=shelves[0]), early_stop=early_stop)
        return Case(region, (leaf(), leaf()))

    with without_regions():
        plain = run(make, None, backward_twice)
    with without_collector():
        assert_same(plain, run(make, None, backward_twice))
        assert [shelf.held() for shelf in shelves] == [0, 0, 0]
    assert sum(shelves[0].loads) == sum(shelves[2].loads) == 2 * each * (2 if kind == "result" else 1)


class Odd(Doubles):
    """Computes something else with each use."""

    def put(self, data: Any) -> Any:
        return super().put(data) * torch.full((), 1.0 + 2 * (len(self.loads) % 2)).double()

    def get(self, handle: Any) -> Any:
        number = torch.zeros(()).double()
        for _ in range(sum(self.loads)):
            number = number + 1
        factor = 1.0 + 2 * (round(float(handle[0])) % 2)  # three times an odd number is odd
        return super().get(handle / factor + number - number)


@of_what_is_saved
@of_all_kinds
@pytest.mark.parametrize("storage", [*STORAGES, Odd])
def test_values_are_compared_as_well(storage: type[Shelf], kind: str, saved: Any, folders: list[pathlib.Path]) -> None:
    used = chosen([storage(folder) for folder in folders], saved)
    assert_same(plainly(kind, backward_twice), run(partial(nested, kind, *used, check="every"), None, backward_twice))


# -- inputs of regions, by hooks around them --------------------------------------------------------------------------


class Offloaded(saved_tensors_hooks):
    """Everything that autograd saves goes to a storage."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(lambda tensor: shelf.save(tensor.detach()), shelf.load)


@pytest.mark.parametrize("is_alive", [False, True])
@pytest.mark.parametrize("saved", [(False, False, False), *SAVED], ids=str)
@of_all_storages
def test_inputs_of_both_regions(storage: type[Shelf], saved: Any, is_alive: bool, folders: list[pathlib.Path]) -> None:
    """An offloader around each region, with or without storages for what saved calls keep.

    An input is loaded also if it is still alive: the offloader may have taken its memory.
    """
    around_outer, around_inner = storage(folders[0]), Shelf(folders[1])
    used = [Shelf(folders[2]) if is_used else None for is_used in saved]
    held: list[list[int]] = []

    def make() -> Case:
        region = nested("name", *used, around=lambda: Offloaded(around_inner))

        def fn(x: Tensor, w: Tensor) -> Tensor:
            given = (x, w) if is_alive else (x * 1, w * 1)
            with Offloaded(around_outer):
                return region.fn(*given)  # type: ignore[no-any-return]

        return Case(fn, region.args)

    def backward(outputs: list[Tensor], inputs: dict[str, Tensor]) -> None:
        held.append([around_outer.held(), around_inner.held()])
        backward_twice(outputs, inputs)
        held.append([around_outer.held(), around_inner.held()])

    plain = plainly("name", backward_twice)
    with without_collector():
        assert_same(plain, run(make, None, backward))
    assert held == [[2, 2], [0, 0]], "the two inputs of each region"
    inner_runs = 1 if saved[1] else 3
    assert around_inner.loads == [2, 2] + [0, 0] * (inner_runs - 1)
    assert around_outer.loads == [2, 2]


# -- storages that fail -----------------------------------------------------------------------------------------------


@of_what_is_saved
@of_all_storages
def test_a_forward_that_fails_can_be_tried_again(storage: type[Shelf], saved: Any, folders: list[pathlib.Path]) -> None:
    """The first use of a storage fails, then the second, and so on."""
    trap = Trap()
    shelves = [storage(folder, trap) for folder in folders]
    used = chosen(shelves, saved)

    def make() -> Case:
        case = nested("name", *used)
        is_done = False
        while not is_done:
            trap.calls = trap.sprung + 1
            with contextlib.suppress(Failure):
                case.fn(*case.args)
                is_done = True
            assert [shelf.held() for shelf in shelves] == [0, 0, 0]
        trap.calls = 0
        return case

    plain = plainly("name", backward_twice)
    with without_collector():
        assert_same(plain, run(make, None, backward_twice))
    assert [shelf.held() for shelf in shelves] == [0, 0, 0]
    assert trap.sprung >= 1


@of_what_is_saved
@of_all_storages
def test_a_backward_that_fails_can_be_tried_again(
    storage: type[Shelf], saved: Any, folders: list[pathlib.Path]
) -> None:
    """The first use of a storage in the backward fails, then the second, and so on."""
    trap = Trap()
    shelves = [storage(folder, trap) for folder in folders]
    used = chosen(shelves, saved)

    def backward(outputs: list[Tensor], inputs: dict[str, Tensor]) -> None:
        is_done = False
        while not is_done:
            trap.calls = trap.sprung + 1
            with contextlib.suppress(Failure):
                torch.autograd.backward(outputs, cotangents(outputs), retain_graph=True)
                is_done = True
            trap.calls = 0
            if not is_done:
                for leaf in inputs.values():
                    leaf.grad = None
        torch.autograd.backward(outputs, cotangents(outputs))

    plain = plainly("name", backward_twice)
    with without_collector():
        assert_same(plain, run(partial(nested, "name", *used), None, backward))
    assert [shelf.held() for shelf in shelves] == [0, 0, 0]
    assert trap.sprung >= 1
