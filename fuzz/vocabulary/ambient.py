"""Constructs that set or read what surrounds a call: autocast, grad mode, context variables, flags."""

from fuzz.construct import Construct

CONSTRUCTS = {
    "autocast": Construct(
        "with torch.autocast(DEVICE.type, torch.bfloat16$how):\n    h = self.lin(h)$after",
        options={
            "how": ("", ", enabled=False", ", cache_enabled=False"),
            "after": (".float()", " + self.lin(h)\nh = h.float()"),
        },
        weight=3,
    ),
    "no grad": Construct(
        "with torch.no_grad():\n    part$n = $what\nh = h + part$n",
        options={"what": ("self.lin(h)", "F.dropout(h, 0.4)", "h.sin()")},
        weight=3,
    ),
    "grad again": Construct("with torch.no_grad(), torch.enable_grad():\n    h = self.lin(h.clone())", weight=1),
    "grad mode": Construct("h = h.sin() if torch.is_grad_enabled() else h.cos()", weight=1),
    "context variable": Construct(
        "h = h * SCALE.get()", between=("SCALE.set(2.0)",), before="$set", options={"set": ("", "SCALE.set(0.5)")}
    ),
    "context variable set": Construct("h = h * SCALE.get()\nSCALE.set(SCALE.get() * 0.5)", weight=1),
    "default dtype": Construct(
        "h = h + torch.ones(4).to(h.dtype) * torch.finfo(torch.get_default_dtype()).bits", weight=1
    ),
    "training flag": Construct("h = h.sin() if self.training else h.cos()", between=("$block.eval()",), weight=3),
    "training flag set": Construct(
        "self.train(not self.training)\nh = h.sin() if self.training else h.cos()", weight=1
    ),
}
