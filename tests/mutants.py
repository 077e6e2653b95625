"""Mutants of the core: one operator, condition, number, result or statement changed, in functions that are loaded already.

A mutant takes the place of a function's code (`function.__code__`), so the module is not imported again and whoever holds
the function runs the mutant. Code that runs only while a module is imported, and what other processes run, stays as it is.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

import reactivate

ROOT = Path(str(reactivate.__file__)).parent.parent
ROOMS = ("_region", "_saved_calls", "_snapshot", "guards")
CORE = [path for room in ROOMS for path in sorted((ROOT / "reactivate" / room).glob("*.py")) if path.stem != "__init__"]
CORE.append(ROOT / "reactivate" / "planner" / "solve.py")

Change = Callable[[ast.AST], "ast.AST | None"]
"""Changes a node where it is, or returns another one for its place."""

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
}
DROPPED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        node: the place of the node among all nodes of the file, as `ast.walk` lists them.
        block: the block of the file that runs the node: a list of statements, numbered.
    """

    path: Path
    function: str
    line: int
    kind: str
    before: str
    node: int
    block: int

    @property
    def name(self) -> str:
        """A name that stays when lines are added above."""
        return f"{self.path.relative_to(ROOT / 'reactivate')} {self.function}: {self.kind}: {self.before}"


def changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    """List the kinds of mutants of one node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARED:
        yield "other comparison", _compare
    if isinstance(node, ast.BoolOp):
        yield "and for or", _join
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in COMPUTED:
        yield "other operator", _compute
    if isinstance(node, (ast.If, ast.While, ast.IfExp)) and not _is_negated_by_comparing(node.test):
        yield "negated condition", _negate
    if isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        yield "other constant", _count
    if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield "no result", _return_nothing
    if isinstance(node, DROPPED) and _has_effect(node):
        yield "no statement", lambda node: ast.copy_location(ast.Pass(), node)


def _compare(node: ast.AST) -> None:
    assert isinstance(node, ast.Compare)
    node.ops = [COMPARED[type(node.ops[0])]()]


def _join(node: ast.AST) -> None:
    assert isinstance(node, ast.BoolOp)
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()


def _compute(node: ast.AST) -> None:
    assert isinstance(node, (ast.BinOp, ast.AugAssign))
    node.op = COMPUTED[type(node.op)]()


def _negate(node: ast.AST) -> None:
    assert isinstance(node, (ast.If, ast.While, ast.IfExp))
    node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)


def _count(node: ast.AST) -> None:
    assert isinstance(node, ast.Constant)
    node.value = not node.value if isinstance(node.value, bool) else node.value + 1


def _return_nothing(node: ast.AST) -> None:
    assert isinstance(node, ast.Return)
    node.value = None


def _is_negated_by_comparing(node: ast.AST) -> bool:
    """Tell whether another comparison is the negated condition already."""
    order = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
    return isinstance(node, ast.Compare) and len(node.ops) == 1 and not isinstance(node.ops[0], order)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _has_effect(node: ast.AST) -> bool:
    """Tell whether a program without the statement can run: without a local name it could not."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, (ast.Call, ast.Yield, ast.YieldFrom))
    if isinstance(node, ast.Assign):
        return all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets)
    return True


class _Blocks(ast.NodeVisitor):
    """The nodes of functions, each with the function and the block that run it."""

    def __init__(self) -> None:
        self.functions: list[str] = []
        self.block = -1
        self.count = 0
        self.blocks: list[list[ast.stmt]] = []
        self.found: dict[ast.AST, tuple[str, int]] = {}

    def visit(self, node: ast.AST) -> None:
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if self.block >= 0:
            self.found[node] = (".".join(self.functions), self.block)
        if is_function or isinstance(node, ast.ClassDef):
            self.functions.append(node.name)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "args") and (is_function or field == "annotation"):
                continue  # runs when the function is made
            inside = isinstance(value, list) and value and isinstance(value[0], ast.stmt)
            if inside and (self.block >= 0 or is_function) and not isinstance(node, ast.ClassDef):
                self._enter(value)
            else:
                for item in value if isinstance(value, list) else [value]:
                    if isinstance(item, ast.AST):
                        self.visit(item)
        if is_function or isinstance(node, ast.ClassDef):
            self.functions.pop()

    def _enter(self, statements: list[ast.stmt]) -> None:
        before, self.block = self.block, self.count
        self.count += 1
        self.blocks.append(statements)
        for statement in statements:
            self.visit(statement)
        self.block = before


