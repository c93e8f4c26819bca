import errno
import os
import signal
import stat
import subprocess
import sys
import threading

import pytest
import torch

from vision_attn.atomic import atomic_write, atomic_write_text, is_full_disk, remove_leftovers
from vision_attn.errors import UserError


def test_writes_and_replaces(tmp_path):
    path = tmp_path / "new" / "file.txt"
    atomic_write_text(path, "one")
    assert atomic_write_text(path, "two") == path
    assert path.read_text() == "two"
    assert os.listdir(path.parent) == ["file.txt"]


def test_permissions_follow_the_umask(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("")
    atomic_write_text(tmp_path / "ours", "x")
    assert (tmp_path / "ours").stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("boom")])
def test_failure_keeps_the_previous_file(tmp_path, error):
    path = tmp_path / "file"
    atomic_write_text(path, "old")

    def writer(temporary):
        temporary.write_text("half")
        raise error

    with pytest.raises(type(error)):
        atomic_write(path, writer)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_full_disk_is_a_clear_message(tmp_path):
    path = tmp_path / "file"
    atomic_write_text(path, "old")

    def writer(temporary):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match=r"disk is full.*file.*previous file is intact"):
        atomic_write(path, writer)
    assert path.read_text() == "old"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_torch_save_on_a_full_device_is_recognised():
    with pytest.raises(Exception) as caught, open("/dev/full", "wb") as file:  # noqa: PT011 (torch's own kinds)
        torch.save(torch.zeros(100_000), file)
    assert is_full_disk(caught.value) or is_full_disk(caught.value.__context__)
    with pytest.raises(RuntimeError) as caught:
        torch.save(torch.zeros(100_000), "/dev/full")
    assert is_full_disk(caught.value)


KILLED = """
import sys, time
from vision_attn.atomic import atomic_write
def writer(path):
    path.write_text("half")
    print("writing", flush=True)
    time.sleep(600)
atomic_write(sys.argv[1], writer)
"""


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path):
    path = tmp_path / "last.ckpt"
    atomic_write_text(path, "old")
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "writing\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (left,) = (name for name in os.listdir(tmp_path) if name != "last.ckpt")
    kept = [".last.ckpt", ".last.ckpt.tmp", ".last.ckpt.mine.tmp", "last.ckpt.abcdefgh.tmp", ".best.ckpt.abcdefgh.tmp"]
    kept += [".lastxckpt.abcdefgh.tmp", ".last.ckpt.abcdefgh.tmp.txt"]
    for name in kept:
        (tmp_path / name).touch()
    assert remove_leftovers(path) == [tmp_path / left]
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "last.ckpt"])
    assert path.read_text() == "old"
    assert remove_leftovers(tmp_path / "nowhere" / "file") == []


def test_a_pipe_is_written_into_and_not_replaced(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read = []
    thread = threading.Thread(target=lambda: read.append(path.read_text()))
    thread.start()
    atomic_write_text(path, "text")
    thread.join(timeout=10)
    assert read == ["text"]
    assert stat.S_ISFIFO(path.stat().st_mode)
