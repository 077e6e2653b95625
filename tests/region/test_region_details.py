"""Details of regions, each seen by no other test: that is what mutants of the core have shown."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from journal import Journal
from oracle import assert_bitwise
from several import each
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import reactivate
from reactivate import policies
from reactivate._region.accounts import held_by
from reactivate._region.due import _calls_of
from reactivate._saved_calls import effects
from reactivate._saved_calls.saved_call import _last_of_all
from reactivate._snapshot.call import Call
from reactivate._snapshot.kinds import SMALL_BYTES
from reactivate._torch.autograd import innermost_pack_hook
from reactivate.dropin.megatron import CheckpointWithoutOutput
from reactivate.errors import RecomputeMismatchError
from reactivate.guards import contexts
from reactivate.guards.trackers import _TrackerStates


def recomputing() -> bool:
    return torch._C._current_graph_task_id() != -1


# -- what messages say ------------------------------------------------------------------------------------------------


class Fickle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.double() if recomputing() else x).exp()


@pytest.mark.parametrize(("count", "named"), [(2, "0 or 1"), (3, "0 or 1 or 2"), (5, "0 or 1 or 2 or 2 more")])
def test_a_message_names_three_modules_that_a_line_may_be_of(count: int, named: str) -> None:
    out = reactivate.checkpoint(nn.Sequential(*(Fickle() for _ in range(count))))(torch.ones(2, requires_grad=True))
    with pytest.raises(RecomputeMismatchError) as raised:
        out.sum().backward()
    assert f"(module {named})" in str(raised.value)


def test_with_values_fewer_saved_tensors_come_with_the_op_that_is_missing() -> None:
    def fewer(x: Tensor) -> Tensor:
        return x.sin() if recomputing() else x.sin().exp().cos()

    out = reactivate.checkpoint(fewer, check="every")(torch.ones(2, requires_grad=True))
    with pytest.raises(RecomputeMismatchError) as raised:
        out.sum().backward()
    assert "aten.exp" in str(raised.value) or "aten::exp" in str(raised.value)


def test_another_call_in_the_place_of_a_saved_one_is_named() -> None:
    def other(x: Tensor) -> Tensor:
        return (x.sin().cosh() if recomputing() else x.sin().sinh()).exp()

    region = reactivate.checkpoint(other, policy=policies.save_ops("sinh", "cosh"))
    out = region(torch.ones(2, requires_grad=True))
    with pytest.raises(RecomputeMismatchError, match=r"the saved call of .*sinh[\s\S]*recomputation calls .*cosh"):
        out.sum().backward()


def test_with_values_a_saved_call_that_is_given_another_number_is_an_error() -> None:
    """Its result has the shape that was saved, so that nothing else tells."""

    def other(x: Tensor) -> Tensor:
        return x.sin().softmax(1 if recomputing() else 0).exp()

    region = reactivate.checkpoint(other, policy=policies.save_ops("softmax"), check="every")
    out = region(torch.rand(3, 3, requires_grad=True))
    with pytest.raises(RecomputeMismatchError, match="softmax"):
        out.sum().backward()


# -- errors in the forward --------------------------------------------------------------------------------------------


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        def fails(x: Tensor) -> Tensor:
            raise ValueError(x.sin().sum())

        return torch_checkpoint(fails, x, use_reentrant=False)


class Catches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fails = Fails()

    def forward(self, x: Tensor) -> Tensor:
        before = innermost_pack_hook()
        with pytest.raises(ValueError, match="tensor"):
            self.fails(x)
        assert innermost_pack_hook() is before, "torch leaves its hooks there"
        return x.sin()


def test_an_error_goes_through_torchs_checkpoint_in_a_saved_call() -> None:
    x = torch.ones(2, requires_grad=True)
    reactivate.checkpoint(Catches(), policy=policies.save_modules(Fails))(x).sum().backward()
    assert_bitwise(x.grad, torch.ones(2).cos(), "gradient")


# -- saved calls ------------------------------------------------------------------------------------------------------


def test_a_saved_call_that_runs_again_keeps_nothing() -> None:
    memory = Journal()

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        memory.append(StorageWeakRef(y.untyped_storage()))
        return y.cos(), x.view(-1)

    saved, x = reactivate.site(call, name="saved"), torch.ones(4, requires_grad=True)
    out = reactivate.checkpoint(lambda x: saved(x)[0].sin(), policy=policies.save_names("saved"))(x)
    assert memory[0].expired(), "its result is a view of an argument"
    out.sum().backward()
    assert len(memory) == 2


# -- state ------------------------------------------------------------------------------------------------------------


class Beside(nn.Module):
    """A large tree, and a module in a plain list, which is read and not called."""

    def __init__(self) -> None:
        super().__init__()
        self.others, self.inner = [nn.Module()], nn.ModuleList(nn.Identity() for _ in range(80))
        self.others[0].count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.others[0].count += 1
        return (x * self.others[0].count).sin()


def test_a_module_that_no_child_and_no_call_leads_to_is_set_back() -> None:
    model, found = Beside(), []
    for region in (model, reactivate.checkpoint(model)):
        model.others[0].count = 0
        for _ in range(2):  # from the second call on, modules are recorded as they are reached
            x = torch.ones(2, requires_grad=True)
            region(x).sum().backward()
            found.append(x.grad)
        assert model.others[0].count == 2
    for plain, ours in zip(found[:2], found[2:]):
        assert_bitwise(plain, ours, "gradient")


@pytest.mark.parametrize("make", [bytearray, io.BytesIO])
def test_contents_of_just_the_size_that_is_kept_are_put_back(make: Any) -> None:
    content = make(bytes([2]) + bytes(SMALL_BYTES - 1))

    def fn(x: Tensor) -> Tensor:
        view = content if make is bytearray else content.getbuffer()
        factor = float(view[0])
        view[0] += 1
        return (x * factor).exp()

    x = torch.ones(2, requires_grad=True)
    reactivate.checkpoint(fn)(x).sum().backward()
    assert_bitwise(x.grad, 2 * torch.full((2,), 2.0).exp(), "gradient")
    assert (content if make is bytearray else content.getbuffer())[0] == 3


# -- parts of guards --------------------------------------------------------------------------------------------------


def test_a_tracker_with_another_stream_forked_is_another_one() -> None:
    assert _TrackerStates({}, "one").is_same(_TrackerStates({}, "one"))
    assert not _TrackerStates({}, "one").is_same(_TrackerStates({}, "other"))
    assert not _TrackerStates({"a": (None, 1)}, None).is_same(_TrackerStates({}, None))
    assert not _TrackerStates({"a": (None, 1)}, None).is_same(_TrackerStates({"a": (None, 2)}, None))


def test_a_random_op_has_drawn_from_the_generator_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = SimpleNamespace(device_type="cpu", read_rng=object(), write_rng=object())
    generator = torch.Generator()
    monkeypatch.setattr(contexts, "backends", lambda: [backend])
    assert contexts._stream_of([torch.ones(1)], {}) == (backend.read_rng, backend.write_rng)
    assert contexts._stream_of(torch.ones(1), {"generator": generator}) == (generator.get_state, generator.set_state)
    monkeypatch.setattr(contexts, "backends", list)
    default = torch.default_generator
    assert contexts._stream_of(torch.ones(1), {}) == (default.get_state, default.set_state)


# -- outputs that are dropped -----------------------------------------------------------------------------------------


def test_a_conjugate_view_of_a_dropped_output_is_right() -> None:
    def produced(x: Tensor) -> Tensor:
        return torch.view_as_complex(x.exp().sin())

    def consumed(y: Tensor) -> Tensor:
        return torch.view_as_real(y.conj() * y).sum().square() + torch.view_as_real(y.conj().exp()).sum()

    found = []
    for discards in (False, True):
        x = torch.linspace(0.1, 1.0, 8).view(4, 2).requires_grad_()
        checkpoint = CheckpointWithoutOutput()
        out = consumed(checkpoint.checkpoint(produced, x) if discards else produced(x))
        if discards:
            checkpoint.discard_output_and_register_recompute(out)
        out.backward()
        found.append(x.grad)
    assert_bitwise(*found, "gradient")


# -- what a recomputation is for, and how long it is kept ---------------------------------------------------------------


def test_what_no_backward_has_read_goes_at_the_end_of_a_shared_recomputation() -> None:
    made = Journal()

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        made.append(StorageWeakRef(y.untyped_storage()))
        return y.cos().sin(), y.cos()

    h = reactivate.checkpoint(fn)(torch.ones(2, requires_grad=True))
    with reactivate.shared_recompute():
        h[0].sum().backward(retain_graph=True)
        assert len(made) == 2 and not made[-1].expired(), "another backward may read it"
    assert made[-1].expired()


def test_the_last_tensor_that_a_recomputation_is_needed_for() -> None:
    def call(start: int, stop: int, derived: int = -1, reason: str | None = None) -> Any:
        return SimpleNamespace(start=start, stop=stop, derived=derived, reason=reason)

    assert _last_of_all(5, []) == 4
    assert _last_of_all(5, [call(0, 2)]) == 4, "something was saved behind it"
    assert _last_of_all(5, [call(3, 5)]) == 2
    assert _last_of_all(5, [call(1, 3), call(3, 5)]) == 0
    assert _last_of_all(5, [call(3, 5, derived=1)]) == 1
    assert _last_of_all(5, [call(3, 5, reason="it has an effect")]) == 4
    assert _last_of_all(0, []) == -1


@each(
    ("one", "other", "are_equal"),
    [
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.ones(3), False),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (torch.ones(2), torch.zeros(2), False),
        ([1, torch.ones(2)], [1, torch.ones(2)], True),
        ([1], [1, 2], False),
        ((1,), [1], False),
        ({"a": torch.ones(2)}, {"a": torch.ones(2)}, True),
        ({"a": 1}, {"b": 1}, False),
    ],
)
def test_states_of_guards_are_the_same_by_type_and_content(one: Any, other: Any, are_equal: bool) -> None:
    assert effects._is_equal(one, other) is are_equal


def test_a_look_at_what_a_node_saved_leaves_no_hooks_behind() -> None:
    region = reactivate.checkpoint(lambda x: x.exp().sin())
    for _ in range(4):  # the third is not compared with its recomputation
        x = torch.rand(4, requires_grad=True)
        out = region(x)
        assert torch.equal(out.grad_fn._saved_self, x.detach().exp())
        assert innermost_pack_hook() is None


def test_what_an_object_holds_is_found_once_and_not_in_modules() -> None:
    tensor, held = torch.ones(2), []
    held += [held, tensor, torch.nn.Linear(2, 2), (tensor,)]
    assert [*held_by(held)] == [tensor]


class WithAnother(nn.Module):
    def forward(self, x: Tensor, other: nn.Module) -> Tensor:
        return other(x).exp()


def test_calls_of_a_module_count_by_it_whatever_module_it_is_given() -> None:
    """Otherwise each call with a new one would be a first call, which is compared."""
    module, x = WithAnother(), torch.rand(2, 4)
    first, second = (_calls_of(Call(module, (x, nn.Linear(4, 4)), {})) for _ in range(2))
    assert first is second
    method = _calls_of(Call(module.forward, (x, nn.Linear(4, 4)), {}))
    assert method is _calls_of(Call(module.forward, (x, nn.Linear(4, 4)), {})) is not first
