"""`dropin.torch`: the names and signatures of `torch.utils.checkpoint`, and what its functions and classes do."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as upstream
from dropin_cases import VARIANTS, Wrap, block, chain, check, leaf, wrapped
from memory import allocated_by
from oracle import Case, assert_bitwise, assert_same, run
from several import each
from torch import Tensor, nn

from reactivate.dropin import torch as ours

# -- names and signatures --------------------------------------------------------------------------------------------


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(item.name, item.kind, item.default) for item in inspect.signature(function).parameters.values()]


def test_every_public_name() -> None:
    assert set(ours.__all__) >= set(upstream.__all__)
    assert all(hasattr(ours, name) for name in ours.__all__)


FUNCTIONS = [name for name in upstream.__all__ if inspect.isfunction(getattr(upstream, name))]


GROUPS = ["GraphExecGroup"] if hasattr(upstream, "GraphExecGroup") else []  # torch 2.9 has none


# What `checkpoint` has since torch 2.14; `preserve_rng_state` was one of `kwargs` before.
ADDED = {"preserve_rng_state", "respect_saved_tensors_hooks"}


@each("name", [*FUNCTIONS, *GROUPS, "DefaultDeviceType", "SelectiveCheckpointContext"])
def test_signature(name: str) -> None:
    """Names, kinds and defaults of the parameters; those of `checkpoint` are the newest torch's, on every torch."""
    new, theirs = parameters(getattr(ours, name)), parameters(getattr(upstream, name))
    if name == "checkpoint" and not {parameter[0] for parameter in theirs} >= ADDED:
        (_, *new), (_, *theirs) = new, theirs  # `function` has a default since then
        new = [parameter for parameter in new if parameter[0] not in ADDED]
    assert new == theirs


def test_signature_of_checkpoint_function() -> None:
    """torch's is an `autograd.Function`; `apply` takes what its `forward` takes after the context."""
    assert parameters(ours.CheckpointFunction.apply) == parameters(upstream.CheckpointFunction.forward)[1:]


@each(
    "name",
    [
        *("CheckpointError", "CheckpointPolicy", "SelectiveCheckpointContext", "DefaultDeviceType", "SAC_IGNORED_OPS"),
        *("create_selective_checkpoint_contexts", "noop_context_fn", "get_device_states", "set_device_states"),
        *("check_backward_validity", "detach_variable"),
    ],
)
def test_what_is_not_of_the_engine_is_torchs_own(name: str) -> None:
    assert getattr(ours, name) is getattr(upstream, name)


# -- checkpoint_sequential -------------------------------------------------------------------------------------------


@VARIANTS
@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("segments", [2, 3, 4, 5])
def test_checkpoint_sequential(segments: int, as_list: bool, use_reentrant: bool) -> None:
    """All segments but the last are regions; the list is cut where torch cuts it."""

    def wrap(engine: Any) -> Wrap:
        return lambda model: (
            lambda x: engine.checkpoint_sequential(
                [*model] if as_list else model, segments, x, use_reentrant=use_reentrant
            )
        )

    check(chain, wrap(ours), regions=segments - 1)
    assert run(chain, wrap(ours)).kept_bytes == run(chain, wrap(upstream)).kept_bytes


def test_one_segment_is_the_plain_call() -> None:
    def wrap(model: Any) -> Any:
        return lambda x: ours.checkpoint_sequential(model, 1, x, use_reentrant=False)

    plain, one = run(chain), run(chain, wrap)
    assert_same(plain, one)
    assert (one.regions, one.kept_bytes) == (0, plain.kept_bytes)


@each("segments", [0, -1, 6, 2.5, True, "2"])
def test_segments_are_validated(segments: Any) -> None:
    with pytest.raises(ValueError, match=r"segments=.* from 1 to 5"):
        ours.checkpoint_sequential(block(), segments, leaf(8, 16), use_reentrant=False)


def test_checkpoint_sequential_refuses_other_options() -> None:
    for engine in (upstream, ours):
        with pytest.raises(ValueError, match="Unexpected keyword arguments: debug"):
            engine.checkpoint_sequential(block(), 2, leaf(8, 16), use_reentrant=False, debug=True)


def test_preserve_rng_state_of_checkpoint_sequential() -> None:
    def wrap(engine: Any) -> Wrap:
        return lambda model: (
            lambda x: engine.checkpoint_sequential(model, 2, x, use_reentrant=False, preserve_rng_state=False)
        )

    def make() -> Case:
        return Case(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Tanh()), (leaf(8, 16),))

    theirs, new = run(make, wrap(upstream)), run(make, wrap(ours))
    assert_same(theirs, new)
    assert not torch.equal(run(make).state["torch"], new.state["torch"])


# -- GraphExecGroup and CheckpointFunction ---------------------------------------------------------------------------


def backward_twice(context: Callable[[], Any]) -> Callable[[list[Tensor], dict[str, Tensor]], None]:
    def backward(outputs: list[Tensor], inputs: dict[str, Tensor]) -> None:
        with context():
            for output in outputs:
                output.sum().backward(retain_graph=True)

    return backward


