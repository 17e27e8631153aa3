"""`python -m services.router`: one router replica without Ray."""

from services.common.service import run
from services.router.server import RouterService

if __name__ == "__main__":
    run(RouterService)