def _blocks_of(tree: ast.Module) -> _Blocks:
    blocks = _Blocks()
    blocks.visit(tree)
    return blocks


def mutants_of(path: Path) -> list[Mutant]:
    """List all mutants of a file; of those with one name only the first."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    blocks, found = _blocks_of(tree), {}
    for number, node in enumerate(ast.walk(tree)):
        if node in blocks.found:
            function, block = blocks.found[node]
            for kind, _ in changes(node):
                text = " ".join(ast.unparse(node).split())
                mutant = Mutant(path, function, node.lineno, kind, text[:100], number, block)
                found.setdefault(mutant.name, mutant)
    return list(found.values())


def sample(count: int) -> list[Mutant]:
    """Choose mutants of all files, by a hash of their names: a change of the code changes few of them."""
    every = [mutant for path in CORE for mutant in mutants_of(path)]
    return sorted(every, key=lambda mutant: hashlib.sha1(mutant.name.encode()).digest())[:count]


def mutated(*mutants: Mutant) -> CodeType:
    """Compile the file of mutants with the changes of all of them."""
    path = mutants[0].path
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    for mutant in mutants:
        target = nodes[mutant.node]
        other = dict(changes(target))[mutant.kind](target)
        if other is not None:
            _put(other, target, nodes)
    ast.fix_missing_locations(tree)
    return compile(tree, str(path), "exec")


def _put(other: ast.AST, target: ast.AST, nodes: list[ast.AST]) -> None:
    """Put a statement in the place of another one."""
    for parent in nodes:
        for _, value in ast.iter_fields(parent):
            if isinstance(value, list) and any(item is target for item in value):
                value[next(number for number, item in enumerate(value) if item is target)] = other


def counted(path: Path) -> CodeType:
    """Compile a file so that each block calls `__block__` with its number, a name that has to be among the builtins."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for number, statements in enumerate(_blocks_of(tree).blocks):
        call = ast.Expr(ast.Call(ast.Name("__block__", ast.Load()), [ast.Constant((str(path), number))], []))
        for node in ast.walk(call):
            ast.copy_location(node, statements[0])
        statements.insert(int(_is_docstring(statements[0])), call)
    ast.fix_missing_locations(tree)
    return compile(tree, str(path), "exec")


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class Loaded:
    """The functions of the core in this process, which can be given other code."""

    def __init__(self) -> None:
        gc.unfreeze()
        names = {str(path) for path in CORE}
        self.functions: dict[tuple[str, int, str], list[FunctionType]] = {}
        for item in gc.get_objects():
            if type(item) is FunctionType and item.__code__.co_filename in names:
                self.functions.setdefault(_key(item.__code__), []).append(item)
        gc.freeze()
        rooms = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("reactivate")]
        every = [(room, name, value) for room in rooms for name, value in room.items()]
        self.names = [(room, name) for room, name, value in every if type(value) is CodeType]
        self.sets = [value for _, _, value in every if type(value) is set]

    def replace(self, module: CodeType) -> int:
        """Give all functions of a module their code in another version of it; return how many have changed."""
        changed = 0
        for code in _inside(module):
            for function in self.functions.get(_key(code), ()):
                if function.__code__ != code:
                    self._replace_noted(function.__code__, code)
                    function.__code__ = code
                    changed += 1
        return changed

    def _replace_noted(self, before: CodeType, code: CodeType) -> None:
        """Replace a code that modules know their own frames by."""
        for room, name in self.names:
            if room[name] is before:
                room[name] = code
        for codes in self.sets:
            if before in codes:
                codes.add(code)
            elif id(before) in codes:
                codes.add(id(code))


def _key(code: CodeType) -> tuple[str, int, str]:
    return code.co_filename, code.co_firstlineno, code.co_name


def _inside(code: CodeType) -> Iterator[CodeType]:
    for item in code.co_consts:
        if isinstance(item, CodeType):
            if item.co_name != "<lambda>":  # there may be several on a line
                yield item
            yield from _inside(item)
