"""The position of a step in the model: in which call of a unit it is, or between which."""

from __future__ import annotations

from bisect import bisect_right

from reactivate._torch.autograd import current_node_number, next_node_number


class Places:
    """The position of the step in the model."""

    def __init__(self) -> None:
        self.turn = 0
        self._is_backward = False
        self._starts: list[int] = []  # of each call of a unit in this turn: the number of the first node made in it
        self._stops: list[int] = []
        self._depth = 0
        self._last = 0

    def unit_begins(self) -> bool:
        """Return whether it is in no other unit: in a call of itself, say."""
        self._depth += 1
        if self._depth > 1:
            return False
        if self._is_backward:  # the next pass
            self._is_backward = False
            self.turn += 1
            self._starts, self._stops = [], []
        self._starts.append(next_node_number())
        return True

    def unit_ends(self) -> bool:
        """Return whether it was in no other unit."""
        self._depth -= 1
        if self._depth == 0:
            self._stops.append(next_node_number())
        return self._depth == 0

    def now(self) -> tuple[int, int, bool]:
        """The turn, the position, and whether it is the backward."""
        number = current_node_number()
        if number is None:
            begun, ended = len(self._starts), len(self._stops)
            position = 2 * begun - 1 if begun > ended else 2 * ended
            return self.turn, position, False
        self._is_backward = True
        if number >= 0:  # an accumulation of a gradient goes with the node before
            ended = bisect_right(self._stops, number)
            is_inside = ended < len(self._starts) and self._starts[ended] <= number
            self._last = 2 * ended + 1 if is_inside else 2 * ended
        return self.turn, self._last, True
