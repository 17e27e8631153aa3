"""How ranks meet: torch.distributed's group of them, over gloo on CPUs and NCCL on GPUs.

Neither asks who connects. So each rank listens at one address alone, and between hosts the network
has to keep strangers out."""

import fcntl
import os
import socket
import struct
from datetime import timedelta
from ipaddress import ip_address, ip_network
from typing import Any

from services.worker.engine.parallel.begin import Begin, Meeting

COLLECTIVE_S = 60.0
"""A rank waits for the others so long: they compute the same from the same moment on, but for the
first steps on GPUs, which each takes when it has loaded."""
_ADDRESS, _NETMASK = 0x8915, 0x891B  # SIOCGIFADDR, SIOCGIFNETMASK


def met(begin: Begin) -> Any:
    """A process group, once all ranks have come."""
    import torch
    import torch.distributed as dist

    within = timedelta(seconds=COLLECTIVE_S)
    store = _store(begin.meeting, begin.rank, begin.ranks, within)
    if begin.config.device == "cpu":
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = within
        options._devices = [gloo.create_device(hostname=begin.meeting.host)]
        return gloo(store, begin.rank, begin.ranks, options)
    os.environ["NCCL_SOCKET_IFNAME"] = interface_of(begin.meeting.host)
    torch.cuda.set_device(begin.config.device)
    dist.init_process_group(
        "nccl", store=store, rank=begin.rank, world_size=begin.ranks, timeout=within
    )
    return dist.group.WORLD


def _store(meeting: Meeting, rank: int, ranks: int, within: timedelta) -> Any:
    import torch.distributed

    dist: Any = torch.distributed  # whose types leave these out
    if meeting.store is None:
        return dist.FileStore(meeting.file, ranks)
    host, port = meeting.store
    return dist.TCPStore(
        host,
        port,
        world_size=ranks,
        is_master=rank == 0,
        timeout=within,
        wait_for_workers=False,
        # One of its own would be at all of the host's addresses.
        master_listen_fd=meeting.listener if rank == 0 else None,
    )


def interface_of(host: str) -> str:
    """The network interface that has the address `host`, IPv4, or is of its network. Raises
    ValueError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                own, mask = (_told(asked, name, what) for what in (_ADDRESS, _NETMASK))
            except OSError:  # it has none
                continue
            if ip_address(host) in ip_network(f"{own}/{mask}", strict=False):
                return name
    raise ValueError(f"no network interface of this host has the address {host}")


def _told(asked: socket.socket, name: str, what: int) -> str:
    answer = fcntl.ioctl(asked.fileno(), what, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])