def branches() -> Case:
    return Case(lambda x: ((x * torch.rand(4, 8)).sin().exp(), x.cos().exp()), (leaf(4, 8),))


def stem_and_branches() -> Case:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp().tanh()
        return (y * torch.rand(4, 8)).sin(), y.cos()

    return Case(fn, (leaf(4, 8),))


@pytest.mark.parametrize(
    ("make", "context", "recomputations"),
    [
        (branches, ours.GraphExecGroup, 1),
        (branches, contextlib.nullcontext, 2),
        (stem_and_branches, ours.GraphExecGroup, 2),
    ],
)
def test_graph_exec_group(make: Callable[[], Case], context: Callable[[], Any], recomputations: int) -> None:
    """Backward calls inside of it share a recomputation. Both may need the stem, which torch refuses: it is run again."""
    backward = backward_twice(context)
    plain, grouped = run(make, None, backward), run(make, wrapped(), backward)
    assert_same(plain, grouped)
    assert (grouped.regions, grouped.recomputations) == (1, recomputations)
    assert grouped.kept_bytes < plain.kept_bytes


def test_graph_exec_groups_are_not_nested() -> None:
    for engine in (upstream, ours) if GROUPS else (ours,):
        with engine.GraphExecGroup() as group, pytest.raises(RuntimeError, match="inside"), engine.GraphExecGroup():
            pass
        assert isinstance(group, engine.GraphExecGroup)


def test_checkpoint_function() -> None:
    """Its second argument is `preserve_rng_state`."""

    def wrap(engine: Any, preserves: bool) -> Wrap:
        return lambda fn: functools.partial(engine.CheckpointFunction.apply, fn, preserves)

    def make() -> Case:
        return Case(lambda x, y: (x.sin() * y * torch.rand(8)).exp().sin(), (leaf(4, 8), leaf(4, 8)))

    check(make, wrap(ours, True))
    assert_same(run(make, wrap(upstream, False)), run(make, wrap(ours, False)))


# -- decorators ------------------------------------------------------------------------------------------------------


def test_decorator() -> None:
    """Without a function `checkpoint` returns a decorator, with the options that it was given."""

    def make() -> Case:
        dropout = nn.Dropout(0.5)

        @ours.checkpoint(use_reentrant=False, early_stop=False)
        def fn(x: Tensor, *, early_stop: float) -> Tensor:
            """With an argument of its own that is called as an option is."""
            return dropout(x.sin() * early_stop).exp()

        assert fn.__name__ == "fn" and "of its own" in fn.__doc__
        return Case(fn, (leaf(8, 16),), {"early_stop": 2.0})

    def plain() -> Case:
        case = make()
        case.fn = case.fn.__wrapped__
        return case

    assert_same(run(plain), found := run(make))
    assert (found.regions, found.recomputations) == (1, 1)


def test_decorated_method() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        @ours.checkpoint(use_reentrant=False)
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).sin().exp()

    def make() -> Case:
        return Case(Block(), (leaf(4, 8),))

    def plain() -> Case:
        case = make()
        case.fn.forward = functools.partial(Block.forward.__wrapped__, case.fn)
        return case

    assert_same(run(plain), found := run(make))
    assert (found.regions, found.recomputations) == (1, 1)


def test_a_decorator_takes_options_and_no_arguments() -> None:
    with pytest.raises(ValueError, match="Unexpected keyword arguments: scale"):
        ours.checkpoint(use_reentrant=False, scale=2)


# -- selective checkpointing -----------------------------------------------------------------------------------------

runs: list[str] = []  # of the op below: each time that it is computed


@torch.library.custom_op("reactivate_tests::counted_exp", mutates_args=())
def counted_exp(x: Tensor, label: str) -> Tensor:
    """`exp`, which says when it is computed."""
    runs.append(label)
    return x.exp()


