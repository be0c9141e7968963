"""A comparison from start to report: one world after another, with a report that stays current.

For each world size all variants train side by side in one world. Then each variant is measured in
fresh worlds of its own, alternating, ``repeats`` times. The folder then holds

    comparison.json  everything; rewritten after each measurement, "complete" at the end
    comparison.txt   tables
    store/           the prepared triples, unless data.path was a store
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kge_torchrec.comparison.launch import RankFailed, machine_facts, run_world, write_json
from kge_torchrec.comparison.measurements import Timing, measure_speed, train_side_by_side
from kge_torchrec.comparison.report import (
    describe,
    examples_of,
    ranks,
    summarize,
    tables,
)
from kge_torchrec.config import Config, ConfigError
from kge_torchrec.config.checks import at_least
from kge_torchrec.data.report import notes
from kge_torchrec.data.store import TripleStore
from kge_torchrec.training.assembly import examples_per_epoch
from kge_torchrec.training.run_data import open_store

FORMAT_VERSION = 1
_NO_FAILURE = dict.fromkeys(("phase", "contender", "world_size", "repeat", "rank", "reason"))


@dataclass(frozen=True)
class Extent:
    """How much is measured.

    Raises:
        ConfigError: A number makes no sense.
    """

    world_sizes: tuple[int, ...] = (1,)
    repeats: int = 3
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        sizes = self.world_sizes
        if not sizes or min(sizes) < 1 or len(set(sizes)) < len(sizes):
            raise ConfigError(f"--world-sizes must be different integers >= 1, got {list(sizes)}")
        at_least("--repeats", self.repeats, 0)
        at_least("--steps", self.timing.steps, 1)


class Comparison:
    """Compares variants and writes their report.

    Args:
        configs: By name of the variant. The others are compared with the first. All share data,
            run.dir and train.epochs.
        extent: How much is measured.

    Raises:
        ConfigError: run.dir is not empty, there are too few GPUs, or all entities are candidates.
        DataError: The data is bad.
    """

    def __init__(self, configs: dict[str, Config], extent: Extent):
        first = next(iter(configs.values()))
        self.extent, self.show = extent, first.run.progress
        on_cuda = first.device != "cpu" and torch.cuda.is_available()
        self.device = first.device if on_cuda else "cpu"
        if on_cuda and max(extent.world_sizes) > torch.cuda.device_count():
            raise ConfigError(
                f"--world-sizes: {max(extent.world_sizes)} ranks need as many GPUs, and this host "
                f"has {torch.cuda.device_count()}; name fewer or set device cpu"
            )
        if first.negatives.is_full:
            raise ConfigError(
                f"negatives.regime {first.negatives.regime}: compare takes apart how engines look "
                "entities up, and there is no lookup with all entities as candidates; use sampled "
                "or kvssample"
            )
        self.folder = _empty_folder(first)
        self.store = _open_store(first, self.folder)
        self.configs = {
            name: replace(  # one batch size for all world sizes
                config.settled(self.store.size, on_cuda),
                data=replace(config.data, path=str(self.store.path)),
                run=replace(config.run, dir=str(self.folder), progress=False),
            )
            for name, config in configs.items()
        }
        self.content: dict[str, Any] = {
            "format": FORMAT_VERSION,
            "complete": False,
            "failure": None,
            "engines": list(configs),
            "settings": asdict(extent),
            "config": next(iter(self.configs.values())).to_dict(),
            "entities": {name: asdict(config.entities) for name, config in configs.items()},
            "data": {
                "entities": self.store.num_entities,
                "relations": self.store.num_relations,
                "train": len(self.store.train),
            },
            "machine": machine_facts(),
            "training": {},
            "speed": {},
            "summary": {},
        }

    def run(self) -> dict[str, Any]:
        """Measure everything, write the report and return the content of comparison.json.

        A rank that fails ends the comparison: the report keeps the measurements so far and is
        marked incomplete.

        Raises:
            KeyboardInterrupt: The user interrupted; the report is kept as well.
        """
        self._write()
        total = self._steps_of_a_world() * len(self.configs) * len(self.extent.world_sizes)
        try:
            with tqdm(total=total, unit=" steps", disable=None if self.show else True) as bar:
                for world_size in self.extent.world_sizes:
                    self._train(world_size, bar)
                    for repeat in range(self.extent.repeats):
                        for name in in_turn(list(self.configs), repeat):
                            self._measure(world_size, repeat, name, bar)
            self.content["complete"] = True
        except RankFailed:
            pass  # the report has it
        except KeyboardInterrupt:
            self._fail(reason="it was interrupted")
            raise
        finally:
            self._write()
            (self.folder / "comparison.txt").write_text(self.text() + "\n", encoding="utf-8")
        return self.content

    def text(self) -> str:
        """Return the tables, then where and why the comparison ended if it is incomplete."""
        failure = self.content["failure"]
        ended = "" if failure is None else f"incomplete: {describe(failure)}"
        return "\n\n".join(part for part in (tables(self.content), ended) if part)

    def _steps_of_a_world(self) -> int:
        """Return the steps that one variant takes at one world size."""
        train = next(iter(self.configs.values())).train
        examples = examples_per_epoch(next(iter(self.configs.values())), self.store)
        trained = train.epochs * -(-examples // train.batch_size)
        return trained + self.extent.repeats * self.extent.timing.total

    def _train(self, world_size: int, bar: tqdm) -> None:
        """Train all variants side by side; a failure keeps the steps so far."""
        phase, measured = "training side by side", self.content["training"]
        bar.set_description(f"{ranks(world_size)}, {phase}")
        try:
            results = self._world(bar, world_size, train_side_by_side, self.configs)
        except RankFailed as failed:
            if failed.partial is not None:
                measured[str(world_size)] = failed.partial
            self._fail(failed, phase=phase, world_size=world_size)
            raise
        measured[str(world_size)] = results[0]
        self._write()
        self._say(f"{ranks(world_size)}: trained {results[0]['steps']:,} steps side by side")

    def _measure(self, world_size: int, repeat: int, name: str, bar: tqdm) -> None:
        """Measure the speed of one variant."""
        of = f"repeat {repeat + 1} of {self.extent.repeats}"
        bar.set_description(f"{ranks(world_size)}, speed of {name}, {of}")
        task = (measure_speed, self.configs[name], self.extent.timing)
        try:
            results = self._world(bar, world_size, *task)
        except RankFailed as failed:
            place = {"contender": name, "world_size": world_size, "repeat": repeat}
            self._fail(failed, phase=f"speed (repeat {repeat + 1})", **place)
            raise
        rates = results[0]["triples_per_second"]
        # Variants keep their order, whichever of them came first this time.
        empty: dict[str, list[Any]] = {variant: [] for variant in self.configs}
        by_name = self.content["speed"].setdefault(str(world_size), empty)
        by_name[name].append({"repeat": repeat, "triples_per_second": rates, "ranks": results})
        self._write()
        speeds = ", ".join(f"{rate:,.0f}" for rate in rates) + f" {examples_of(self.content)}/s"
        self._say(f"{ranks(world_size)}, {name}, repeat {repeat + 1}: {speeds}")

    def _world(self, bar: tqdm, world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
        return run_world(work, world_size, *args, device=self.device, advance=bar.update)

    def _fail(self, failed: RankFailed | None = None, **place: Any) -> None:
        """Write down where and why the comparison ended."""
        cause: dict[str, Any] = {"details": ""}
        if failed is not None:
            cause = {"rank": failed.rank, "reason": failed.reason, "details": failed.details}
        self.content["failure"] = {**_NO_FAILURE, **cause, **place}
        self._say(f"ended: {describe(self.content['failure'])}")

    def _write(self) -> None:
        self.content["summary"] = summarize(self.content["speed"])
        write_json(self.folder / "comparison.json", self.content)

    def _say(self, text: str) -> None:
        """Print a line on stderr, above the bar."""
        if self.show:
            tqdm.write(text, file=sys.stderr)


def in_turn(names: list[str], repeat: int) -> list[str]:
    """Return the order of measuring: there and back, so that what slows down slows all of them."""
    return names if repeat % 2 == 0 else names[::-1]


def _empty_folder(config: Config) -> Path:
    """Return the folder that run.dir names, or runs/compare-TIME."""
    folder = Path(config.run.dir or f"runs/compare-{time.strftime('%Y%m%d-%H%M%S')}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"run.dir: {folder} is not empty; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _open_store(config: Config, folder: Path) -> TripleStore:
    """Prepare the data once, for all worlds."""
    try:
        store = open_store(config, folder, progress=config.run.progress)
    except Exception:
        if not any(folder.iterdir()):
            folder.rmdir()
        raise
    if config.run.progress:
        for note in notes(store):
            print(f"note: {note}", file=sys.stderr)
    return store
