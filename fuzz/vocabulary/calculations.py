"""Constructs without state: calculations, hooks, custom functions and nested regions."""

from fuzz.construct import Construct

CONSTRUCTS = {
    "calculate": Construct(
        "h = $what",
        options={
            "what": (
                "h.sin()",
                "h.exp().clamp(max=3.0)",
                "h * h.sigmoid()",
                "F.gelu(h)",
                "F.layer_norm(h, (4,))",
                "torch.where(h > 0, h, x)",
                "h.t().contiguous().t()",
                "torch.cat(h.chunk(2, dim=1)[::-1], dim=1)",
                "(h.double().cos() / 3).float()",
                "h @ h.t() @ h * 0.1",
                "x.clone().add_(h)",
                "h[torch.tensor([2, 0, 1])]",
                "h.view(-1)[2:6].repeat(3).view(3, 4)",
            )
        },
        weight=8,
    ),
    "written clone": Construct(
        """
copy$n = $copy
copy$n$write
h = h * copy$n.cos()
""",
        options={
            "copy": (
                "h.clone()",
                "x.clone()",
                "h.detach().clone()",
                "(h + 0.0)",
                "h.t().contiguous().t()",
                "h.double()",
            ),
            "write": (".mul_(0.5)", "[0] = 1.0", ".t().add_(0.1)", ".view(-1)[3:7].zero_()"),
        },
    ),
    "custom function": Construct("h = Bulk.apply(h, x)"),
    "tensor hook": Construct(
        """
h = h.clone()
if h.requires_grad:
    h.register_hook(lambda grad: grad * 0.5)
"""
    ),
    "parameter hook": Construct(
        """
if self.lin.weight.requires_grad:
    handle$n = self.lin.weight.register_hook(lambda grad: grad * 0.5)
$remove
""",
        options={"remove": ("", "self.handles$n.append(handle$n)")},
        init="self.handles$n = []",
        weight=1,
    ),
    "inner gradient": Construct(
        """
if torch.is_grad_enabled() and x.requires_grad and h.requires_grad:
    (inner$n,) = torch.autograd.grad(h.$what.sum(), x, retain_graph=True, allow_unused=True)
    h = h if inner$n is None else h + inner$n.detach()
""",
        options={"what": ("float()", "sin()", "square()")},
    ),
    "inner backward": Construct(
        """
if torch.is_grad_enabled():
    (self.inner$n.sin() * h.detach()).sum().backward()
    $read
""",
        init="self.inner$n = nn.Parameter(torch.ones(4))",
        options={"read": ("", "h = h + self.inner$n.grad")},
        weight=1,
    ),
    "nested region": Construct(
        "h = checkpoint($what)(h)",
        init="self.nested$n = nn.Sequential(nn.Linear(4, 4), $inside)",
        options={
            "what": (
                "self.nested$n",
                "lambda y: self.nested$n(y) + x",
                "self.nested$n.forward",
                "lambda y: self.nested$n(h)",
            ),
            "inside": ("nn.Tanh()", "nn.Dropout(0.4)", "nn.BatchNorm1d(4)"),
        },
    ),
}
