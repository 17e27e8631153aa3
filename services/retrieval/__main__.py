from services.common.service import run
from services.retrieval.server import RetrievalService

if __name__ == "__main__":
    run(RetrievalService)
