"""Count the functions of the package that one warm training step runs through.

    python scripts/count_step.py [--KEY VALUE ...]

The run is the default sampled training of the embedded graph. ``sys.setprofile`` sees every Python
function of the package that the trainer's third step calls in its own thread, backward included. A
function counts once, however often it is called; a lambda or comprehension is a function. Of the
code that numba compiled it sees the kernels that Python calls.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType

import kge_torchrec
from kge_torchrec.training.trainer import Trainer

PACKAGE = str(Path(kge_torchrec.__file__).parent)
STEP = 3  # the first two load kernels and make the optimizers' states


def main() -> None:
    """Train, and print the files and functions of one step."""
    called: set[tuple[str, str, int]] = set()
    steps, train_step = Counter(), Trainer.train_step

    def watch(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            called.add((code.co_filename.removeprefix(PACKAGE), code.co_name, code.co_firstlineno))

    def watched(self: Trainer, *args: object) -> object:
        steps["done"] += 1
        sys.setprofile(watch if steps["done"] == STEP else None)
        try:
            return train_step(self, *args)
        finally:
            sys.setprofile(None)

    Trainer.train_step = watched
    keys = {k.removeprefix("--"): v for k, v in zip(sys.argv[1::2], sys.argv[2::2], strict=True)}
    with tempfile.TemporaryDirectory() as folder:
        config = {"device": "cpu", "train.epochs": 1, "run.progress": False, **keys}
        kge_torchrec.train({**config, "run.dir": f"{folder}/run"}).close()
    for file, count in sorted(Counter(file for file, *_ in called).items()):
        names = sorted(name for other, name, _ in called if other == file)
        print(f"{count:4} {file.lstrip('/')}: {', '.join(names)}")
    print(f"{len(called)} functions in {len({file for file, *_ in called})} files")


if __name__ == "__main__":
    main()
