"""Smaller programs that fail in the way a larger one does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from fuzz.program import Block, Call, Group, Options, Program, Training, Use

MOST_TRIES = 400


def shrink(program: Program, fails: Callable[[Program], bool], most_tries: int = MOST_TRIES) -> Program:
    """Return a program from which no single part can be left out, or the best found in `most_tries` runs."""
    tries = 0
    found = True
    while found:
        found = False
        for smaller in smaller_than(program):
            if tries == most_tries:
                return program
            tries += 1
            if fails(smaller):
                program, found = smaller, True
                break
    return program


def smaller_than(program: Program) -> Iterator[Program]:
    """Yield programs with one part less, or one part simpler; large parts first."""
    yield from _fewer_blocks(program)
    yield from (replace(program, items=items) for items in _fewer_items(program))
    yield from (replace(program, between=without) for without in _without_one(program.between))
    yield from _fewer_uses(program)
    yield from _simpler_training(program)
    for field in fields(Options):
        value = getattr(Options(), field.name)
        if getattr(program.options, field.name) != value:
            yield replace(program, options=replace(program.options, **{field.name: value}))
    yield from _simpler_calls(program)
    yield from _simpler_blocks(program)


def _without_one(values: tuple) -> Iterator[tuple]:
    for index in range(len(values)):
        yield values[:index] + values[index + 1 :]


def _fewer_blocks(program: Program) -> Iterator[Program]:
    for gone in range(len(program.blocks)):
        if len(program.blocks) > 1:
            yield _without_block(program, gone)


def _without_block(program: Program, gone: int) -> Program:
    def moved(index: int) -> int:
        return index - (index > gone)

    blocks = tuple(
        replace(block, peer=moved(block.peer)) for index, block in enumerate(program.blocks) if index != gone
    )
    items: list[Call | Group] = []
    for item in program.items:
        calls = item.calls if isinstance(item, Group) else (item,)
        left = tuple(replace(call, block=moved(call.block)) for call in calls if call.block != gone)
        if left:
            items.append(Group(left) if isinstance(item, Group) else left[0])
    between = tuple(replace(part, block=moved(part.block)) for part in program.between if part.block != gone)
    return replace(program, blocks=blocks, items=tuple(items), between=between)


def _fewer_items(program: Program) -> Iterator[tuple[Call | Group, ...]]:
    yield from _without_one(program.items)
    for index, item in enumerate(program.items):
        if isinstance(item, Group):
            yield (*program.items[:index], *item.calls, *program.items[index + 1 :])
            for calls in _without_one(item.calls):
                if calls:
                    yield (*program.items[:index], Group(calls), *program.items[index + 1 :])


def _fewer_uses(program: Program) -> Iterator[Program]:
    for index, block in enumerate(program.blocks):
        for uses in _without_one(block.uses):
            yield _with_block(program, index, replace(block, uses=uses))


def _with_block(program: Program, index: int, block: Block) -> Program:
    return replace(program, blocks=(*program.blocks[:index], block, *program.blocks[index + 1 :]))


def _simpler_training(program: Program) -> Iterator[Program]:
    training = program.training
    if training.steps > 1:
        earlier = tuple(replace(part, step=min(part.step, training.steps - 2)) for part in program.between)
        fewer = replace(program, training=replace(training, steps=training.steps - 1))
        yield replace(fewer, between=earlier)
    for field in fields(Training):
        value = getattr(Training(), field.name)
        if field.name != "steps" and getattr(training, field.name) != value:
            yield replace(program, training=replace(training, **{field.name: value}))


def _simpler_calls(program: Program) -> Iterator[Program]:
    for index, item in enumerate(program.items):
        calls = item.calls if isinstance(item, Group) else (item,)
        for position, call in enumerate(calls):
            for form in ("none", "module"):
                if call.form not in ("none", form):
                    changed = (*calls[:position], replace(call, form=form), *calls[position + 1 :])
                    simpler = Group(changed) if isinstance(item, Group) else changed[0]
                    yield replace(program, items=(*program.items[:index], simpler, *program.items[index + 1 :]))


def _simpler_blocks(program: Program) -> Iterator[Program]:
    for index, block in enumerate(program.blocks):
        if block.home != Block.home:
            yield _with_block(program, index, replace(block, home=Block.home))
        if block.peer != index:
            yield _with_block(program, index, replace(block, peer=index))
        for position, use in enumerate(block.uses):
            for simpler in _simpler_uses(use):
                uses = (*block.uses[:position], simpler, *block.uses[position + 1 :])
                yield _with_block(program, index, replace(block, uses=uses))


def _simpler_uses(use: Use) -> Iterator[Use]:
    for index, choice in enumerate(use.choices):
        if choice:
            yield replace(use, choices=(*use.choices[:index], 0, *use.choices[index + 1 :]))
