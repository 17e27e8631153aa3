"""Adapters of low rank (LoRA, arXiv 2106.09685), of which each request names one or none.

peft.py   reads what the peft library saves, and refuses by name what is not built
table.py  which adapters an engine has, each in a place that its runner reads
"""

from services.worker.engine.adapters.adapter import (
    Adapter,
    Lora,
    UnsupportedAdapter,
    is_adapted,
)
from services.worker.engine.adapters.table import Adapters, AdaptersFull, PlaceInUse

__all__ = [
    "Adapter",
    "Adapters",
    "AdaptersFull",
    "Lora",
    "PlaceInUse",
    "UnsupportedAdapter",
    "is_adapted",
]
