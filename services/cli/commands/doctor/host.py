"""The machine that this runs on: versions, processor, GPU, limits, ports."""

import errno
import os
import platform
import resource
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as of_package
from importlib.util import find_spec
from pathlib import Path

import psutil

from kernels.cpu.library import built, supported
from services.cli.commands.doctor.findings import Finding, aside, failed, ok, warning
from services.cli.commands.doctor.installation import Installation
from services.cli.ground.ports import bind_error, wanted_ports, why_not
from services.common.config import Settings
from services.common.discovery import machine_id
from services.common.open_files import OTHER_FILES
from services.common.versions import version

_TOLD = ("ray", "torch", "grpcio", "redis", "qdrant-client")
_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
_BUILD = "install a C++ compiler or `pip install ziglang`, and run kernels/cpu/build.py"
_SHM = Path("/dev/shm")
_SHM_BYTES = 2**30


async def check(it: Installation) -> list[Finding]:
    return await aside(_check, it)


def _check(it: Installation) -> list[Finding]:
    found = [_versions(), _processor(), *_kernels(it.settings), _memory(it.settings)]
    found += _gpu(it.settings)
    return [*found, _files(it.settings), *_shared_memory(it.settings), *_ports(it)]


def _versions() -> Finding:
    told = [f"Penstock {version()}", f"Python {platform.python_version()}"]
    missing = []
    for package in _TOLD:
        try:
            told.append(f"{package} {of_package(package)}")
        except PackageNotFoundError:
            missing.append(package)
    if missing:
        advice = "install Penstock with pip, which brings them"
        return failed("installed", f"{', '.join(missing)} missing", advice)
    return ok("installed", ", ".join(told))


def _processor() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name, flags = platform.processor() or platform.machine(), set[str]()
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = (part.strip() for part in line.partition(":"))
            if key == "model name":
                name = value
            elif key in ("flags", "Features"):
                flags = set(value.split())
                break
    known = [flag for flag in _FLAGS if flag in flags]
    told = f"{name}, {cores} cores, {' '.join(known) or 'no vector instructions known'}"
    if platform.machine() == "x86_64" and flags and "avx2" not in flags:
        return warning("processor", told, "without AVX2 a CPU's engine is slow: take another one")
    return ok("processor", told)


def _kernels(settings: Settings) -> Iterator[Finding]:
    """What workers on this host's processor would compute with."""
    workers = [own.worker for own in _pools(settings) if own.worker.device == "cpu"]
    ready, known = built(), supported()
    rounding = [own for own in workers if own.quantization != "auto"]
    if rounding and not ready:
        asked = " and ".join(sorted({own.quantization for own in rounding}))
        told = f"none is built for this processor: workers with quantization {asked} do not start"
        advice = _BUILD if known else "run them where there is AVX2, or without quantization"
        yield warning("kernels", told, advice)
        workers = [own for own in workers if own not in rounding]
    for asked in sorted({own.kernels for own in workers} - {"reference", "triton"}):
        if asked in ready or (asked == "auto" and ready):
            yield ok("kernels", f"{ready[0] if asked == 'auto' else asked} of {', '.join(ready)}")
        elif asked in known or (asked == "auto" and known):
            told = f"none is built for {' or '.join(known) if asked == 'auto' else asked}"
            told += ": workers run on PyTorch, many times slower" if asked == "auto" else ""
            yield warning("kernels", told, _BUILD)
        elif asked == "auto":
            yield ok("kernels", "PyTorch's: there are none of our own for this processor")
        else:
            advice = "correct PENSTOCK_WORKER__KERNELS, or run workers where it has"
            yield warning("kernels", f"{asked} is asked for, which this processor has not", advice)


def _pools(settings: Settings) -> list[Settings]:
    """The settings of each kind of worker."""
    found = [settings.of_worker(model, role) for model in settings.models for role in model.pools]
    return found or [settings]


