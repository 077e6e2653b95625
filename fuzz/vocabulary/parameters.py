"""Constructs that make or write parameters in the forward."""

from fuzz.construct import Construct

CONSTRUCTS = {
    "parameter": Construct(
        "h = h * self.p$n + self.p$n.sin()", init="self.p$n = nn.Parameter(torch.ones(4))", weight=4
    ),
    "shared weight": Construct("h = F.linear(h, self.tied$n)", init="self.tied$n = self.lin.weight"),
    "lazy parameter": Construct(
        """
if $missing:
    $make
h = h * self.made$n
""",
        init="$init",
        options={
            "init": ("", 'self.register_parameter("made$n", None)'),
            "missing": ("getattr(self, 'made$n', None) is None",),
            "make": (
                "self.made$n = nn.Parameter(torch.randn(4))",
                "self.made$n = nn.Parameter(h.detach().float().mean(0))",
            ),
        },
    ),
    "lazy child": Construct(
        """
if not hasattr(self, "late$n"):
    self.late$n = $child
h = self.late$n(h)
""",
        options={"child": ("nn.Linear(4, 4)", "nn.BatchNorm1d(4)", "nn.Dropout(0.4)")},
    ),
    "lazy buffer": Construct(
        """
if not hasattr(self, "late$n"):
    self.register_buffer("late$n", $value)
h = h + self.late$n
$write
""",
        options={
            "value": ("torch.randn(4)", "h.detach().float().mean(0)"),
            "write": ("", "self.late$n.mul_(0.5)"),
        },
    ),
    "lazy module": Construct(
        "h = self.lazy$n(h)",
        init="self.lazy$n = $kind",
        options={"kind": ("nn.LazyLinear(4)", "nn.LazyBatchNorm1d()")},
        weight=1,
    ),
    "growing parameter list": Construct(
        """
if len(self.grown$n) $until:
    self.grown$n.append(nn.Parameter(torch.randn(4)))
for grown$n in self.grown$n:
    h = h + grown$n.sin() * h
""",
        init="self.grown$n = nn.ParameterList()",
        options={"until": ("< 1", "<= self.step")},
        weight=1,
    ),
    "data-dependent init": Construct(
        """
if not $ready:
    with torch.no_grad():
        self.scale$n.copy_(1 / (h.float().std(0) + 0.1))
    $done
h = h * self.scale$n
""",
        init="self.scale$n = nn.Parameter(torch.ones(4))\n$start",
        options={
            "start": ("self.ready$n = $kind",),
            "kind": ("False", "torch.tensor(False)"),
            "ready": ("self.ready$n",),
            "done": ("self.ready$n = True", "self.ready$n = self.step >= 0"),
        },
    ),
    "projection": Construct(
        """
with torch.no_grad():
    $write
h = F.linear(h, self.w$n)
""",
        init="self.w$n = nn.Parameter(torch.randn(4, 4))",
        options={
            "write": (
                "self.w$n.clamp_(-0.5, 0.5)",
                "self.w$n.div_(self.w$n.norm())",
                "self.w$n.mul_(0.9)",
                "self.w$n.data = self.w$n.data.clamp(-0.5, 0.5)",
            )
        },
    ),
}
