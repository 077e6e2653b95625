"""Guards: state that a recomputation must see as the forward pass saw it, and must not advance twice.

`DEFAULT` is what `checkpoint` uses. `DEFAULT.without("rng")` leaves out the guards of that name, `DEFAULT.adding(guard)`
adds one of your own.
"""

from reactivate._types import Call, Guard
from reactivate.guards._base import Guards, Rewound
from reactivate.guards.ambient import Ambient
from reactivate.guards.contexts import ContextPair
from reactivate.guards.modules import Modules, Stateful
from reactivate.guards.named_streams import RngTracker, tensor_parallel_seeds
from reactivate.guards.rng import Rng, all_sources
from reactivate.guards.trackers import Tracker, TrackerGuard

__all__ = [
    "DEFAULT",
    "Ambient",
    "Call",
    "ContextPair",
    "Guard",
    "Guards",
    "Modules",
    "Rewound",
    "Rng",
    "RngTracker",
    "Stateful",
    "Tracker",
    "TrackerGuard",
    "all_sources",
    "tensor_parallel_seeds",
]

DEFAULT = Guards((Rng(), Ambient(), Modules()))
