"""The head of a model together with its loss, over slices of the rows of the logits."""
