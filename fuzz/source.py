"""A program as Python source: the text that runs and that is printed."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import indent

from fuzz.construct import Construct, fill
from fuzz.program import MODULE_POLICIES, REGISTERED, Between, Block, Call, Group, Program, Use
from fuzz.vocabulary import CONSTRUCTS
from fuzz.vocabulary.interludes import INTERLUDES

MODULE_FORMS = ("module", "positional", "method", "work")


def source_of(program: Program) -> str:
    """Return the source of a program."""
    parts = [_class_of(program, index) for index in range(len(program.blocks))]
    return "\n\n".join([*parts, _model(program), _train(program)]) + "\n"


def _lines(lines: Iterable[str], depth: int = 2) -> str:
    return "".join(indent(line, "    " * depth) + "\n" for line in lines)


def filled(program: Program, index: int, use: Use, template: str) -> list[str]:
    """Return the lines of one template of a construct, as block `index` uses it."""
    construct = CONSTRUCTS[use.construct]
    chosen = {name: texts[choice % len(texts)] for (name, texts), choice in zip(construct.options.items(), use.choices)}
    peer = program.blocks[index].peer % len(program.blocks)
    names = {"block": f"blocks[{index}]", "peer": f"blocks[{peer}]", "called": _path(program, index)}
    return fill(template, chosen | names | {"n": str(use.number)})


def _all(program: Program, index: int, place: str) -> list[str]:
    block = program.blocks[index]
    return [
        line for use in block.uses for line in filled(program, index, use, getattr(CONSTRUCTS[use.construct], place))
    ]


def _arguments(program: Program, index: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for use in program.blocks[index].uses:
        for name, value in CONSTRUCTS[use.construct].arguments.items():
            found[filled(program, index, use, name)[0]] = filled(program, index, use, value)[0]
    return found


# -- blocks -----------------------------------------------------------------------------------------------------------


def _class_of(program: Program, index: int) -> str:
    parameters = "".join(f", {name}" for name in _arguments(program, index))
    calls_work = any(call == Call(index, "work") for call in program.calls())
    work = f"\n    def work(self, x{parameters}):\n        return self.forward(x{parameters})\n" if calls_work else ""
    init = _all(program, index, "init")
    made = "    def __init__(self):\n        super().__init__()\n" + _lines(init) + "\n" if init else ""
    return (
        f"class Block{index}(Base):\n{made}"
        f"    def forward(self, x{parameters}):\n        h = (self.lin(x) @ self.mix).sin()\n"
        f"{_lines(_all(program, index, 'body'))}        return h\n{work}"
    )


# -- the model --------------------------------------------------------------------------------------------------------


def _path(program: Program, index: int) -> str:
    return {
        "attribute": f"self.c{index}",
        "module list": f"self.l{index}[0]",
        "second name": f"self.again{index}",
        "plain list": f"self.p{index}[0]",
        "dict": f'self.d{index}["a"]',
        "closure": f"self.get{index}()",
    }[program.blocks[index].home]


def _held(block: Block, index: int) -> str:
    return {
        "attribute": f"self.c{index} = blocks[{index}]",
        "module list": f"self.l{index} = nn.ModuleList([blocks[{index}]])",
        "second name": f"self.c{index} = self.again{index} = blocks[{index}]",
        "plain list": f"self.p{index} = [blocks[{index}]]",
        "dict": f'self.d{index} = {{"a": blocks[{index}]}}',
        "closure": f"self.get{index} = lambda: blocks[{index}]",
    }[block.home]


def _model(program: Program) -> str:
    indices = range(len(program.blocks))
    init = [_held(program.blocks[index], index) for index in indices]
    init += [line for index in indices for line in _all(program, index, "model_init")]
    body: list[str] = []
    for number, item in enumerate(program.items):
        body += _group(program, number, item) if isinstance(item, Group) else _call(program, str(number), item)
        body += ["mid = h"] if number == 0 else []
    stages = "".join(
        f"        if index == {index}:\n            return {_path(program, index)}(x, **more)\n" for index in indices
    )
    stage = f"    def stage(self, index, x, **more):\n{stages}\n" if _has_form(program, "stage") else ""
    return (
        f"class Model(nn.Module):\n    def __init__(self, blocks):\n        super().__init__()\n{_lines(init)}\n{stage}"
        f"    def forward(self, x):\n        h = mid = x\n{_lines(body)}        return h, mid\n"
    )


def _has_form(program: Program, form: str) -> bool:
    return any(call.form == form for call in program.calls())


def _group(program: Program, number: int, group: Group) -> list[str]:
    inside = [line for index, call in enumerate(group.calls) for line in _call(program, f"{number}_{index}", call)]
    head = [f"def group{number}(h):", *(f"    {line}" for line in inside), "    return h"]
    return [*head, f"h = {_region(program, f'group{number}', '')}(h)"]


def _region(program: Program, fn: str, form: str) -> str:
    options = program.options
    policy = options.policy if form in MODULE_FORMS or options.policy not in MODULE_POLICIES else ""
    given = [f"policy={policy}"] if policy and form else []
    return f"checkpoint({', '.join([fn, *given, *_given(program)])})"


def _given(program: Program) -> list[str]:
    options = program.options
    given = [] if options.early_stop else ["early_stop=False"]
    given += [f"inputs={options.inputs}"] if options.inputs else []
    return given + ([f'check="{options.check}"'] if options.check else [])


def is_applied(program: Program, call: Call) -> bool:
    """Tell if `reactivate.apply` makes the region of a call."""
    return program.options.applied and call.form == "module" and program.blocks[call.block].home in REGISTERED


def _is_applied_elsewhere(program: Program, call: Call) -> bool:
    return any(other.block == call.block and is_applied(program, other) for other in program.calls())


def _call(program: Program, name: str, call: Call) -> list[str]:
    more = _arguments(program, call.block)
    path = _path(program, call.block)
    lines = _all(program, call.block, "before")
    keywords = "".join(f", {key}={value}" for key, value in more.items())
    values = "".join(f", {value}" for value in more.values())
    table = "{" + ", ".join(f'"{key}": {value}' for key, value in more.items()) + "}"
    form = "none" if is_applied(program, call) else call.form
    policys_form = "" if _is_applied_elsewhere(program, call) else form  # in a region of `apply` no policy has a say
    fn = f"region{name}"

    def define(head: str, result: str, given: str) -> list[str]:
        return [f"def {fn}({head}):", f"    return {result}", f"h = {_region(program, fn, policys_form)}({given})"]

    if form == "none":
        return [*lines, f"h = {path}(h{keywords})"]
    if form in MODULE_FORMS:
        suffix = {"method": ".forward", "work": ".work"}.get(form, "")
        return [
            *lines,
            f"h = {_region(program, path + suffix, policys_form)}(h{values if form == 'positional' else keywords})",
        ]
    if form == "lambda":
        return [*lines, f"h = {_region(program, f'lambda y: {path}(y{keywords})', policys_form)}(h)"]
    if form == "closure":
        captured = [f"given{name} = h"]
        return [*lines, *captured, *define("", f"{path}(given{name}{keywords})", "")]
    if form == "default":
        head = "".join(f", {key}={value}" for key, value in more.items())
        return [*lines, *define("x=h" + head, f"{path}(x{''.join(f', {key}={key}' for key in more)})", "")]
    if form == "list":
        return [*lines, *define("given", f"{path}(*given)", f"[h{values}]")]
    if form == "dict":
        return [*lines, *define("x, more", f"{path}(x, **more)", f"h, {table}")]
    if form == "dataclass":
        return [*lines, *define("box", f"{path}(box.x, **box.more)", f"Box(h, {table})")]
    if form == "stage":
        return [*lines, f"h = {_region(program, 'self.stage', policys_form)}({call.block}, h{keywords})"]
    if form == "partial":
        return [*lines, f"h = {_region(program, f'functools.partial({path}{keywords})', policys_form)}(h)"]
    return [*lines, *define("x, y", f"{path}(x{keywords}) + y.sin()", "h, h")]


# -- the training loop ------------------------------------------------------------------------------------------------


def _train(program: Program) -> str:
    training = program.training
    indices = range(len(program.blocks))
    made = ", ".join(f"Block{index}()" for index in indices)
    optimizer = training.optimizer.format("leaves(blocks)")
    lines = [f"blocks = [{made}]"]
    lines += [line for index in indices for line in _all(program, index, "setup")]
    lines += ["model = Model(blocks)", *_applied(program)]
    lines += ["optimizer = None" if training.late_optimizer else f"optimizer = {optimizer}"]
    lines += [f"for step in range({training.steps}):", "    for block in blocks:", "        block.step = step"]
    between = _between(program)
    for event in training.schedule.split():
        if event[0] == "B":
            lines += [f"    {line}" for line in between]
            between = []
        lines += [f"    {line}" for line in (_forward if event[0] == "F" else _backward)(program, event[1])]
    lines += [f"    optimizer = optimizer or {optimizer}"] if training.late_optimizer else []
    lines += ["    optimizer.step()", "    optimizer.zero_grad()", '    note("state", model, blocks)']
    return f"def train(note):\n{_lines(lines, 1)}"


def _applied(program: Program) -> list[str]:
    names = {"attribute": "c{}", "module list": "l{}.0", "second name": "c{}"}
    paths = {
        names[program.blocks[call.block].home].format(call.block): None
        for call in program.calls()
        if is_applied(program, call)
    }
    if not paths:
        return []
    policy = program.options.policy.replace('"lin"', '"*.lin"')
    given = ([f"save={policy}"] if policy else []) + _given(program)
    return [f"recompute({', '.join(['model', repr(list(paths)), *given])})"]


def _forward(program: Program, batch: str) -> list[str]:
    training = program.training
    needs = ", requires_grad=True" if training.input_needs_grad else ""
    call = f"out{batch}, mid{batch} = model(x{batch})"
    around = ["torch.autocast(DEVICE.type, torch.bfloat16)"] * training.autocast + [training.hooks] * bool(
        training.hooks
    )
    run = [f"with {', '.join(around)}:", f"    {call}"] if around else [call]
    extra = [
        "".join(filled(program, index, use, CONSTRUCTS[use.construct].loss))
        for index, block in enumerate(program.blocks)
        for use in block.uses
        if CONSTRUCTS[use.construct].loss
    ]
    loss = " + ".join([f"out{batch}.float().square().mean()", *extra])
    return [
        f"x{batch} = torch.randn(3, 4{needs})",
        *run,
        f"loss{batch} = {loss}",
        *([f"part{batch} = mid{batch}.float().sum()"] if training.backward == "outputs" else []),
        f'note("output", out{batch}, loss{batch})',
    ]


def _backward(program: Program, batch: str) -> list[str]:
    training = program.training
    given = f"leaves(blocks, x{batch})"
    grad = f"torch.autograd.grad(loss{batch}, {given}, allow_unused=True"
    lines = {
        "backward": [f"loss{batch}.backward()"],
        "grad": [f"grads = {grad})", 'note("gradient", grads)', f"store({given}, grads)"],
        "retain": [f"loss{batch}.backward(retain_graph=True)", f"loss{batch}.backward()"],
        "double": [f"grads = {grad}, create_graph=True)", 'note("gradient", grads)', "squares(grads).backward()"],
        "outputs": [f"part{batch}.backward(retain_graph=True)", f"loss{batch}.backward()"],
        "inputs": [f"loss{batch}.backward(inputs={given})"],
    }[training.backward]
    if training.around_backward:
        lines = [f"with {training.around_backward}:", *(f"    {line}" for line in lines)]
    return [*lines, f'note("gradient", [leaf.grad for leaf in {given}])']


def _between(program: Program) -> list[str]:
    lines: list[str] = []
    for between in program.between:
        text = between_text(program, between)
        writes = [line for line in text if "_(" in line]
        text = ["with torch.no_grad():", *(f"    {line}" for line in text)] if writes else text
        lines += [f"if step == {between.step}:", *(f"    {line}" for line in text)] if text else []
    return lines


def between_text(program: Program, between: Between) -> list[str]:
    """Return the lines of a statement between forward and backward; none where its block or use is gone."""
    if between.block >= len(program.blocks):
        return []
    if between.number == -1:
        return fill(INTERLUDES[between.index % len(INTERLUDES)], {"block": f"blocks[{between.block}]"})
    for use in program.blocks[between.block].uses:
        construct: Construct = CONSTRUCTS[use.construct]
        if use.number == between.number and construct.between:
            return filled(program, between.block, use, construct.between[between.index % len(construct.between)])
    return []
