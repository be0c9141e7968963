"""``plan``: estimate the memory and step time of a run."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

from kge_torchrec.commands import ConfigName, Settings, Table
from kge_torchrec.config.parser import load_config
from kge_torchrec.environment import loading_torch

DOES_NOT_FIT = 3  # the exit code; 1 and 2 are errors
_Number = Annotated[str | None, "N"]


def plan(
    config: ConfigName | None = None,
    *,
    devices: str,
    settings: Settings = (),
    hosts: int = 1,
    host_memory: Annotated[float | None, "GIB"] = None,
    between_hosts: Annotated[float | None, "GB/S"] = None,
    entities: _Number = None,
    relations: _Number = None,
    triples: _Number = None,
    skew: float | None = None,
    all: bool = False,
    format: Table = "table",
) -> int:
    """Plan a run without GPUs, processes or data.

    Prints memory, traffic and time of a rank, and changes if the run does not fit. The exit code
    is 0 if the run fits and 3 if it does not.

    Examples:
      kge-torchrec plan --devices 2xH100-80GB --entities 86M --relations 15k --triples 339M
      kge-torchrec plan umls --data.path DIRECTORY --devices 2xCPU --all

    Args:
        devices: all devices of the run, one rank each: 8xH100-80GB, 4xA100-40GB, 1xH200, 2xCPU,
            4xCPU-64GB, or any card by its memory: 8xGPU-96GB
        hosts: hosts that share the devices evenly
        host_memory: main memory of one host
        between_hosts: speed of a rank's link to other hosts, in place of the device's
        entities: number of entities, such as 86M; with entities.tables those of each type:
            user=60M,item=26M (default: all three are counted in the config's data)
        relations: number of relations, such as 14_824
        triples: number of training triples
        skew: Zipf exponent of entity frequencies, 0 for uniform (default: counted in the data, 0.7
            without)
        all: list four layouts of the table by estimated step time: row_wise, which training has,
            column_wise, table_wise and data_parallel
        format: a table, or everything as JSON
    """
    with loading_torch():
        loaded = load_config(config, settings)
        from kge_torchrec.planning import report
        from kge_torchrec.planning.advice import advise

        if loaded.decided_by is None:
            print("default: rules; train would first race several settings", file=sys.stderr)
        made = report.make_plan(
            loaded, devices, hosts, host_memory, between_hosts, entities, relations, triples, skew
        )
        if all:
            plans = report.all_layouts(made)
            content: Any = [report.content_of(x) for x in plans]
            text = report.side_by_side(plans)
        else:
            plans, advice = [made], [] if made.fits else advise(made)
            content, text = report.content_of(made, advice), report.report(made, advice)
    print(json.dumps(content) if format == "json" else text)
    return 0 if [x for x in plans if x.fits] else DOES_NOT_FIT
