"""Plan a Llama of 1.1 billion parameters for an H100 on any machine, without its memory. Draws the picture of the README.

pip install '.[report,hf]'
python examples/llama.py --budget 40GiB --out docs/plan.png
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import reactivate

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--budget", default="40GiB", help="the memory of a step, all included")
parser.add_argument("--device", default="H100-SXM", help="a name that `reactivate devices` lists")
parser.add_argument("--batch", type=int, default=16, help="rows of 2,048 tokens")
parser.add_argument("--out", default="plan.png", help="a .png, .svg, .html, .txt or .json file")
options = parser.parse_args()

config = LlamaConfig(
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
    vocab_size=32000,
    use_cache=False,  # keys and values of generation, which training does not need
)
with torch.device("meta"):  # shapes without memory
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    tokens = torch.zeros(options.batch, 2048, dtype=torch.long)
plan = reactivate.plan(
    model.train(),
    kwargs={"input_ids": tokens, "labels": tokens},
    budget=options.budget,
    device=options.device,
    optimizer=torch.optim.AdamW(model.parameters()),
)
print(plan)
plan.save(options.out)
