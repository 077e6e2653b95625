"""The two tiers of the tests: what `make test` runs, in minutes, and what it leaves to `make test-all`.

A test is in the second tier if its file is named here, if it is marked slow, or if it is one more case of a product: of
`kind x storage x saved x early stop` the first tier takes cases in which each two values meet.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

SECOND = {
    "packages of hosts": "architectures cache_watch integrations_accelerate integrations_lightning integrations_transformers "
    "plan_models recipe recipe_configs recipe_peers recipe_refusals",
    "a GPU": "gpu gpu_offload gpu_training",
    "torch's tables, row by row": "ops module_table",
    "compilers": "aot compile compute_intensive plan_compiled policies_in_graph scripts",
    "several processes": "collectives distributed retry_on_oom retry_on_oom_companions offload_disk_processes pipelines "
    "plan_group plan_offline plan_ranks plan_sharded process_groups simulated storage_sharded",
    "random programs": "fuzz property saved_sites_property",
    "plans of whole models": "adaptive plan_answers plan_by_value plan_containers plan_head plan_leaves_alone plan_life "
    "plan_looks plan_recurrent plan_shared plan_spans plan_storages plan_storages_cli plan_storages_solver plan_values "
    "planner_collectives planner_reserved",
    "drop-ins for frameworks": "dropin_deepspeed dropin_megatron dropin_transformer_engine fp8_state heirs",
    "long runs": "offload_long",
    "prose, reports, commands and benchmarks": "benchmarks benchmarks_architectures benchmarks_collectives "
    "benchmarks_frontier benchmarks_gpu benchmarks_offload benchmarks_optimum benchmarks_planning benchmarks_selective "
    "benchmarks_sharded cli cli_arguments cli_plan demo explain_policy pages report report_alive report_page report_pictures "
    "torches words",
}
"""Files of the second tier, by what they need or are about."""

LONG = {
    "test_a_function_inside_of_compiled_code_is_recomputed_with_that",
    "test_a_plain_step_that_does_not_fit_is_not_run",
    "test_a_plan_for_another_device_is_the_same_wherever_it_is_made",
    "test_a_step_is_as_if_each_op_ran[vit]",
    "test_a_step_that_is_not_one_of_training_is_warned_of",
    "test_a_step_that_is_slow_or_large_is_simulated",
    "test_advice_is_what_helps_and_names_no_budget_that_nobody_gave",
    "test_compile_with_a_graph_break_in_the_region",
    "test_compiled",
    "test_no_plan_is_larger_than_the_device",
    "test_on_ranks",
    "test_program[a_hundred_nested_regions]",
    "test_program[two_hundred_nested_regions]",
    "test_random_ops_after_one_whose_result_is_given_back",
    "test_the_end_of_a_table_of_positions_ends_the_search",
    "test_the_plan_reaches_the_compiler",
    "test_torch_alone_is_enough_to_print",
    "test_two_thousand_steps_are_flat",
    "test_what_a_region_inside_keeps_is_dropped_unless_the_regions_around_it_save_that_region",
}
"""Tests of other files that take three seconds or more, and whose statement shorter ones of the first tier make as well."""

SECOND_FILES = {f"test_{name}.py" for names in SECOND.values() for name in names.split()}


def is_left_out(path: Path, names: Iterable[str]) -> bool:
    """Tell whether a file is of the second tier, and not even imported for the first; a file that is named is."""
    return path.name in SECOND_FILES and path.name not in {Path(name.partition("::")[0]).name for name in names}


def is_named(item: pytest.Item, names: Iterable[str]) -> bool:
    """Tell whether a test was asked for by its name; or by that of its file, if this is of the second tier."""
    by_file = item.path.name in SECOND_FILES and not item.get_closest_marker("slow")
    parts = (name.partition("::") for name in names)
    return any(Path(file).name == item.path.name and (inside or by_file) for file, _, inside in parts)


def second_tier(items: list[pytest.Item]) -> list[pytest.Item]:
    """List the tests that are in the second tier."""
    groups: dict[Any, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    spare = {item for group in groups.values() for item in _beyond_pairs(group)}
    return [item for item in items if item in spare or item.path.name in SECOND_FILES or _takes_long(item)]


def _takes_long(item: pytest.Item) -> bool:
    inside = item.nodeid.rpartition("::")[2]
    return bool(item.get_closest_marker("slow")) or inside in LONG or inside.partition("[")[0] in LONG


def _beyond_pairs(cases: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases of one test without which each two values of its parameters still meet in a case."""
    values = {case: _values_of(case) for case in cases}
    if len(cases) < 2 or min(map(len, values.values())) < 3:  # of two parameters each case is a pair
        return
    pairs = {case: set(itertools.combinations(given, 2)) for case, given in values.items()}
    missing: set[Any] = set().union(*pairs.values())
    left = dict.fromkeys(cases)
    while missing:
        best = max(left, key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        del left[best]
    yield from left


def _values_of(case: pytest.Item) -> list[tuple[str, Any]]:
    """Name the value that each `parametrize` over a test gives in one case; the columns of one table are one value."""
    given = dict(getattr(getattr(case, "callspec", None), "params", {}))
    found = []
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        names = [name.strip() for name in names]
        found.append((" ".join(names), tuple(id(given.pop(name)) for name in names)))
    return found + [(name, id(value)) for name, value in given.items()]
