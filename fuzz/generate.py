"""Random programs from a seed."""

from __future__ import annotations

from random import Random

from fuzz.program import (
    BACKWARDS,
    FORMS,
    HOMES,
    HOOKS,
    OPTIMIZERS,
    POLICIES,
    SCHEDULES,
    STORAGES,
    SURROUNDINGS,
    Between,
    Block,
    Call,
    Group,
    Options,
    Program,
    Training,
    Use,
)
from fuzz.vocabulary import CONSTRUCTS
from fuzz.vocabulary.interludes import INTERLUDES

NAMES = tuple(CONSTRUCTS)
WEIGHTS = tuple(construct.weight for construct in CONSTRUCTS.values())


def generate(seed: int) -> Program:
    """Return the program of a seed."""
    random = Random(seed)
    blocks = _blocks(random)
    items = _items(random, len(blocks))
    training = _training(random)
    return Program(seed, blocks, items, _between(random, blocks, training.steps), _options(random), training)


def _blocks(random: Random) -> tuple[Block, ...]:
    count = random.choice((1, 1, 2, 2, 3, 4))
    numbers = iter(range(1000))
    return tuple(
        Block(
            tuple(_use(random, next(numbers)) for _ in range(random.choice((0, 1, 1, 2, 2, 3, 4)))),
            random.choice((*HOMES[:1] * 4, *HOMES)),
            random.randrange(count),
        )
        for _ in range(count)
    )


def _use(random: Random, number: int) -> Use:
    (name,) = random.choices(NAMES, WEIGHTS)
    sizes = [len(texts) for texts in CONSTRUCTS[name].options.values()]
    return Use(name, tuple(_simple(random, size) for size in sizes), number)


def _simple(random: Random, size: int) -> int:
    """Return an index, 0 more often than the others."""
    return 0 if random.random() < 0.25 else random.randrange(size)


def _items(random: Random, blocks: int) -> tuple[Call | Group, ...]:
    items: list[Call | Group] = []
    order = list(range(blocks)) + [random.randrange(blocks) for _ in range(random.choice((0, 0, 1)))]
    random.shuffle(order)
    while order:
        if len(order) > 1 and random.random() < 0.15:
            items.append(Group((_call(random, order.pop()), _call(random, order.pop()))))
        else:
            items.append(_call(random, order.pop()))
    return tuple(items)


def _call(random: Random, block: int) -> Call:
    return Call(block, random.choice((*("module",) * 5, *FORMS)))


def _between(random: Random, blocks: tuple[Block, ...], steps: int) -> tuple[Between, ...]:
    found = []
    for _ in range(random.choice((0, 0, 0, 1, 1, 2))):
        block = random.randrange(len(blocks))
        own = [use for use in blocks[block].uses if CONSTRUCTS[use.construct].between]
        step = random.randrange(steps)
        if own and random.random() < 0.6:
            use = random.choice(own)
            found.append(Between(block, use.number, random.randrange(len(CONSTRUCTS[use.construct].between)), step))
        else:
            found.append(Between(block, -1, random.randrange(len(INTERLUDES)), step))
    return tuple(found)


def _options(random: Random) -> Options:
    return Options(
        early_stop=random.random() < 0.75,
        check=random.choice(("", "", "", "", "metadata", "every", "none")),
        policy=random.choice((*POLICIES[:1] * 10, *POLICIES)),
        applied=random.random() < 0.2,
        inputs=random.choice((*STORAGES[:1] * 6, *STORAGES)),
    )


def _training(random: Random) -> Training:
    return Training(
        steps=random.choice((1, 2, 2, 3, 3, 4)),
        schedule=random.choice((*SCHEDULES[:1] * 3, *SCHEDULES)),
        backward=random.choice((*BACKWARDS[:1] * 3, *BACKWARDS)),
        optimizer=random.choice(OPTIMIZERS),
        late_optimizer=random.random() < 0.25,
        autocast=random.random() < 0.15,
        around_backward=random.choice((*SURROUNDINGS[:1] * 9, *SURROUNDINGS)),
        hooks=random.choice((*HOOKS[:1] * 12, *HOOKS)),
        input_needs_grad=random.random() < 0.8,
    )
