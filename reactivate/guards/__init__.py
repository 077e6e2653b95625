"""Guards: state that a recomputation must see as the forward pass saw it, and must not advance twice.

`DEFAULT` is what `checkpoint` uses. `DEFAULT.without("rng")` leaves out the guards of that name, `DEFAULT.adding(guard)`
adds one of your own.
"""

from reactivate._types import Guard
from reactivate.guards._base import Guards
from reactivate.guards.ambient import Ambient
from reactivate.guards.contexts import ContextPair
from reactivate.guards.modules import Modules
from reactivate.guards.named_streams import RngTracker, tensor_parallel_seeds
from reactivate.guards.rng import Rng
from reactivate.guards.trackers import TrackerGuard

__all__ = ["DEFAULT", "ContextPair", "Guard", "Guards", "RngTracker", "TrackerGuard", "tensor_parallel_seeds"]
__dir__ = __all__.copy

DEFAULT = Guards((Rng(), Ambient(), Modules()))
