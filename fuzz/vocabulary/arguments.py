"""Constructs with arguments that carry state or identity."""

from fuzz.construct import Construct

CONSTRUCTS = {
    "popped list": Construct(
        "h = h * todo$n.pop()",
        before="todo$n = [0.5, 1.5, 0.75]",
        arguments={"todo$n": "todo$n"},
        weight=3,
    ),
    "appended list": Construct(
        "$append\nh = h * (1 + len(found$n))",
        before="found$n = []",
        arguments={"found$n": "found$n"},
        options={"append": ("found$n.append(1.0)", "found$n.append(h.detach().mean())", "found$n.append(h.mean())")},
        weight=3,
    ),
    "collected outputs": Construct(
        "collected$n.append(h)\nh = h + sum(y.mean() for y in collected$n[-2:])",
        model_init="self.collected$n = []",
        before="self.collected$n.clear()",
        arguments={"collected$n": "self.collected$n"},
        weight=2,
    ),
    "dict argument": Construct(
        "table$n['calls'] = table$n.get('calls', 0) + 1\nh = h * table$n['calls']",
        model_init="self.table$n = {}",
        arguments={"table$n": "self.table$n"},
        weight=2,
    ),
    "log tensor": Construct(
        "$write\n$read",
        model_init="self.log$n = torch.zeros(6)",
        arguments={"log$n": "self.log$n"},
        options={
            "write": (
                "log$n[self.step] = h.detach().float().mean()",
                "log$n[self.step % 6 : self.step + 2].copy_(h.detach().float().mean().expand(2))",
                "log$n.add_(h.detach().float().mean())",
            ),
            "read": ("", "h = h + log$n.sum()", "h = h + log$n[0]"),
        },
        weight=3,
    ),
    "same object": Construct(
        "h = h.sin() if config$n is $other else h.cos()",
        setup="$block.config$n = $kind",
        options={
            "kind": (
                "Config()",
                "[1.0, 2.0]",
                "{'a': 1}",
                "torch.ones(4)",
                "(Config(),)",
                "Holder(None)",
                "torch.ones(())",
            ),
            "other": ("self.config$n", "self.__dict__['config$n']"),
        },
        arguments={"config$n": "$called.config$n"},
        between=("$block.config$n = $kind",),
        weight=4,
    ),
    "configuration argument": Construct(
        "h = h * config$n.scale\n$change",
        model_init="self.config$n = Config()",
        arguments={"config$n": "self.config$n"},
        options={"change": ("", "config$n.scale = config$n.scale * 0.5")},
        between=("model.config$n.scale = 3.0",),
        weight=3,
    ),
    "iterator": Construct(
        "h = h * next(values$n)",
        before="values$n = iter([0.5, 1.5, 2.5])",
        arguments={"values$n": "values$n"},
        weight=1,
    ),
    "zip argument": Construct(
        "for first$n, second$n in pairs$n:\n    h = h * first$n + second$n",
        before="pairs$n = $kind",
        options={"kind": ("zip([0.5, 1.5], [1.0, 2.0])", "enumerate([0.5, 1.5])", "map(abs, [-1.0]) and [(1.0, 2.0)]")},
        arguments={"pairs$n": "pairs$n"},
        weight=1,
    ),
    "tensor argument": Construct(
        "h = h + more$n.$how",
        before="more$n = $kind",
        arguments={"more$n": "more$n"},
        options={
            "kind": ("h * 0.5", "h.detach()", "h", "x", "x[0]", "torch.ones(4)", "torch.ones(()) * 0.5"),
            "how": ("sin()", "cos() * h", "clone()"),
        },
        weight=5,
    ),
    "written argument": Construct(
        "given$n.$write\nh = h + given$n$how",
        before="given$n = $kind",
        arguments={"given$n": "given$n"},
        options={
            "kind": ("torch.ones(3, 4)", "h.detach().float().clone()", "h * 1.0"),
            "write": ("mul_(0.5)", "add_(1.0)", "zero_()"),
            "how": ("", ".sin()"),
        },
        weight=3,
    ),
    "table by tensor": Construct(
        "h = h * table$n[id(key$n)]",
        before="key$n = torch.ones(4)\ntable$n = {id(key$n): 0.5}",
        arguments={"key$n": "key$n", "table$n": "table$n"},
        weight=2,
    ),
    "nonlocal counter": Construct(
        "h = h * bump$n()",
        model_init="""
calls$n = 0
def bump$n():
    nonlocal calls$n
    calls$n += 1
    return 1.0 + calls$n % 2
self.bump$n = bump$n
""",
        arguments={"bump$n": "self.bump$n"},
        weight=2,
    ),
    "array argument": Construct(
        "array$n[0] += 0.5\nh = h * float(array$n[0])",
        before="array$n = numpy.ones(2)",
        arguments={"array$n": "array$n"},
        weight=1,
    ),
    "set argument": Construct(
        "h = h.sin() if self.step in steps$n else h.cos()\nsteps$n.add(self.step)",
        before="steps$n = set()",
        arguments={"steps$n": "steps$n"},
        weight=1,
    ),
}
