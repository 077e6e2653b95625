"""Parts of the examples that the benchmark uses: the model, and how the memory of a step is watched."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from _runs import watched
from byte_gpt import GPT, Settings as ModelSettings

__all__ = ["GPT", "ModelSettings", "watched"]
