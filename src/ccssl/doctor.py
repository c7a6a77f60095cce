"""What this machine has for ccssl: device, kernels, threads, memory, cached data; and advice where it lacks.

``examine`` gathers plain data, ``terminal_table`` writes it down. Nothing is compiled and nothing is changed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from ccssl._version import __version__
from ccssl.folders import data_folder, existing, user_cache, writable

Findings = dict[str, Any]

GIGABYTE = 10**9
LITTLE_MEMORY = 2 * GIGABYTE
LITTLE_DISK = GIGABYTE
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")  # on Linux, where a driver is loaded


def examine() -> Findings:
    """Return what was found, ready for JSON; ``findings["advice"]`` is a list of sentences."""
    import torch

    findings: Findings = {
        "ccssl": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "memory": memory(),
        "devices": _devices(),
        "kernels": _kernels(),
        "cache": _cache(),
    }
    findings["advice"] = advice(findings)
    return findings


def advice(findings: Findings) -> list[str]:
    """Return a sentence for each thing that would make ccssl slow or fail, and what to do about it."""
    import torch

    sentences = []
    packages, used = findings["kernels"]["packages"], findings["kernels"]["used"]
    cuda = [device for device in findings["devices"] if device["type"] == "cuda"]
    if used["cpu"] == "torch":
        reason = f"numba {packages['numba']} cannot be imported" if packages["numba"] else "numba is missing"
        sentences.append(
            f"The projection runs on the slower torch kernel on the CPU, because {reason}: "
            "install it with `pip install --upgrade numba`."
        )
    elif findings["kernels"]["numba_cache"] is None:
        sentences.append(
            "Compiled CPU kernels cannot be kept, so each process compiles them anew for some seconds: "
            "set NUMBA_CACHE_DIR to a folder that can be written."
        )
    if cuda and used.get("cuda") == "torch":
        sentences.append(
            "The projection runs on the slower torch kernel on CUDA: install Triton, `pip install triton`."
        )
    if not cuda and NVIDIA_DRIVER.exists():
        build = "has no CUDA" if torch.version.cuda is None else f"is for CUDA {torch.version.cuda}"
        sentences.append(
            f"There is an NVIDIA driver, but torch sees no device; this torch {build}: install the build for "
            "your driver from https://pytorch.org/get-started/locally."
        )
    if findings["threads"] > findings["cores"]:
        sentences.append(
            f"Torch uses {findings['threads']} threads on {findings['cores']} usable cores, which slows it "
            f"down: set OMP_NUM_THREADS={findings['cores']}."
        )
    if (findings["memory"]["available"] or LITTLE_MEMORY) < LITTLE_MEMORY:
        sentences.append(
            f"Only {_gigabytes(findings['memory']['available'])} of memory are free: close other programs or "
            "take a smaller model and batch."
        )
    cache = findings["cache"]
    if not cache["writable"]:
        sentences.append(
            f"The folder for data, {cache['folder']}, cannot be written: set CCSSL_HOME to one that can."
        )
    elif cache["free"] < LITTLE_DISK:
        sentences.append(
            f"Only {_gigabytes(cache['free'])} are free on the disk of {cache['folder']}: make room or set "
            "CCSSL_HOME to a folder on another disk."
        )
    return sentences


def terminal_table(findings: Findings) -> str:
    """Return the findings as aligned lines, the advice below them."""
    memory, kernels, cache = findings["memory"], findings["kernels"], findings["cache"]
    packages = [f"{name} {version or 'missing'}" for name, version in kernels["packages"].items()]
    rows = [
        ("ccssl", findings["ccssl"]),
        ("python", f"{findings['python']} on {findings['system']}"),
        ("torch", f"{findings['torch']}, {findings['threads']} threads on {findings['cores']} usable cores"),
        ("memory", f"{_gigabytes(memory['available'])} free of {_gigabytes(memory['total'])}"),
        *(("device", _device_line(device)) for device in findings["devices"]),
        *((f"kernel, {device}", name) for device, name in kernels["used"].items()),
        ("packages", ", ".join(packages)),
        ("kernel cache", kernels["numba_cache"] or "none"),
        (
            "data",
            f"{cache['folder']}: {_gigabytes(cache['size'])}, {_gigabytes(cache['free'])} free on its disk",
        ),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    told = [f"- {sentence}" for sentence in findings["advice"]] or ["Nothing to mend."]
    return "\n".join([*lines, "", *told])


def usable_cores() -> int:
    """Return how many cores this process may use: its affinity, cut by a container's quota."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota, _, period = _first_line("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def memory() -> dict[str, int | None]:
    """Return total and available bytes, within a container's limit; None where the system does not tell."""
    total = available = None
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        sizes = {
            line.split(":")[0]: int(line.split()[1]) * 1024
            for line in meminfo.read_text().splitlines()
            if line.endswith("kB")
        }
        total, available = sizes.get("MemTotal"), sizes.get("MemAvailable")
    elif "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, used = _first_line("/sys/fs/cgroup/memory.max"), _first_line("/sys/fs/cgroup/memory.current")
    if limit.isdecimal() and used.isdecimal() and total is not None and int(limit) < total:
        total = int(limit)
        available = min(available or total, total - int(used))
    return {"total": total, "available": available}


def _devices() -> list[dict[str, Any]]:
    import torch

    found: list[dict[str, Any]] = [{"type": "cpu", "name": platform.processor() or platform.machine()}]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "type": "cuda",
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory": properties.total_memory,
            }
        )
    if torch.backends.mps.is_available():
        found.append({"type": "mps", "name": "Apple GPU"})
    return found


def _kernels() -> Findings:
    from ccssl.credal.projection import kernel

    used = {device: kernel(device).__name__.rpartition(".")[-1] for device in {d["type"]: None for d in _devices()}}
    return {
        "used": used,
        "packages": {name: _installed(name) for name in ("numba", "triton")},
        "numba_cache": _numba_cache(),
    }


def _installed(package: str) -> str | None:
    """Return the version of a package without importing it."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _numba_cache() -> str | None:
    """Return the folder in which numba keeps compiled kernels: its own rule, in its own order."""
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        candidates = [Path(named)]
    else:
        beside_the_code = Path(__file__).parent / "credal" / "kernels" / "__pycache__"
        candidates = [beside_the_code, user_cache() / "numba"]
    return next((str(folder) for folder in candidates if writable(folder)), None)


def _cache() -> Findings:
    folder = data_folder()
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0
    free = shutil.disk_usage(existing(folder)).free
    return {"folder": str(folder), "size": size, "free": free, "writable": writable(folder)}


def _first_line(path: str) -> str:
    """Return the first line of a system file, empty where there is none."""
    try:
        return Path(path).read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""


def _gigabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / GIGABYTE:.1f} GB"


def _device_line(device: dict[str, Any]) -> str:
    parts = [f"{device['type']}: {device['name']}"]
    if device["type"] == "cuda":
        parts += [f"capability {device['capability']}", _gigabytes(device["memory"])]
    return ", ".join(parts)
