"""The gateway's parts, as whoever serves a request gets them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.common.config import Settings
from services.common.fairness.fair_threads import FairThreads
from services.common.peers import Peers
from services.common.policy import PolicyFile
from services.common.telemetry.metrics import BoundedNames
from services.common.telemetry.telemetry import Telemetry
from services.gateway.identity.auth import Authenticator
from services.gateway.identity.identity import Identity
from services.gateway.intake import Intake
from services.gateway.jobs.jobs import Jobs
from services.gateway.metering.meter import Meter
from services.gateway.models import ModelCatalog
from services.gateway.runs.conversations.conversations import Conversations
from services.gateway.runs.known_scores import KnownScores
from services.gateway.runs.records import Records
from services.gateway.stores.files.files import Files
from services.gateway.stores.files.uploads import Uploads
from services.gateway.stores.retrieval.client import RetrievalClient
from services.gateway.stores.vector_stores.vector_stores import VectorStores

if TYPE_CHECKING:  # which run what is of these parts
    from services.gateway.batches.batches import Batches
    from services.gateway.runs.lasting.runs import Runs


@dataclass
class Gateway:
    settings: Settings
    telemetry: Telemetry
    auth: Authenticator
    identity: Identity
    meter: Meter
    tokenizers: Peers
    models: ModelCatalog
    retrieval: RetrievalClient
    policy: PolicyFile
    files: Files
    uploads: Uploads
    stores: VectorStores
    records: Records
    scores: KnownScores
    runs: "Runs"
    conversations: Conversations
    jobs: Jobs
    batches: "Batches"
    intake: Intake
    threads: FairThreads  # for what may take seconds
    tenants_told: BoundedNames  # in metrics
