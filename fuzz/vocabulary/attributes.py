"""Constructs with Python state: counters, containers, caches, configurations, stored tensors."""

from fuzz.construct import Construct

BRANCHES = (
    "h = h.sin() if $count % 2 else h.cos()",
    "h = h * (1.0 + 0.5 * ($count % 3))",
    "if $count % 3 == 2:\n    h = self.lin(h)",
)

CONSTRUCTS = {
    "cached table": Construct(
        "h = $use",
        init="""
self.table$n = functools.lru_cache($most)(lambda length: torch.arange(4).float().mul(0.1 * length).cos())
""",
        options={
            "most": ("None", "1"),
            "use": (
                "h * self.table$n(4)",
                "h * self.table$n(self.step // 2)",
                "h * self.table$n(1) + self.table$n(2)",
                "h.mul(self.table$n(3)).mul(self.table$n(self.step))",
            ),
        },
        weight=2,
    ),
    "counter": Construct(
        "$order",
        init="self.calls$n = 0",
        options={
            "order": ("$increase\n$branch", "$branch\n$increase"),
            "branch": BRANCHES,
            "increase": ("self.calls$n += 1",),
            "count": ("self.calls$n",),
        },
        between=("$block.calls$n += 1",),
        weight=6,
    ),
    "counter in a container": Construct(
        "$at += 1\n$branch",
        init="""
self.calls$n, self.table$n = [0], {"calls": 0}
self.holder$n, self.deep$n = Holder(0), {"a": [Holder(0)]}
self.array$n = numpy.zeros(2)
""",
        options={
            "branch": BRANCHES,
            "at": (
                "self.calls$n[0]",
                "self.table$n['calls']",
                "self.holder$n.tensor",
                "self.deep$n['a'][0].tensor",
                "self.array$n[0]",
            ),
            "count": ("$at",),
        },
        between=("$block.calls$n[0] += 1", "$block.holder$n.tensor += 1", "$block.calls$n = [1]"),
        weight=4,
    ),
    "counter of the class": Construct(
        "$at += 1\n$branch",
        options={"at": ("type(self).calls", "COUNTS['calls']", "SHARED.tensor"), "branch": BRANCHES, "count": ("$at",)},
        weight=1,
    ),
    "list": Construct(
        "$change\nh = h * (1.0 + 0.1 * len(self.items$n))",
        init="self.items$n = $kind",
        options={
            "kind": ("[1.0, 0.5, 2.0]", "collections.deque([1.0, 0.5, 2.0])"),
            "change": (
                "self.items$n.append(0.5)",
                "h = h * self.items$n.pop() if self.items$n else h.sin()",
                "self.items$n.append(self.items$n[0] * 0.5)\nh = h * self.items$n[-1]",
                "self.items$n.append(h.detach().mean())\nh = h + self.items$n[-1]",
                "self.items$n = [*self.items$n, 1.0]",
            ),
        },
        between=("$block.items$n.append(1.0)", "$block.items$n.clear()", "$block.items$n = [1.0]"),
        weight=4,
    ),
    "cache by identity": Construct(
        """
key$n = $key
if key$n not in self.seen$n:
    self.seen$n[key$n] = $value
    h = h.sin()
h = h * self.seen$n[key$n]
""",
        init="self.seen$n = $table",
        options={
            "key": ("id(self.lin)", "self.lin", "id(self.lin.weight)", "self.step"),
            "value": ("0.5", "h.detach().mean()", "random.random()"),
            "table": ("{}", "collections.OrderedDict()"),
        },
        weight=3,
    ),
    "weak table": Construct(
        """
if self.lin not in self.weak$n:
    h = h.sin()
self.weak$n[self.lin] = self.weak$n.get(self.lin, 0) + 1
h = h * self.weak$n[self.lin]
""",
        init="self.weak$n = weakref.WeakKeyDictionary()",
        weight=1,
    ),
    "set": Construct(
        "if self.step in self.done$n:\n    h = h.cos()\nself.done$n.add(self.step)",
        init="self.done$n = set()",
        weight=1,
    ),
    "remembered input": Construct(
        "h = h.sin() if $what is self.last$n else h.cos()\nself.last$n = $what",
        init="self.last$n = None",
        options={"what": ("x", "self.lin.weight", "self.stat", "type(self)", "self.lin.forward.__func__")},
        weight=2,
    ),
    "auxiliary loss": Construct(
        "self.aux$n = $value$extra",
        init="self.aux$n = torch.zeros(())",
        options={
            "value": ("h.float().square().mean()", "h.float().sum()", "(h.float() * self.lin.weight.sum()).mean()"),
            "extra": ("", " + self.aux$n.detach()", "\nh = h + self.aux$n.detach()"),
        },
        loss="$block.aux$n",
        between=("$block.aux$n = None", "$block.aux$n = $block.aux$n.detach()"),
        weight=5,
    ),
    "auxiliary list": Construct(
        "self.losses$n.append(h.float().mean())",
        init="self.losses$n = []",
        loss="sum($block.losses$n[-1:])",
        between=("$block.losses$n.clear()",),
        weight=2,
    ),
    "stored tensor": Construct(
        "if self.last$n is not None:\n    h = h + self.last$n.$how\nself.last$n = h.detach().float()",
        init="self.last$n = None",
        options={"how": ("mean()", "sin()", "clone()")},
        between=("$block.last$n = None", "$block.last$n = torch.zeros(3, 4)"),
        weight=4,
    ),
    "moving average": Construct(
        "self.mean$n = 0.9 * self.mean$n + 0.1 * float(h.detach().mean())\nh = h - self.mean$n",
        init="self.mean$n = 0.0",
        between=("$block.mean$n = 0.0",),
        weight=2,
    ),
    "flag": Construct(
        "self.flag$n = not self.flag$n\nif self.flag$n:\n    h = h.sin()",
        init="self.flag$n = $start",
        options={"start": ("False", "True")},
        between=("$block.flag$n = not $block.flag$n",),
    ),
    "configuration": Construct(
        "h = h * self.config$n.$how",
        init="self.config$n = $kind",
        options={"kind": ("Config()", "Config(Config())"), "how": ("scale", "half()")},
        between=("$block.config$n.scale = 3.0", "$block.config$n = Config()", "$block.config$n.scale = 0.25"),
        weight=3,
    ),
    "deleted attribute": Construct(
        "if hasattr(self, 'once$n'):\n    h = h * self.once$n\n    del self.once$n", init="self.once$n = 0.5", weight=1
    ),
    "swapped method": Construct(
        "h = self.method$n(h)\nself.method$n, self.other$n = self.other$n, self.method$n",
        init="self.method$n, self.other$n = torch.sin, torch.cos",
        weight=1,
    ),
    "swapped child": Construct(
        "h = self.left$n(h)\nself.left$n, self.right$n = self.right$n, self.left$n",
        init="self.left$n, self.right$n = nn.Linear(4, 4), nn.Linear(4, 4)",
        weight=1,
    ),
}
