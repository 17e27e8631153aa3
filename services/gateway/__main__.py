"""`python -m services.gateway`: the front door alone, without Ray."""

from services.common.service import run
from services.gateway.server import GatewayService

if __name__ == "__main__":
    run(GatewayService)
