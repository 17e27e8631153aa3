"""`python -m services.retrieval.documents.chunk_process '<options>'`: cuts documents, one by one.

A frame is a length of four bytes and that many bytes of a message of retrieval.proto: a CutRequest
on stdin, a CutReply on stdout; an empty frame on stdout says that the process is ready. It ends
with stdin. Whatever a document does to it, it does to this process alone, which has limits of CPU
time and memory.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from protos import retrieval_pb2 as pb
from services.retrieval.documents.chunking import chunk
from services.retrieval.documents.chunks import CutOptions
from services.retrieval.text_reader import TextReader

_NICE = 5  # searches go first


def main() -> None:
    options = CutOptions(*json.loads(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which closes stdin
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (options.memory_bytes, options.memory_bytes))
    reader = TextReader(Path(options.folder))
    _send(b"")
    while head := sys.stdin.buffer.read(4):
        request = pb.CutRequest.FromString(sys.stdin.buffer.read(int.from_bytes(head)))
        _allow_cpu(options.cpu_s)
        _send(_within_memory(lambda: _cut(request, reader, options), options))  # noqa: B023


def _cut(request: pb.CutRequest, reader: TextReader, options: CutOptions) -> bytes:
    reply = pb.CutReply()
    limits = options.chunk_tokens, options.overlap_tokens
    for one in chunk(request.text, reader.plain, request.title, *limits):
        if len(reply.chunks) == options.max_chunks:
            return _refusal(f"makes more than {options.max_chunks} chunks, the limit")
        read = reader.passage(one.title, one.text)
        reply.chunks.add(
            title=one.title,
            start=one.start,
            end=one.end,
            tokens=one.tokens,
            ids=read.ids,
            ids_cut=read.cut,
        )
    return reply.SerializeToString()


def _within_memory(work: Callable[[], bytes], options: CutOptions) -> bytes:
    try:
        return work()
    except MemoryError:
        return _refusal(f"takes more than {options.memory_bytes >> 20} MiB of memory to cut")


def _refusal(words: str) -> bytes:
    return pb.CutReply(refused=words).SerializeToString()


def _allow_cpu(seconds: int) -> None:
    """From now on. The process ends by SIGXCPU when they are spent."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    end = int(spent.ru_utime + spent.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))


def _send(message: bytes) -> None:
    sys.stdout.buffer.write(len(message).to_bytes(4) + message)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
