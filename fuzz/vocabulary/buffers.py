"""Constructs with tensor state: buffers, tensors in attributes, and aliases of these."""

from fuzz.construct import Construct
from fuzz.vocabulary.moments import COUNTED, COUNTER, WHEN

READS = (
    "h = h + $reader",
    "h = h * $reader.clone()",
    "h = h * $reader",
    "h = h + $reader.cos() * h.sin()",
    "h = h * (0.5 if $reader.sum() > 4.0 else 1.5)",
)

WRITES = (
    "$writer.add_(0.25)",
    "$writer.mul_(0.5)",
    "$writer.copy_(h.detach().float().mean(0).expand_as($writer))",
    "$writer[..., 0] = 3.0",
    "$writer.view(-1)[:2].add_(h.detach().float().sum())",
    "$writer.lerp_(h.detach().float().mean(0).expand_as($writer), 0.5)",
    "torch.add($writer, 1.0, out=$writer)",
    "torch._foreach_add_([$writer], 0.5)",
    "self.b$n = self.b$n * 0.5",
    "self.b$n = h.detach().float().mean(0)",
    "$writer.numpy()[..., 1] += 0.5",
    "$writer.data.add_(0.5)",
)

NAMES = (
    "self.b$n",
    "self.second$n",
    "self.views$n[0]",
    "self.table$n['b']",
    "self.b$n.detach()",
    "self.b$n.view(-1).view(self.b$n.shape)",
    "self.holder$n.tensor",
    "getattr(self, 'b' + str($n))",
    "self._buffers['b$n']",
    "dict(self.named_buffers())['b$n']",
)

BUFFER_INIT = f"""
self.register_buffer("b$n", $shape)
self.second$n = self.b$n
self.views$n = [self.b$n.view(-1).view(self.b$n.shape)]
self.table$n = {{"b": self.b$n.detach()}}
self.holder$n = Holder(self.b$n)
{COUNTER}
"""


