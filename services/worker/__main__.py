"""`python -m services.worker`: one worker without Ray."""

from services.common.service import run
from services.worker.server import WorkerService

if __name__ == "__main__":
    run(WorkerService)
