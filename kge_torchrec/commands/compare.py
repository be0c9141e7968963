"""``compare``: train several engines side by side and measure them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated

from kge_torchrec.commands import ConfigName, Settings
from kge_torchrec.config import ConfigError
from kge_torchrec.config.entities import check_variants
from kge_torchrec.config.parser import load_config
from kge_torchrec.environment import loading_torch


def compare(
    config: ConfigName | None = None,
    *,
    settings: Settings = (),
    engines: Annotated[Sequence[str], "NAME"] = ("torchrec", "handrolled"),
    world_sizes: Annotated[Sequence[int], "W"] = (1,),
    repeats: int = 3,
    steps: int = 100,
) -> int:
    """Train several engines with the same initial values and batches, and measure them.

    The report goes to the folder --run.dir. The models are ranked once, after the last epoch.
    Variants: torchrec, handrolled, dicee, dgl. The others are compared with the first.

    Examples:
      kge-torchrec compare demo --world-sizes 1 2 --threads 1
      kge-torchrec compare runs/mine --engines handrolled dgl --repeats 0

    Args:
        engines: variants; the others are compared with the first
        world_sizes: numbers of processes to compare with
        repeats: speed measurements per variant, alternating; 0 measures none
        steps: steps of each of the 3 timed blocks of a measurement
    """
    if "RANK" in os.environ:
        raise ConfigError("compare starts its own processes; call it without torchrun")
    if not repeats and steps != 100:
        raise ConfigError("--steps: --repeats 0 measures no speed; leave one of the two out")
    check_variants(engines)
    for setting in settings:
        key = setting.lstrip("-").partition("=")[0]
        if key in ("entities.engine", "entities.preset"):
            raise ConfigError(f"{key}: --engines sets it for each variant; leave it out")
    # This engine accepts every setting that a variant accepts, so that a setting that a variant
    # refuses is refused in the name of that variant.
    neutral = ["--entities.engine=handrolled", "--entities.preset=fbgemm"]
    with loading_torch():
        loaded = load_config(config, [*settings, *neutral])
        from kge_torchrec import comparison

    content = comparison.compare(loaded, engines, world_sizes, repeats, steps)
    print(f"{comparison.text(content)}\n\nreport: {content['config']['run']['dir']}")
    return 0
