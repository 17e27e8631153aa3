"""llama.cpp's server, which has no other door: run_llama_cpp SERVER GGUF THREADS."""

import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import aiohttp

from bench.peers.drivers.line import Answer, Request, Run, Stamps, serve

SERVER, MODEL, THREADS = sys.argv[1:4]
START_S = 600.0
HOST = "127.0.0.1"


def load() -> Run:
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    command = [SERVER, "-m", MODEL, "--host", HOST, "--port", str(port), "--no-webui"]
    command += ["-t", THREADS, "-tb", THREADS, "-np", "32", "-c", str(32 * 1024), "-no-kvu"]
    command += ["-fa", "on", "--cache-ram", "0"]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    url = f"http://{HOST}:{port}"
    deadline = time.monotonic() + START_S
    while not healthy(url):
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("llama-server did not start, see above")
        time.sleep(0.02)
    return lambda requests: asyncio.run(run(url, requests))


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


async def run(url: str, requests: list[Request]) -> Answer:
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as client:
        stamps = Stamps(requests)
        await asyncio.gather(*(one(client, request, stamps) for request in requests))
        return stamps.answer()


async def one(client: aiohttp.ClientSession, request: Request, stamps: Stamps) -> None:
    """The server holds back a token that ends within a character: it counts when it is sent."""
    body = {
        "prompt": request["prompt_token_ids"],
        "n_predict": request["max_tokens"],
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_tokens": True,
        "cache_prompt": True,
    }
    came = 0
    async with client.post("/completion", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            new = event["tokens_predicted"] - came if event["stop"] else len(event["tokens"])
            came += new
            stamps.add(request["id"], new)


if __name__ == "__main__":
    serve(load)
