"""Links: one long-lived stream between two replicas that carries many requests.

The caller's end is a `LinkClient`, the serving end a `LinkServer`; the frames are `LinkUp` and
`LinkDown` of protos/common.proto. What a loop turn produces for a peer leaves as one frame (but
its first request, which on a socket goes at once): a worker's step for 64 sequences is one gRPC
message, not 64, and so it stays on every later hop. The way out is plain calls, with no task and no
queue per token: the reader of one link calls `on_item`, which transforms and calls `LinkCall.send`
of the next.

    link = LinkClient(address, "/penstock.v1.Router/Link", transport=transport, peer_id="…")
    await link.start()
    request = link.open(payload, deadline=time.monotonic() + 60, on_item=forward)
    try:
        end = await request.ended()      # always comes: from the peer, or a Status saying why not
    finally:
        request.cancel()                 # free when ended; stop() and settle() wait for the record

    async def handler(call: LinkCall) -> None:
        call.send(...)                   # any number of times, from any callback of this loop
        call.end(status, record)         # or return: success; or raise PenstockError

    links = LinkServer("/penstock.v1.Router/Link", handler, vitals=engine.vitals)
    links.add_to(server)

What holds:
- A request ends exactly once. Its deadline (kept at both ends), the loss of the peer, draining, and
  a peer that is silent (no frame within `heartbeat_timeout_s`) or stalled (`Vitals.steps` unmoved
  while `pending` is not 0) all end it with a Status that names the stage, and one of these reasons:
  "deadline", "cancelled", "peer_lost", "peer_stalled", "draining", "too_many_requests",
  "link_congested", "internal".
- Items of a request arrive in order and before its end. News arrive in order; the snapshot is first
  after every (re)connect, and its link is not READY before `on_news` saw it.
- A request or callback that raises ends alone. Frames that break the protocol end the link.
- Memory is bounded: gRPC's flow control holds the writer, and more than `max_pending_bytes` waiting
  for a peer refuses the new request (client) or drops the link of the stuck reader (server).
- Everything runs on the event loop of `start()`/`add_to()`; nothing here is thread-safe.
"""

from services.common.link.call import LinkCall
from services.common.link.client import LinkClient, LinkOptions, LinkRequest, LinkState
from services.common.link.frames import MAX_FRAME_BYTES, End, Record, Status, Vitals
from services.common.link.server import LinkServer

__all__ = [
    "MAX_FRAME_BYTES",
    "End",
    "LinkCall",
    "LinkClient",
    "LinkOptions",
    "LinkRequest",
    "LinkServer",
    "LinkState",
    "Record",
    "Status",
    "Vitals",
]
