"""What a step gets of a disk, against direct reads and writes of the same disk.

The disk is that of the folder `runs` of this repository.
"""

import pathlib

from zjax.bench import Case, Contest, Contestant, Row

NAME, FOLDER = "zjax", "runs/nvme"


def get_contest():
    pathlib.Path(FOLDER).mkdir(parents=True, exist_ok=True)
    command = ("{python}", "-m", "zjax.main", "bench", f"--nvme={FOLDER}")

    def row(way):
        case = Case(
            ours=(NAME,),
            peer=(NAME,),
            metric=way,
            unit="bytes/s",
            must=0.7,
            aim=0.9,
            peer_metric=f"raw_{way}",
            peer_name="files with O_DIRECT",
        )
        claim = f"Arrays of a step {way} at the speed of the disk."
        return Row(f"nvme_{way}", claim, (case,), by_devices=False)

    contestants = (Contestant(NAME, command, "zjax"),)
    return Contest("Offload to a disk", contestants, (row("read"), row("write")))
