"""Results as a page of Markdown. Its parts are sections by name, so that a page of the docs can include one of them."""

from __future__ import annotations

from collections.abc import Iterator

from _figures import SINGLE
from _selective_results import BLOCK, EXPERIMENT, LARGE, PARTS, Results
from _selective_tables import TITLES, different, tables


def to_markdown(results: Results) -> str:
    """All parts that were measured, each between the marks that `--8<-- "FILE:PART"` looks for.

    Headings start at the third level.
    """
    machine, lines = results.machine, list[str]()
    where = (
        f"{machine['device name']}, Python {machine['python']}, torch {machine['torch']}, one thread. All implementations "
        "run in one process, interleaved, in an order that is shuffled in every round."
    )
    for part in PARTS:
        found = tables(results, part)
        if found:
            lines += [
                f"<!-- --8<-- [start:{part}] -->",
                "",
                f"### {TITLES[part]}",
                "",
                where,
                *_about(results, part),
                "",
            ]
            for table in found:
                lines += [f"**{table.title}**", "", table.to_markdown(), ""]
            lines += [*_differences(results, part), "", f"<!-- --8<-- [end:{part}] -->", ""]
    return "\n".join(lines)


def _about(results: Results, part: str) -> Iterator[str]:
    settings = results.settings
    if part == BLOCK:
        yield (
            "Ratios compare with the implementation of torch that keeps the same calls, or with torch_remat. If no call is "
            "kept, torch's implementation is non-reentrant checkpointing; if some are, it is selective activation "
            "checkpointing (SAC). torch and torch_remat also keep the result of the last linear, which no backward reads, "
            "and torch_remat keeps the copies that `matmul` makes. Allocated bytes include the result of the block and the "
            "states of random number generators, but not the block's argument. "
            + " ".join(f"*{name}*: {text}." for name, text in results.methods().items())
        )
    elif part == LARGE:
        yield (
            f"{settings.large_width} features, {settings.large_length} tokens, a batch of one. The ideal is the time of the "
            "plain step plus that of the recomputed ops alone: the same forward without a graph, which looks up the results "
            "of kept calls and omits the last product and sum, since no backward reads them. "
            f"{SINGLE.name.capitalize()}: {SINGLE.describe}."
        )
    elif part == EXPERIMENT and results.experiment is not None:
        yield (
            f"The byte-level GPT of `examples/byte_gpt.py`: {settings.layers} blocks of width {settings.dim}, "
            f"{results.experiment.parameters / 1e6:.1f} million parameters, {settings.context} tokens a sequence, no "
            "dropout; forward and backward. The peak is the memory that torch allocates in a step beyond what was allocated "
            f"before; the time is the median of {settings.experiment_calls} rounds, with a 95 % bootstrap interval."
        )


def _differences(results: Results, part: str) -> list[str]:
    found = different(results, part)
    if not found:
        return ["Every implementation gives the results of the plain step, bit for bit."]
    return ["These differ from the plain step, bit for bit:", "", *(f"- {name}: {what}" for name, what in found)]
