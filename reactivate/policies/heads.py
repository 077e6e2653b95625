"""The policy for heads: modules whose logits a loss reads row by row."""

from __future__ import annotations

from reactivate._text.keywords import refuse_unknown
from reactivate._types import LossByRows
from reactivate.policies._base import ReadyMade
from reactivate.policies._select import SelectedModules, Selector, check


@refuse_unknown
def loss_by_rows(*modules: Selector) -> ReadyMade:
    """Compute the cross-entropy of what these modules return by rows, bit for bit as torch does.

    The step keeps no log-softmax and no cast of the logits: both are computed for some rows at a time, in the forward and in
    the backward. That holds for `F.cross_entropy` of logits [rows, classes], and of casts and views of them, wherever it
    is called: in the model, in a library, in the training loop. A loss with class weights or label smoothing stays as it
    is, and so does any other function of the logits.

    Args:
        modules: as for `recompute_modules`; not inside of regions.

    Raises:
        UsageError: a selector is none of these, or there is none.

    Examples:
        >>> import torch, reactivate
        >>> model = torch.nn.Sequential(torch.nn.Embedding(100, 8), torch.nn.Linear(8, 100))
        >>> tokens = torch.randint(100, (64,))
        >>> with reactivate.apply(model, reactivate.policies.loss_by_rows("1")):
        ...     torch.nn.functional.cross_entropy(model(tokens), tokens).backward()
    """
    check(modules, "loss_by_rows")
    return SelectedModules("loss_by_rows", modules, LossByRows())
