"""Settings of all services, from the environment (`PENSTOCK_<NAME>`, `PENSTOCK_<SECTION>__<NAME>`).

One place, a file for each section, so that an operator reads every knob with its unit and default
here. Unknown values of a known name are refused at start. Lists and models are JSON.
"""

from services.common.config.base import AUTO, RayOptions, Section, ServiceSettings, is_loopback
from services.common.config.gateway import GatewaySettings
from services.common.config.identity import IdentitySettings
from services.common.config.jobs import JobsSettings
from services.common.config.metering import MeteringSettings, ModelPrice, Price
from services.common.config.models import ModelSpec, Pool
from services.common.config.policy import PolicySettings
from services.common.config.retrieval import RetrievalSettings
from services.common.config.router import RouterSettings
from services.common.config.runs import RunsSettings
from services.common.config.settings import Settings, unknown_names
from services.common.config.tokenizer import TokenizerSettings
from services.common.config.worker import Role, WorkerSettings

__all__ = [
    "AUTO",
    "GatewaySettings",
    "IdentitySettings",
    "JobsSettings",
    "MeteringSettings",
    "ModelPrice",
    "ModelSpec",
    "PolicySettings",
    "Pool",
    "Price",
    "RayOptions",
    "RetrievalSettings",
    "Role",
    "RouterSettings",
    "RunsSettings",
    "Section",
    "ServiceSettings",
    "Settings",
    "TokenizerSettings",
    "WorkerSettings",
    "is_loopback",
    "unknown_names",
]
