"""What a step gets of a disk, against a program that reads and writes plain files.

The disk is that of the folder `runs` of this repository.
"""

import pathlib

from contests import Case, Contest, Contestant, Row

NAME, FILES, FOLDER = "zjax", "files with O_DIRECT", "runs/nvme"


def get_contest():
    pathlib.Path(FOLDER).mkdir(parents=True, exist_ok=True)
    command = ("{python}", "-m", "zjax.cli.main", "bench", f"--nvme={FOLDER}")

    def row(way):
        case = Case(
            ours=(NAME,),
            peer=(FILES,),
            metric=way,
            unit="bytes/s",
            must=0.7,
            aim=0.9,
        )
        claim = f"Arrays of a step {way} at the speed of the disk."
        return Row(f"nvme_{way}", claim, (case,), theme="offload", by_devices=False)

    files = ("{python}", "examples/benchmarks/direct_files.py", FOLDER)
    contestants = (
        Contestant(NAME, command, "zjax"),
        Contestant(FILES, files, "peer"),
    )
    return Contest("Offload to a disk", contestants, (row("read"), row("write")))
