"""guidellm: what the page's run told, and the same by completions."""

import json
import os
import subprocess
from pathlib import Path

TOLD = Path("build") / "guidellm.json"
SERVER = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
BACKEND = f"kind=openai_http,target={SERVER},api_key={os.environ['OPENAI_API_KEY']},model=demo"
RUN = (
    *("guidellm", "run", "--disable-console-interactive"),
    *("--backend", f"{BACKEND},request_format=/v1/completions"),
    *("--tokenizer", "kind=hf_auto,model=models/demo"),
    *("--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=16"),
    *("--profile", "kind=concurrent,streams=2"),
    *("--constraint", "kind=max_requests,count=10"),
    *("--output", f"kind=json,path={TOLD}"),
)


def check() -> None:
    """All ten answered whole: as many tokens as were asked for, each told when it came."""
    (one,) = json.loads(TOLD.read_text())["benchmarks"]
    requests = one["requests"]
    found = {kind: len(requests[kind]) for kind in ("successful", "incomplete", "errored")}
    assert found == {"successful": 10, "incomplete": 0, "errored": 0}, found
    for request in requests["successful"]:
        assert request["output_tokens"] == 16, request
        assert request["time_to_first_token_ms"] > 0, request


check()
TOLD.unlink()
subprocess.run(RUN, check=True)
check()
