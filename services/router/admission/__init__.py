"""Admission: a request waits in one order over all routers until a slot of its model is free.

admission.py is a router's end of it; shared_order.py calls the order in Redis (order.lua),
local_order.py the same order in this process (fair_order.py) while Redis is away.
docs/decisions/0002-admission.md says why.
"""

from services.router.admission.admission import Admission
from services.router.admission.ticket import LANE_NAMES, Ticket, not_served

__all__ = ["LANE_NAMES", "Admission", "Ticket", "not_served"]
