from services.common.service import run
from services.tokenizer.server import TokenizerService

if __name__ == "__main__":
    run(TokenizerService)
