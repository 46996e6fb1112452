"""`shoal doctor`: what this machine has, what is missing, and the command that adds it."""

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import click
import psutil
from rich.console import Console
from rich.table import Table

from shoal import data
from shoal._version import __version__
from shoal.machine import cores
from shoal.units import show_bytes


@dataclass(frozen=True)
class Finding:
    """One line of the examination; `remedy` is empty where nothing is missing."""

    what: str
    found: str
    remedy: str = ""


@click.command()
def doctor() -> None:
    """Show what this machine has, what is missing and how to add it.

    Exits 1 when Shoal cannot train here at all, 0 otherwise.
    """
    groups = {
        "Machine": list(_machine()),
        "PyTorch": list(_torch()),
        "Data": list(_data()),
        "Extras": list(_extras()),
    }
    console = Console(highlight=False)
    for title, findings in groups.items():
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
        table.add_column(no_wrap=True, min_width=14)
        table.add_column(overflow="fold")
        for finding in findings:
            table.add_row(finding.what, _cell(finding))
        console.print(table)
        console.print()
    broken = [finding for finding in groups["PyTorch"] if finding.what == "torch" and finding.remedy]
    if broken:
        sys.exit(1)


def _cell(finding: Finding) -> str:
    if not finding.remedy:
        return finding.found
    return f"[yellow]{finding.found}[/yellow]\nadd it: {finding.remedy.replace('[', chr(92) + '[')}"


def _machine() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    yield Finding("shoal", f"{__version__}, Python {platform.python_version()}, {platform.platform()}")
    yield Finding("cores", f"{cores()} usable of {os.cpu_count()}")
    yield Finding("memory", f"{show_bytes(memory.available)} free of {show_bytes(memory.total)}")
    disk = shutil.disk_usage(".")
    yield Finding("disk", f"{show_bytes(disk.free)} free in the current folder")


def _torch() -> Iterator[Finding]:
    try:
        import torch
        import torch.distributed
    except Exception as error:  # a broken build fails to load in many ways, and this is the place to say so
        yield Finding("torch", f"does not load: {error}", "pip install torch==2.13.0")
        return
    yield Finding("torch", f"{torch.__version__}, {torch.get_num_threads()} threads by default")
    yield Finding("devices", ", ".join(["cpu", *_accelerators()]))
    if not torch.distributed.is_available():
        yield Finding("backends", "none: this build has no torch.distributed", "pip install torch==2.13.0")
        return
    checks = {
        "gloo": torch.distributed.is_gloo_available(),
        "nccl": torch.distributed.is_nccl_available(),
        "mpi": torch.distributed.is_mpi_available(),
    }
    present = [name for name, there in checks.items() if there]
    absent = [name for name, there in checks.items() if not there]
    note = f" (not in this build: {', '.join(absent)})" if absent else ""
    yield Finding("backends", f"{', '.join(present)}{note}")


def _accelerators() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"cuda:{i} {device.name}, {show_bytes(device.total_memory)}" for i, device in enumerate(devices)]


def _data() -> Iterator[Finding]:
    yield Finding("searched", ", ".join(map(str, data.search_folders())))
    yield Finding("default", data.default_name())
    for place in data.where():
        yield Finding(place.name, place.found or "not found", "" if place.found else place.remedy)


def _extras() -> Iterator[Finding]:
    there = importlib.util.find_spec("PIL") is not None
    yield Finding(
        "images",
        "Pillow, for --data folder:PATH" if there else "no Pillow",
        "" if there else "pip install pillow",
    )
    page = all(importlib.util.find_spec(name) is not None for name in ("altair", "jinja2", "vl_convert"))
    yield Finding(
        "pages",
        "Altair and vl-convert, for shoal report" if page else "no shoal report",
        "" if page else "pip install 'shoal-train[report]'",
    )
    launcher = shutil.which("torchrun") or importlib.util.find_spec("torch.distributed.run") is not None
    yield Finding("torchrun", "found" if launcher else "not found", "" if launcher else "pip install torch==2.13.0")
