"""The host: its processor and memory."""

import os
import platform
import re
from pathlib import Path

GIB = 2**30


def memory_bytes() -> int:
    """The machine's memory, or a container's share of it."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(whole, _container_limit() or whole)


def available_memory_bytes() -> int:
    """Memory that this process could still take; where the system does not tell (macOS), all there is."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    return min(int(found.group(1)) * 1024, memory_bytes()) if found else memory_bytes()


def cpu_name() -> str:
    """The processor's model, without a word about the host."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine() or "unknown"


def core_count() -> int:
    """Cores that this process may use; macOS tells only how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def last_level_cache_bytes() -> int:
    """The largest cache that Linux lists ("32768K"); 32 MiB elsewhere."""
    caches = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    texts = [path.read_text().strip() for path in caches]
    return max((int(text[:-1]) for text in texts if text.endswith("K")), default=2**15) * 2**10


def _container_limit() -> int | None:
    """Memory limit of this control group (version 2), where there is one."""
    try:
        return int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        return None
