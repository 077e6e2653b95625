"""A random training program as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

HOMES = ("attribute", "module list", "second name", "plain list", "dict", "closure")
"""Places where the model holds a block; `REGISTERED` are those that torch knows of."""
REGISTERED = ("attribute", "module list", "second name")

FORMS = (
    "none",
    "module",
    "positional",
    "method",
    "work",
    "lambda",
    "closure",
    "default",
    "list",
    "dict",
    "dataclass",
    "stage",
    "partial",
    "twice",
)
"""Ways to call a block; all but "none" make a region of the call."""

POLICIES = (
    "",
    'policies.save_ops("linear")',
    'policies.save_ops("matmul", "sin")',
    "policies.compute_intensive()",
    'policies.every_nth(2, policies.save_ops("linear", "matmul", "sin"))',
    'policies.save_ops("linear", storage=HOST)',
    'policies.save_ops("linear", "matmul", "sin", storage=SHELF)',
    'policies.save_ops("linear", "matmul", storage=DISK)',
    'policies.save_modules("lin")',
)
MODULE_POLICIES = POLICIES[-1:]
"""Policies with paths, for regions that are modules or methods of one."""

STORAGES = ("", "SHELF", "DISK", "HOST")
"""Where regions keep their inputs: storages of the prelude."""

OPTIMIZERS = (
    "torch.optim.SGD({}, lr=0.1)",
    "torch.optim.SGD({}, lr=0.1, momentum=0.9, foreach=True)",
    "torch.optim.AdamW({}, lr=0.05)",
    "torch.optim.AdamW({}, lr=0.05, foreach=True)",
    "torch.optim.AdamW({}, lr=0.05, fused=True)",
    "torch.optim.SGD({}, lr=0.1, fused=True)",
)

SCHEDULES = ("F0 B0", "F0 F1 B0 B1", "F0 F1 B1 B0", "F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1")
"""Orders of the forwards and backwards of the microbatches of one step."""

BACKWARDS = ("backward", "grad", "retain", "double", "outputs", "inputs")

SURROUNDINGS = (
    "",
    "torch.autocast(DEVICE.type, torch.bfloat16)",
    "torch.no_grad()",
    "torch.autograd.set_multithreading_enabled(False)",
)
"""Contexts around a backward call."""

HOOKS = (
    "",
    "torch.autograd.graph.saved_tensors_hooks(Tensor.clone, same)",
    "torch.autograd.graph.saved_tensors_hooks(Tensor.clone, reread)",
)
"""Contexts around a model's forward that move its saved tensors."""


@dataclass(frozen=True)
class Use:
    """One use of a construct in a block; `number` makes its names unique."""

    construct: str
    choices: tuple[int, ...]
    number: int


@dataclass(frozen=True)
class Block:
    """A class of module with one instance.

    Attributes:
        uses: the statements of its forward.
        home: the place where the model holds the instance.
        peer: the index of the block that its constructs refer to.
    """

    uses: tuple[Use, ...] = ()
    home: str = HOMES[0]
    peer: int = 0


@dataclass(frozen=True)
class Call:
    """A call of a block in the model's forward."""

    block: int
    form: str = "module"


@dataclass(frozen=True)
class Group:
    """A region around several calls."""

    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Between:
    """A statement between forward and backward: one of a use's own, or with `number` -1 a general one."""

    block: int
    number: int
    index: int
    step: int


@dataclass(frozen=True)
class Options:
    """Options of the program's regions."""

    early_stop: bool = True
    check: str = ""
    policy: str = ""
    applied: bool = False
    inputs: str = ""


@dataclass(frozen=True)
class Training:
    """The training loop."""

    steps: int = 1
    schedule: str = SCHEDULES[0]
    backward: str = BACKWARDS[0]
    optimizer: str = OPTIMIZERS[0]
    late_optimizer: bool = False
    autocast: bool = False
    around_backward: str = SURROUNDINGS[0]
    hooks: str = HOOKS[0]
    input_needs_grad: bool = True


@dataclass(frozen=True)
class Program:
    """A model, its regions and how it is trained."""

    seed: int
    blocks: tuple[Block, ...]
    items: tuple[Call | Group, ...]
    between: tuple[Between, ...] = ()
    options: Options = Options()
    training: Training = Training()

    def calls(self) -> Iterator[Call]:
        """Yield every call of a block."""
        for item in self.items:
            yield from item.calls if isinstance(item, Group) else (item,)

    def constructs(self) -> tuple[str, ...]:
        """Return the sorted names of the constructs in use."""
        return tuple(sorted({use.construct for block in self.blocks for use in block.uses}))
