"""Constructs that draw random numbers, from global streams and from explicit generators."""

from fuzz.construct import Construct
from fuzz.vocabulary.moments import COUNTED, COUNTER, WHEN

DRAWS = (
    "h = h * torch.rand_like(h)",
    "h = h + torch.randn(4)",
    "h = F.dropout(h, 0.4)",
    "h = h * torch.bernoulli(torch.full((4,), 0.5))",
    "h = h[torch.randperm(3)]",
    "h = h * torch.rand(()).item()",
)

HOST = (
    "random.random()",
    "random.gauss(0, 1)",
    "random.choice([0.5, 1.5])",
    "numpy.random.rand()",
    "numpy.random.normal()",
    "float(numpy.random.permutation(4)[0])",
)

EXPLICIT = (
    "torch.rand(4, generator=$torch)",
    "torch.randn(3, 4, generator=$torch)",
    "$python.random()",
    "$python.gauss(0, 1)",
    "float($numpy.random())",
)

GENERATORS = "[torch.Generator(DEVICE).manual_seed(3), random.Random(3), numpy.random.default_rng(3)]"

CONSTRUCTS = {
    "draw": Construct(
        f"if $when:\n    $draw\n{COUNTED}", init=COUNTER, options={"draw": DRAWS, "when": WHEN}, weight=6
    ),
    "host draw": Construct(
        f"if $when:\n    h = h * $host\n{COUNTED}", init=COUNTER, options={"host": HOST, "when": WHEN}, weight=5
    ),
    "forked draw": Construct(
        "with torch.random.fork_rng(devices=[]):\n    $seed\n    $draw\n$after",
        options={
            "draw": DRAWS,
            "seed": ("", "torch.manual_seed(5)", "torch.manual_seed(self.step)"),
            "after": ("", "$draw"),
        },
        weight=3,
    ),
    "state put back": Construct(
        "$get\n$draw\n$set",
        options={
            "draw": (*DRAWS, "h = h * random.random()", "h = h * numpy.random.rand()"),
            "get": ("states$n = STREAM.get_rng_state(), random.getstate(), numpy.random.get_state()",),
            "set": (
                "STREAM.set_rng_state(states$n[0])\nrandom.setstate(states$n[1])\nnumpy.random.set_state(states$n[2])",
            ),
        },
        weight=3,
    ),
    "seeded inside": Construct(
        "$seed\n$draw",
        options={
            "seed": ("torch.manual_seed(5)", "random.seed(5)", "numpy.random.seed(5)", "torch.manual_seed(self.step)"),
            "draw": (*DRAWS, "h = h * random.random()", "h = h * numpy.random.rand()"),
        },
        weight=2,
    ),
    "generator in attribute": Construct(
        "h = h * $explicit",
        init=f"self.g$n, self.r$n, self.a$n = {GENERATORS}\nself.all$n = [self.g$n, self.r$n, self.a$n]",
        options={
            "explicit": EXPLICIT,
            "torch": ("self.g$n", "self.all$n[0]"),
            "python": ("self.r$n", "self.all$n[1]"),
            "numpy": ("self.a$n", "self.all$n[2]"),
        },
        between=("torch.rand(2, generator=$block.g$n)", "$block.r$n.random()", "$block.g$n.manual_seed(9)"),
        weight=4,
    ),
    "generator in closure": Construct(
        "h = h * self.draw$n()",
        init=f"""
g$n, r$n, a$n = {GENERATORS}
self.draw$n = lambda: $explicit
self.all$n = {{"all": (g$n, r$n, a$n)}}
""",
        options={"explicit": EXPLICIT, "torch": ("g$n",), "python": ("r$n",), "numpy": ("a$n",)},
        between=("$block.draw$n()",),
        weight=2,
    ),
    "bound method of a generator": Construct(
        "h = h $how self.draw$n()",
        init="self.draw$n = $bound",
        options={
            "how": ("*", "+"),
            "bound": (
                "random.Random(3).random",
                "functools.partial(random.Random(3).uniform, 0.5, 1.5)",
                "numpy.random.default_rng(3).random",
            ),
        },
        between=("$block.draw$n()",),
        weight=2,
    ),
    "generator as argument": Construct(
        "h = h * $explicit",
        model_init=f"self.g$n, self.r$n, self.a$n = {GENERATORS}",
        arguments={"g$n": "self.g$n", "r$n": "self.r$n", "a$n": "[self.a$n]"},
        options={"explicit": EXPLICIT, "torch": ("g$n",), "python": ("r$n",), "numpy": ("a$n[0]",)},
        weight=3,
    ),
    "global generator": Construct(
        "h = h * $explicit",
        options={"explicit": EXPLICIT, "torch": ("G",), "python": ("R",), "numpy": ("A",)},
        between=("torch.rand(2, generator=G)", "R.random()"),
        weight=2,
    ),
}
