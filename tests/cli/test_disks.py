"""Disks are measured by what is really written and read."""

import json
import re

import pytest
from absl import flags

from zjax.cli import disks, main
from zjax.errors import StorageError
from zjax.storage.array import DiskArray


def test_both_sides_move_all_bytes(tmp_path, monkeypatch):
    """Fails if a side moves less than it is credited with."""
    moved = {"write": 0, "read": 0}
    write, read = DiskArray.write, DiskArray.to_devices

    def counted_write(x, row):
        moved["write"] += x.nbytes
        return write(x, row)

    def counted_read(self):
        moved["read"] += self.nbytes
        return read(self)

    monkeypatch.setattr(DiskArray, "write", counted_write)
    monkeypatch.setattr(DiskArray, "to_devices", counted_read)
    size, rounds = 1 << 20, disks.WARM_UP_ROUNDS + disks.TIMED_ROUNDS
    speed = disks.measure_disks((str(tmp_path),), array_bytes=size, num_arrays=3)
    assert moved == {"write": 3 * rounds * size, "read": 3 * rounds * size}
    for spread in (speed.write, speed.read, speed.raw_write, speed.raw_read):
        assert spread.n == disks.TIMED_ROUNDS
        assert 0 < spread.min <= spread.median <= spread.max
    assert re.search(r"write +\S+ \[.*\] +\S+ \[.*\] +\d", disks.describe_disks(speed))


def test_plain_files_hold_what_is_counted(tmp_path):
    files = disks._Files((str(tmp_path),), 1 << 20, num_files=5)
    files.write()
    assert [path.stat().st_size for path in files.files] == [1 << 20] * 5
    files.read()
    files.remove()
    assert not any(path.exists() for path in files.files)


def test_directories_that_are_not_there():
    with pytest.raises(StorageError, match="'/nowhere' is not a directory"):
        disks.measure_disks(("/nowhere",))


def test_command(tmp_path, monkeypatch, capsys):
    measure = disks.measure_disks

    def small(paths):
        return measure(paths, array_bytes=1 << 20, num_arrays=2)

    given = flags.FlagValues()
    flags.DEFINE_list("nvme", [str(tmp_path)], "", flag_values=given)
    given.mark_as_parsed()
    monkeypatch.setattr(main, "measure_disks", small)
    monkeypatch.setattr(main.flags, "FLAGS", given)
    main.bench()
    line = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(line.removeprefix("RESULT "))["name"] == str(tmp_path)
