"""Freed memory is kept for the next step, where the C library can."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

COUNT = """
import resource, torch
from vision_attn.training.memory import keep_freed_memory
assert keep_freed_memory()
torch.set_num_threads(1)
def step():
    return torch.ones(6_000_000).add(1).sum().item()  # 24 MB, twice
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc knows the setting")
def test_steps_ask_the_system_for_no_new_pages() -> None:
    result = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 50_000  # 230,000 otherwise