counted_exp.register_autograd(
    lambda ctx, gradient: (gradient * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)
COUNTED = torch.ops.reactivate_tests.counted_exp.default


def counted() -> Case:
    weight = leaf(32, 32)

    def fn(x: Tensor) -> Tensor:
        y = counted_exp((x @ weight).tanh(), "first").sin()
        return (counted_exp(y * torch.rand(32), "second") @ weight).tanh().sin()

    return Case(fn, (leaf(64, 32),), leaves={"weight": weight})


def selecting(policy: Any, **options: Any) -> Wrap:
    return wrapped(context_fn=functools.partial(upstream.create_selective_checkpoint_contexts, policy), **options)


def policy_of(action: Any, label: str | None = None) -> Any:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        is_meant = op is COUNTED and (label is None or args[1] == label)
        return action if is_meant else upstream.CheckpointPolicy.PREFER_RECOMPUTE

    return policy


Policy = upstream.CheckpointPolicy
POLICIES: dict[str, tuple[Any, list[str]]] = {  # and what is computed again
    "list": ([COUNTED], []),
    "list of others": ([torch.ops.aten.mm.default], ["first", "second"]),
    "must save": (policy_of(Policy.MUST_SAVE), []),
    "prefer save": (policy_of(Policy.PREFER_SAVE), []),
    "a bool": (policy_of(True), []),
    "save the first": (policy_of(Policy.MUST_SAVE, "first"), ["second"]),
    "save the second": (policy_of(Policy.MUST_SAVE, "second"), ["first"]),
    "must recompute": (policy_of(Policy.MUST_RECOMPUTE), ["first", "second"]),
}


@pytest.mark.parametrize("name", POLICIES)
def test_selective_checkpointing(name: str) -> None:
    """Ops that the policy saves are not computed again, the others once; bits and streams are those of plain."""
    policy, again = POLICIES[name]
    runs.clear()
    check(counted, selecting(policy))
    forward = ["first", "second"]
    assert runs == forward + forward + again, "plain; the forward pass; the recomputation"


def test_selective_checkpointing_keeps_what_it_saves() -> None:
    """More than without a policy, by the results that are saved, and less than the plain function."""

    def kept(wrap: Wrap | None) -> int:
        case = counted()
        fn = case.fn if wrap is None else wrap(case.fn)
        fn(*case.args)  # the first call is the one that finds out about the function
        gc.collect()  # what goes while it is counted would count as well
        return allocated_by(lambda: fn(*case.args)).left_bytes

    plain, full, selective = kept(None), kept(wrapped()), kept(selecting([COUNTED]))
    results = 2 * 64 * 32 * 4
    assert full + results <= selective < plain


RANDOM = torch.ops.aten.rand_like.default


@pytest.mark.parametrize(
    "is_saved", [(True, False, False), (False, True, False), (True, True, False), (False, False, True)]
)
def test_saved_random_ops_do_not_shift_the_others(is_saved: tuple[bool, ...]) -> None:
    """Rule 10. A result that is given back draws nothing, and the numbers after it are those of the forward pass."""

    def make() -> Case:
        def fn(x: Tensor) -> Tensor:
            for _ in is_saved:
                x = (torch.rand_like(x) * x).sin().exp()
            return x

        return Case(fn, (leaf(16, 8),))

    def wrap(fn: Any) -> Any:
        answers = {False: iter(is_saved), True: iter(is_saved)}  # torch 2.9 asks again in the recomputation
        return selecting(lambda context, op, *args, **kwargs: op is RANDOM and next(answers[context.is_recompute]))(fn)

    check(make, wrap)


def test_saved_attention_before_a_dropout() -> None:
    """The op that is saved most often counts as random, and draws nothing here."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    saved: list[Any] = []

    def make() -> Case:
        def fn(x: Tensor) -> Tensor:
            y = nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.0)
            return nn.functional.dropout(y.sin(), 0.4).exp().sin()

        return Case(fn, (leaf(2, 2, 8, 16),))

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        if op is attention and not context.is_recompute:
            saved.append(op)
        return op is attention

    check(make, selecting(policy))
    assert len(saved) == 1


def test_selective_checkpointing_without_the_rng() -> None:
    """With `preserve_rng_state=False` the stream moves on in the recomputation, as torch's does."""
    make = counted
    options = {"context_fn": functools.partial(upstream.create_selective_checkpoint_contexts, [COUNTED])}
    theirs = run(make, wrapped(upstream, preserve_rng_state=False, **options))
    new = run(make, wrapped(preserve_rng_state=False, **options))
    assert_same(theirs, new)
    assert not torch.equal(run(make).state["torch"], new.state["torch"])


def test_a_second_backward_of_what_was_saved_is_refused() -> None:
    """torch's contexts give what they keep back once."""
    case = counted()
    y = selecting([COUNTED])(case.fn)(*case.args)
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward an extra time"):
        y.sum().backward()


def hooked(respects: bool | None, is_nested: bool) -> tuple[int, bool]:
    """Count the tensors that hooks around a region with selective checkpointing see, and say whether it warns."""
    packed: list[Tensor] = []
    fn = selecting([COUNTED], respect_saved_tensors_hooks=respects)(counted_twice)
    x = leaf(4, 4)
    with (
        warnings.catch_warnings(record=True) as caught,
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor),
    ):
        warnings.simplefilter("always")
        y = wrapped()(fn)(x) if is_nested else fn(x)
    count = len(packed)
    y.sum().backward()
    assert_bitwise(x.grad, torch.autograd.grad(counted_twice(x).sum(), x)[0], "gradient")
    return count, any("saved_tensors_hooks" in str(entry.message) for entry in caught)


def counted_twice(x: Tensor) -> Tensor:
    return counted_exp(counted_exp(x.sin(), "first").sin(), "second").sin()


@pytest.mark.parametrize("is_nested", [False, True])
def test_hooks_around_selective_checkpointing(is_nested: bool) -> None:
    """They see what it keeps if they are to; torch < 2.14 does not have that, and there the option does nothing."""
    has_it = "respect_saved_tensors_hooks" in inspect.signature(upstream.checkpoint).parameters
    (usual, warns), (without, _), (with_them, _) = (hooked(value, is_nested) for value in (None, False, True))
    assert usual == without == with_them - (2 if has_it else 0)
    assert warns == has_it
    assert not hooked(False, is_nested)[1] and not hooked(True, is_nested)[1]
