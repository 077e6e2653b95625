"""Results on XLA as a page of the docs."""

from __future__ import annotations

from collections.abc import Iterator

from _xla_case import KEEPS_BARRIERS
from _xla_results import OF_TORCH_XLAS, Results
from _xla_tables import early_table, model_tables, target_table
from _xla_ways import ALTERNATE, CONTEXT, LINEARS, NONE, OURS, TORCH, TORCH_XLA

_ABOUT = f"""# On XLA, measured

On XLA forward, recomputation and backward are one graph. Its compiler finds the same ops on the same inputs twice, and
computes them once: a checkpoint is undone. Regions of reactivate stand behind barriers (`opt-barrier`) that keep the two
apart, and that wait for the gradient of what the region returned. Here is what XLA makes of them.

**These are figures of XLA's CPU compiler. No saving on a TPU is claimed: none was measured.**

The script is `benchmarks/xla.py`, and this page is what its `--page` writes of its results: no figure is edited by hand.

## How it is measured

One step, forward, loss and backward in fp32, is traced and compiled on torch_xla with `PJRT_DEVICE=CPU`, each case in a
process of its own. Figures are read from the program that torch_xla traced and from what XLA dumps (`--xla_dump_to`).

- *barriers*: `opt-barrier` in the traced program. One a region, and one for each result that a saved call kept.
- *dots*: matrix products, as traced and as *compiled*. What is less in the second was computed once for two.
- *generators*: of random numbers, likewise. XLA:CPU writes each out as a hash of a count, which is what is counted then.
  A recomputation starts from the seed of the forward pass, but as another input of the program: its numbers are equal, and
  never merged. As they read no more than that seed, the compiler may draw them before the backward begins, and keep them
  until then: so with torch_xla's own function, too.
- *outputs*: of the compiled program. More than without checkpointing means that something is held, or written anew.
- *temp*: what XLA preallocates for whatever is neither input nor output (`preallocated-temp`). What is kept for a while may
  also lie where an output will be, if it fits there: *all buffers* has the inputs and outputs, too. The least that any
  checkpointing of blocks needs is the inputs of the other blocks, and what one block computes forward and backward.

XLA's flags are `{KEEPS_BARRIERS}`, as the pipeline of XLA:CPU otherwise drops barriers before it
schedules, as it does to JAX's remat; the last table is without it.

The ways:

- *{NONE}*: no checkpointing.
- *{TORCH}*: `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)`, with the `torch.xla` that reactivate
  registers and without which it fails. The negative control.
- *{CONTEXT}*: the same with `context_fn=reactivate.dropin.xla.context_fn`. A recomputation is not merged, but torch's
  function does not say which gradients it waits for, so that it may run before the backward, and then saves nothing.
- *{TORCH_XLA}*: `torch_xla.utils.checkpoint.checkpoint(block.forward, x)`. It puts parameters themselves behind barriers, so
  that they become outputs.
- *{OURS}*: `reactivate.checkpoint(block)(x)`.
- *{ALTERNATE}*: `reactivate.checkpoint(block, policy=every_nth(2, save_ops("linear")))(x)`, and *{LINEARS}*:
  with `policy=save_ops("linear")`. Of the two linears of an MLP block that is the first either way, as no backward reads
  the result of the second.
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
        f"A temp of at most 0.35 of that without checkpointing for the MLP, 0.4 for the transformer, 0.5 where a region ends "
        f"in ops that save nothing; and at most {OF_TORCH_XLAS:g} of that with torch_xla's own function."
    )
    yield from ("", target_table(results).to_markdown())
    for table in model_tables(results):
        yield from ("", f"## {table.title}", "", table.to_markdown())
    yield from ("", "## Without the flag", "", _EARLY, "", early_table(results).to_markdown(), "")


_EARLY = "XLA:CPU as it is: barriers are gone before ops are merged for the last time, and before they are scheduled."
