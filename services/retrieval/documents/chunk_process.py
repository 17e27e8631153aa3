"""`python -m services.retrieval.documents.chunk_process '<options>'`: reads and cuts documents.

A frame is a length of four bytes and that many bytes of a message of retrieval.proto: on stdin a
DocumentRequest, behind one to load the file's own bytes; on stdout a LoadReply or a CutReply. An
empty frame on stdout says that the process is ready. It ends with stdin. Whatever a document does
to it, it does to this process alone, which has limits of CPU time and memory, and can write no
file.
"""

import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from protos import retrieval_pb2 as pb
from protos.common_pb2 import Range
from services.retrieval.documents.chunking import chunk
from services.retrieval.documents.chunks import (
    Limits,
    ProcessOptions,
    RefusedError,
    passage,
    too_large,
)
from services.retrieval.documents.loading import load
from services.retrieval.text_reader import TextReader

_NICE = 5  # searches go first


def main() -> None:
    folder, max_chunks, cpu_s, memory_bytes, limits = json.loads(sys.argv[1])
    own = ProcessOptions(folder, max_chunks, cpu_s, memory_bytes, Limits(*limits))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which closes stdin
    os.nice(_NICE)
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_AS, own.memory_bytes),
    ):
        resource.setrlimit(kind, (most, most))
    reader = TextReader(Path(own.folder))
    _send(b"")
    _be_silent()
    while head := sys.stdin.buffer.read(4):
        request = pb.DocumentRequest.FromString(sys.stdin.buffer.read(int.from_bytes(head)))
        _allow_cpu(own.cpu_s)
        if request.WhichOneof("what") == "load":
            content = sys.stdin.buffer.read(request.load.bytes)
            _send(_answer(pb.LoadReply, partial(_load, request.load.filename, content, own), own))
            del content
        else:
            _send(_answer(pb.CutReply, partial(_cut, request.cut, reader, own), own))


def _load(filename: str, content: bytes, options: ProcessOptions) -> pb.LoadReply:
    sections, note = load(filename, content, options.limits)
    if (
        len(sections) > options.max_chunks
    ):  # each is a chunk at least; and its headings' bytes add up
        raise too_large(f"has more than {options.max_chunks} sections, the limit")
    return pb.LoadReply(sections=sections, note=note)


def _cut(request: pb.CutRequest, reader: TextReader, options: ProcessOptions) -> pb.CutReply:
    reply = pb.CutReply()
    limits = request.max_tokens, request.overlap_tokens
    texts = [section.text for section in request.sections]  # a message decodes it each time
    for one in chunk(request.sections, reader.plain, request.title, *limits):
        if len(reply.chunks) == options.max_chunks:
            raise too_large(f"makes more than {options.max_chunks} chunks, the limit")
        text = passage(texts[one.section], one.start, one.end, one.lead)
        read = reader.passage(one.title, text)
        reply.chunks.add(
            title=one.title,
            section=one.section,
            start=one.start,
            end=one.end,
            tokens=one.tokens,
            ids=read.ids,
            ids_cut=read.cut,
            pages=one.pages and Range(first=one.pages.first, last=one.pages.last),
            rows=one.rows and Range(first=one.rows.first, last=one.rows.last),
            lead=one.lead and pb.CutChunk.Slice(start=one.lead.start, end=one.lead.end),
        )
    return reply


def _answer(
    kind: type[pb.LoadReply] | type[pb.CutReply],
    work: Callable[[], pb.LoadReply | pb.CutReply],
    options: ProcessOptions,
) -> bytes:
    """Whatever it is that the document does to a library."""
    try:
        return work().SerializeToString()
    except RefusedError as refused:
        told = pb.Refusal(words=refused.words, reason=refused.reason)
    except MemoryError:
        words = f"takes more than {options.memory_bytes >> 20} MiB of memory"
        told = pb.Refusal(words=words, reason="document_too_large")
    except RecursionError:
        told = pb.Refusal(words="is nested too deeply", reason="document_too_large")
    except Exception as error:
        words = "cannot be read: it is broken, or not what its content says it is"
        told = pb.Refusal(words=words, reason="invalid_file", fault=_place(error))
    return kind(refused=told).SerializeToString()


def _place(error: Exception) -> str:
    """What was raised and where. Its message may have the document's text in it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}"


def _allow_cpu(seconds: int) -> None:
    """From now on. The process ends by SIGXCPU when they are spent."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    end = int(spent.ru_utime + spent.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))


def _be_silent() -> None:
    """What a library prints may be the document's text."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _send(message: bytes) -> None:
    sys.stdout.buffer.write(len(message).to_bytes(4) + message)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