CONSTRUCTS = {
    "buffer": Construct(
        f"""
$order
{COUNTED}
""",
        init=BUFFER_INIT,
        options={
            "order": ("$read\n$written", "$written\n$read", "$read\n$written\n$read"),
            "written": ("if $when:\n    with torch.no_grad():\n        $write", ""),
            "read": READS,
            "write": WRITES[:-2],
            "reader": NAMES,
            "writer": NAMES,
            "when": WHEN,
            "shape": (
                "torch.ones(4)",
                "torch.ones(3, 4)",
                "torch.ones(6)[1:5]",
                "torch.ones(8)[::2]",
                "torch.zeros(1, 4)",
            ),
        },
        between=("$block.b$n.add_(1.0)", "$block.b$n = torch.zeros(4)", "$block.second$n.mul_(2.0)"),
        weight=24,
    ),
    "counting buffer": Construct(
        """
$order
""",
        init='self.register_buffer("count$n", torch.tensor($start))',
        options={
            "order": ("$write\n$read", "$read\n$write"),
            "write": (
                "self.count$n += 1",
                "self.count$n.add_(1)",
                "self.count$n = self.count$n + 1",
                "self.count$n.fill_(int(self.count$n) + 1)",
            ),
            "read": (
                "h = h * (1 + self.count$n % 2)",
                "h = h.sin() if self.count$n % 2 else h.cos()",
                "h = h * (0.9 ** int(self.count$n.item()))",
            ),
            "start": ("0", "1"),
        },
        between=("$block.count$n += 1",),
        weight=5,
    ),
    "tensor in attribute": Construct(
        f"""
if $when:
    $write
$read
{COUNTED}
""",
        init=f"self.memory$n = $kind\n{COUNTER}",
        options={
            "kind": ("[torch.ones(4)]", "{0: torch.ones(4)}", "[torch.ones(4), torch.zeros(2)]"),
            "write": (
                "self.memory$n[0].add_(0.5)",
                "self.memory$n[0] = self.memory$n[0] + 0.5",
                "self.memory$n[0].copy_(h.detach().float()[0])",
                "self.memory$n[0] = h.detach().float()[1]",
            ),
            "read": ("h = h + self.memory$n[0]", "h = h * self.memory$n[0].clone()"),
            "when": WHEN,
        },
        between=("$block.memory$n[0].add_(1.0)", "$block.memory$n[0] = torch.zeros(4)"),
        weight=5,
    ),
    "peer's buffer": Construct(
        f"""
$order
{COUNTED}
""",
        init=COUNTER,
        setup="$block.peer$n = [$peer]\n$block.theirs$n = $peer.stat",
        options={
            "order": ("$read\nif $when:\n    $write", "if $when:\n    $write\n$read", "$read"),
            "read": ("h = h + $stat", "h = h * $stat.clone()"),
            "write": ("$stat.add_(0.25)", "$stat.mul_(0.5)", "$stat.copy_(h.detach().float().mean(0))"),
            "stat": ("self.peer$n[0].stat", "self.theirs$n"),
            "when": WHEN,
        },
        between=("$peer.stat.add_(0.5)",),
        weight=6,
    ),
    "own statistic": Construct(
        """
$order
""",
        options={
            "order": (
                "h = h + self.stat",
                "h = h + self.stat\nself.stat.add_(0.125)",
                "self.stat.mul_(0.75)\nh = h + self.stat",
            ),
        },
        between=("$block.stat.add_(0.5)",),
        weight=4,
    ),
    "child's buffer": Construct(
        """
$order
""",
        init='self.child$n = nn.Module()\nself.child$n.register_buffer("b", torch.ones(4))\n$hold',
        options={
            "order": ("$read\n$write", "$write\n$read"),
            "hold": (
                "self.at$n = [self.child$n]",
                "self.at$n = {0: self.child$n}",
                "self.at$n = [self.child$n]\ndel self.child$n",
            ),
            "read": ("h = h + self.at$n[0].b", "h = h * self.at$n[0].b.clone()"),
            "write": (
                "self.at$n[0].b.add_(0.25)",
                "self.at$n[0].b = self.at$n[0].b * 0.5",
                "next(self.at$n[0].buffers()).mul_(0.5)",
            ),
        },
        weight=4,
    ),
    "closed-over buffer": Construct(
        """
h = self.closure$n(h)
""",
        init="""
state$n = torch.ones(4)
def closure$n(y):
    z = y + state$n
    state$n.mul_(0.5)
    return z
self.closure$n = closure$n
""",
        weight=3,
    ),
    "codebook": Construct(
        f"""
codes$n = torch.cdist(h.detach().float(), self.codes$n).argmin(-1)
quantized$n = self.codes$n[codes$n]
if self.training and $when:
    with torch.no_grad():
        self.usage$n.scatter_add_(0, codes$n, torch.ones(3))
        self.codes$n[codes$n] = self.codes$n[codes$n] * 0.8 + h.detach().float() * 0.2
h = h + (quantized$n - h).detach() + (quantized$n * h).sin()
{COUNTED}
""",
        init=f"""
self.register_buffer("codes$n", torch.randn(5, 4))
self.register_buffer("usage$n", torch.zeros(5))
{COUNTER}
""",
        options={"when": WHEN},
        weight=3,
    ),
    "observer": Construct(
        f"""
if $when:
    self.low$n = torch.minimum(self.low$n, h.detach().float().min())
    self.high$n.copy_(torch.maximum(self.high$n, h.detach().float().max()))
scale$n = (self.high$n - self.low$n).clamp(min=0.1) / 15
h = h + ((h / scale$n).round() * scale$n - h).detach()
{COUNTED}
""",
        init=f"""
self.register_buffer("low$n", torch.zeros(()))
self.register_buffer("high$n", torch.ones(()))
{COUNTER}
""",
        options={"when": WHEN},
        weight=3,
    ),
    "growing cache": Construct(
        "self.cache$n = torch.cat([self.cache$n, h.detach().float()])[-5:]\nh = h + self.cache$n.mean(0)",
        init="self.cache$n = torch.zeros(1, 4)",
        between=("$block.cache$n = torch.zeros(1, 4)",),
        weight=3,
    ),
    "inference state": Construct(
        """
with torch.inference_mode():
    self.state$n$write
h = h + self.state$n.clone()
""",
        init="with torch.inference_mode():\n    self.state$n = torch.ones(4)",
        options={"write": (".add_(0.5)", " = self.state$n * 0.5")},
        weight=1,
    ),
}
