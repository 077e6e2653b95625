"""Results on XLA as a page of the docs."""

from __future__ import annotations

from collections.abc import Iterator

from _xla_case import KEEPS_BARRIERS
from _xla_results import OF_TORCH_XLAS, Results
from _xla_tables import early_table, model_tables, target_table
from _xla_ways import ALTERNATE, CONTEXT, LINEARS, NONE, OURS, TORCH, TORCH_XLA

_ABOUT = f"""# On XLA, measured

On XLA, forward, recomputation and backward form one graph. The compiler merges equal ops on equal inputs (CSE), which
undoes a checkpoint. Regions of reactivate put optimization barriers (`opt-barrier`) between forward and recomputation. The
barriers also depend on the gradient of the region's output. This page shows the programs that XLA compiles from them.

**These are figures of XLA's CPU compiler. No saving on a TPU is claimed: none was measured.**

`benchmarks/xla.py --page` wrote this page from its results: no figure is edited by hand.

## How it is measured

One step, forward, loss and backward in fp32, is traced and compiled on torch_xla with `PJRT_DEVICE=CPU`, each case in a
process of its own. Figures are read from the program that torch_xla traced and from what XLA dumps (`--xla_dump_to`).

- *barriers*: the number of `opt-barrier`s in the traced program: one per region, and one for each result that a saved call
  kept.
- *dots*: the number of matrix products, as traced and as *compiled*. If the second number is smaller, the compiler merged
  equal products.
- *generators*: the number of random number generators, likewise. XLA:CPU expands each into a hash of a counter, so these
  hashes are counted. A recomputation starts from the seed of the forward, but as another input of the program: its numbers
  are equal, and are never merged. Since they depend only on that seed, the compiler may draw them before the backward
  begins and keep them until then, as with torch_xla's own function.
- *outputs*: the number of outputs of the compiled program. If it is larger than without checkpointing, the program holds or
  writes additional tensors.
- *temp*: the memory that XLA preallocates for tensors that are neither input nor output (`preallocated-temp`). A kept
  tensor may also lie in the memory of a later output, if it fits there: *all buffers* includes inputs and outputs. Any
  checkpointing of blocks needs at least the inputs of the other blocks, and the tensors that one block computes in forward
  and backward.

XLA's flags are `{KEEPS_BARRIERS}`, since XLA:CPU otherwise drops barriers
before it schedules, JAX's included; the last table is without this flag.

The rows of the tables:

- *{NONE}*: no checkpointing.
- *{TORCH}*: `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)`, with the `torch.xla` that reactivate
  registers and without which it fails. This is the negative control.
- *{CONTEXT}*: the same with `context_fn=reactivate.dropin.xla.context_fn`. The recomputation is not merged, but
  torch's function does not tell which gradients it depends on, so it may run before the backward, and then saves nothing.
- *{TORCH_XLA}*: `torch_xla.utils.checkpoint.checkpoint(block.forward, x)`. It puts the parameters themselves behind
  barriers, so they become outputs.
- *{OURS}*: `reactivate.checkpoint(block)(x)`.
- *{ALTERNATE}*: `reactivate.checkpoint(block, policy=every_nth(2, save_ops("linear")))(x)`, and *{LINEARS}*:
  with `policy=save_ops("linear")`. Both save only the first of the two linears of an MLP block, since no backward
  reads the result of the second.
"""


def to_markdown(results: Results) -> str:
    """The page."""
    return "\n".join(_lines(results))


def _lines(results: Results) -> Iterator[str]:
    machine = results.machine
    yield _ABOUT
    yield f"{machine['cpu']}, Python {machine['python']}, torch {machine['torch']}, torch_xla {machine['torch_xla']}."
    yield from ("", "## Targets", "")
    yield (
        f"The temp should be at most 0.35 of the temp without checkpointing for the MLP, 0.4 for the transformer, 0.5 if a "
        f"region ends in ops that save nothing; and at most {OF_TORCH_XLAS:g} of the temp with torch_xla's own function."
    )
    yield from ("", target_table(results).to_markdown())
    for table in model_tables(results):
        yield from ("", f"## {table.title}", "", table.to_markdown())
    yield from ("", "## Without the flag", "", _EARLY, "", early_table(results).to_markdown(), "")


_EARLY = "XLA:CPU without the flag: it drops the barriers before its last CSE and before it schedules."
