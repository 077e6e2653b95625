"""Constructs with torch's own stateful layers."""

from fuzz.construct import Construct
from fuzz.vocabulary.moments import COUNTED, COUNTER, WHEN

CONSTRUCTS = {
    "batch norm": Construct(
        f"""
if $when:
    h = $call
{COUNTED}
""",
        init=f"self.norm$n = nn.BatchNorm1d(4$how)\n{COUNTER}",
        options={
            "call": (
                "self.norm$n(h)",
                "self.norm$n.forward(h)",
                "F.batch_norm(h, self.norm$n.running_mean, self.norm$n.running_var, training=self.training)",
                "[self.norm$n][0](h) + self.norm$n.running_mean",
            ),
            "how": ("", ", momentum=None", ", affine=False"),
            "when": WHEN,
        },
        between=("$block.norm$n.eval()", "$block.norm$n.reset_running_stats()", "$block.norm$n.momentum = 0.5"),
        weight=5,
    ),
    "dropout": Construct(
        "h = $call",
        init="self.drop$n = nn.Dropout(0.4)",
        options={
            "call": (
                "self.drop$n(h)",
                "F.dropout(h, 0.3, self.training)",
                "F.dropout(h, self.drop$n.p)",
                "F.rrelu(h, training=True)",
                "F.alpha_dropout(h, 0.3, training=True)",
                "F.dropout(h.clone(), 0.3, inplace=True)",
            )
        },
        between=("$block.drop$n.p = 0.9", "$block.drop$n.eval()", "$block.drop$n = nn.Identity()"),
        weight=6,
    ),
    "normed weight": Construct(
        "h = self.normed$n(h)",
        init="self.normed$n = $norm(nn.Linear(4, 4))",
        options={
            "norm": (
                "nn.utils.parametrizations.spectral_norm",
                "nn.utils.spectral_norm",
                "nn.utils.parametrizations.weight_norm",
            )
        },
        weight=3,
    ),
    "layer with a past": Construct(
        "$use",
        init='self.past$n = Past("$kind")',
        options={
            "use": ("h = self.past$n(h)\nh = h * self.past$n.read()", "h = self.past$n(h)", "h = h + self.past$n(x)"),
            "kind": ("list", "tensor", "dict"),
        },
        weight=2,
    ),
    "embedding": Construct(
        "h = h + self.embedding$n(torch.tensor([0, 2, $index]))",
        init="self.embedding$n = nn.Embedding(5, 4$norm)",
        options={"norm": ("", ", max_norm=0.5", ", max_norm=0.5, padding_idx=0"), "index": ("2", "3", "self.step % 5")},
        weight=3,
    ),
    "attention": Construct(
        "h = h + F.scaled_dot_product_attention(h[None], x[None].to(h.dtype), h[None], dropout_p=$p)[0]",
        options={"p": ("0.0", "0.3")},
    ),
    "child in container": Construct(
        "h = self.held$n[0](h)",
        init="self.held$n = $held",
        options={
            "held": (
                "nn.ModuleList([nn.Linear(4, 4)])",
                "[nn.BatchNorm1d(4)]",
                "[nn.Dropout(0.4)]",
                "{0: nn.BatchNorm1d(4)}",
                "(nn.Linear(4, 4), nn.Tanh())",
            )
        },
        between=("$block.held$n[0].eval()",),
        weight=4,
    ),
    "child's hook": Construct(
        "h = self.hooked$n(h)",
        init="""
self.hooked$n = nn.Linear(4, 4)
self.hooked$n.seen = []
self.hooked$n.$hook
""",
        options={
            "hook": (
                "register_forward_hook(lambda module, args, out: out.sin())",
                "register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))",
                "register_full_backward_hook(lambda module, grads, outs: (grads[0] * 0.5,))",
                "register_forward_hook(counted)",
            )
        },
        between=(
            "$block.hooked$n.register_forward_hook(lambda module, args, out: out * 2)",
            "$block.hooked$n._forward_hooks.clear()",
        ),
        weight=3,
    ),
    "recurrent state": Construct(
        """
state$n = self.state$n$detached
h = torch.tanh(self.cell$n(h) + state$n)
self.state$n = h$kept
""",
        init="self.cell$n = nn.Linear(4, 4)\nself.state$n = torch.zeros(3, 4)",
        options={"detached": ("", ".detach()"), "kept": (".detach()", "")},
        weight=3,
    ),
}