def _memory(settings: Settings) -> Finding:
    free = psutil.virtual_memory().available
    told = f"{free / 2**30:.1f} GiB available"
    if settings.worker.device == "cpu" and free < settings.worker.kv_cache_bytes + 2**30:
        wanted = settings.worker.kv_cache_bytes / 2**30
        advice = "lower PENSTOCK_WORKER__KV_CACHE_BYTES, or free some"
        return warning("memory", f"{told}; a worker's KV alone is {wanted:.1f} GiB", advice)
    return ok("memory", told)


def _gpu(settings: Settings) -> Iterator[Finding]:
    seen = list(_gpus())
    pools = [settings.of_worker(model, role) for model in settings.models for role in model.pools]
    devices = {own.worker.device for own in (settings, *pools)}
    wanted = sorted(device for device in devices if device.startswith("cuda"))
    for index, told in enumerate(seen):
        yield ok(f"GPU {index}", told)
    if wanted and not seen:
        told = f"workers are to run on {', '.join(wanted)}, and no GPU is seen here"
        advice = "on the workers' hosts: install NVIDIA's driver; in a container, its runtime"
        yield warning("GPU", told, advice)
    elif not seen:
        yield ok("GPU", "none here, none asked for")


def _gpus() -> Iterator[str]:
    if find_spec("pynvml") is None:
        return
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver
        return
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        for index in range(pynvml.nvmlDeviceGetCount()):
            device = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(device)
            name = pynvml.nvmlDeviceGetName(device)
            free, total = (size / 2**30 for size in (memory.free, memory.total))
            yield f"{name}, {free:.0f} of {total:.0f} GiB free, driver {driver}"
    finally:
        pynvml.nvmlShutdown()


def _files(settings: Settings) -> Finding:
    """Open files: a connection takes one."""
    about, needed = "open files", settings.gateway.open_at_once + OTHER_FILES
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return ok(about, f"{'any number' if hard == resource.RLIM_INFINITY else hard} allowed")
    told = f"{hard} allowed, a gateway may need {needed}"
    advice = (
        "raise the limit (ulimit -Hn, LimitNOFILE=), or lower PENSTOCK_GATEWAY__MAX_CONNECTIONS"
    )
    return warning(about, told, advice)


def _shared_memory(settings: Settings) -> Iterator[Finding]:
    if not _SHM.is_dir():
        told = "there is no /dev/shm: KV between workers of a host goes through files"
        yield warning("/dev/shm", told, "mount one")
        return
    total = shutil.disk_usage(_SHM).total
    told = f"{total / 2**30:.1f} GiB"
    if total < _SHM_BYTES:
        advice = "give the container more (--shm-size, a memory emptyDir): Ray and KV use it"
        yield warning("/dev/shm", told, advice)
    else:
        yield ok("/dev/shm", told)


def _ports(it: Installation) -> Iterator[Finding]:
    """Those that the settings name: free, or held by a replica of this installation."""
    here = f"{machine_id()}/"
    ours = {r.pid for r in (*it.replicas, *it.draining) if r.host_id.startswith(here)}
    for port in wanted_ports(it.settings):
        about, name = f"port {port.port}", port.what
        if (error := bind_error(port)) is None:
            if not it.replicas:
                yield ok(about, f"free for {name}")
            continue
        if error.errno != errno.EADDRINUSE:
            yield failed(about, why_not(error, port), "correct that setting")
            continue
        holder = _holder(port.port)
        who = f"process {holder.pid} ({holder.name()})" if holder else "another user's process"
        if holder is not None and holder.pid in ours:
            yield ok(about, f"{name}, {who}")
            continue
        told = f"wanted for {name}, taken by {who}"
        advice = f"end that, or choose another {port.setting}"
        yield (warning if it.replicas else failed)(about, told, advice)


def _holder(port: int) -> psutil.Process | None:
    """Who listens there, if this user may know."""
    for connection in psutil.net_connections("tcp"):
        if (
            connection.status == psutil.CONN_LISTEN
            and connection.laddr.port == port
            and connection.pid
        ):
            return psutil.Process(connection.pid)
    return None
