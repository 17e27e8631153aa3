"""Clients as users have them, unchanged, against one running Penstock with the demonstration model.

`python -m tests.clients.run [NAME…]`: each in an environment of its own (NAME.txt, below build/),
with the snippets of docs/clients.md as they stand there, and then with more (check_NAME.py).
Without names all but the LARGE.
"""

import asyncio
import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

from services.common.config import ModelSpec
from tests.support.cluster import ROOT, Cluster

HERE = Path(__file__).parent
CLIENTS = {
    "openai": "openai",
    "langchain": "langchain-openai",
    "litellm": "litellm",
    "agents": "openai-agents",
    "anthropic": "anthropic",
    "guidellm": "guidellm",
}
"""By name, what its section in the page is called."""
LARGE = {"guidellm"}  # gigabytes, of PyTorch
LIMIT_S = 300.0


def python_of(name: str) -> str:
    """The interpreter of the client's environment, made if it is not as its file says."""
    folder, wanted = ROOT / "build" / "clients" / name, HERE / f"{name}.txt"
    python, made = folder / "bin" / "python", folder / "made"
    if not (made.exists() and made.read_text() == wanted.read_text()):
        venv.create(folder, clear=True, with_pip=True)
        install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        subprocess.run([str(python), *install, "--requirement", str(wanted)], check=True)
        made.write_text(wanted.read_text())
    return str(python)


def snippets(name: str) -> list[tuple[str, str]]:
    """Each with its language."""
    page = (ROOT / "docs" / "clients.md").read_text()
    (section,) = re.findall(rf"^## {CLIENTS[name]}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    found = re.findall(r"^```(python|sh)\n(.*?)^```", section, re.M | re.S)
    assert found, f"the page shows nothing of {name}"
    return found


async def run(python: str, arguments: list[str], cluster: Cluster) -> bool:
    """Whether a program went well that finds the client's environment before all others."""
    own = {
        "OPENAI_BASE_URL": f"{cluster.url}/v1",
        "OPENAI_API_KEY": cluster.key,
        "ANTHROPIC_BASE_URL": cluster.url,
        "ANTHROPIC_API_KEY": cluster.key,
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or it asks for a newer one
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
    }
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("PENSTOCK_", "PYTHON"))}
    process = await asyncio.create_subprocess_exec(*arguments, env=kept | own, cwd=ROOT)
    try:
        code = await asyncio.wait_for(process.wait(), LIMIT_S)
    finally:
        if process.returncode is None:
            process.kill()
    return code == 0


async def main(names: list[str]) -> None:
    pythons = {name: python_of(name) for name in names}
    models = [ModelSpec(name="demo", path=str(ROOT / "models" / "demo"))]
    with TemporaryDirectory() as folder:
        rules = {"PENSTOCK_POLICY__FILE": str(HERE / "policy.yaml")}
        async with Cluster(Path(folder), models, rules) as cluster:
            await cluster.start(workers=["both"], retrieval=True)
            wrong = [n for n, p in pythons.items() if not await works(n, p, cluster)]
    if wrong:
        raise SystemExit(f"not as it should be: {', '.join(wrong)}")


async def works(name: str, python: str, cluster: Cluster) -> bool:
    for language, snippet in snippets(name):
        here = snippet.replace("http://127.0.0.1:8000", cluster.url)
        program = [python, "-c"] if language == "python" else ["sh", "-ec"]
        if not await run(python, [*program, here.replace("psk-…", cluster.key)], cluster):
            return False
    more = HERE / f"check_{name}.py"
    went_well = await run(python, [python, str(more)], cluster)
    if went_well:
        print(f"{name}: works as it is", flush=True)
    return went_well


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or [name for name in CLIENTS if name not in LARGE]))
