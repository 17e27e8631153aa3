"""Admission: a request waits in one order over all routers until a slot of its model is free.

admission.py is a router's end of it, order.lua the order in Redis, fair_order.py the same order in
this process while Redis is away. docs/decisions/0002-admission.md says why.
"""

from services.router.admission.admission import Admission
from services.router.admission.ticket import LANE_NAMES, Ticket

__all__ = ["LANE_NAMES", "Admission", "Ticket"]
