"""A comparison from start to report: worlds one after another, the report kept current meanwhile.

For each world size: all variants train side by side in one world; then each is measured alone in
fresh worlds, by turns, ``repeats`` times.  The folder then holds

    comparison.json  everything; rewritten after each measurement, "complete" once all are there
    comparison.txt   tables and verdict
    *.png            losses, differences, speed, split, traffic
    store/           the prepared triples, unless data.path was a store
"""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kge_torchrec.comparison.launch import RankFailed, machine_facts, run_world, write_json
from kge_torchrec.comparison.lockstep import train_side_by_side
from kge_torchrec.comparison.plots import draw
from kge_torchrec.comparison.report import describe, examples_of, summarize, tables, verdict
from kge_torchrec.comparison.speed import Timing, measure_speed
from kge_torchrec.config import Config, ConfigError
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import Processes
from kge_torchrec.training.assembly import examples_per_epoch
from kge_torchrec.training.session import data_notes, open_store

FORMAT_VERSION = 1
INTERRUPTED = "it was interrupted"


@dataclass(frozen=True)
class Extent:
    """How much is measured.  Raises ConfigError for a number that makes no sense."""

    world_sizes: tuple[int, ...] = (1,)
    repeats: int = 3
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        sizes = self.world_sizes
        if not sizes or min(sizes) < 1 or len(set(sizes)) < len(sizes):
            raise ConfigError(f"--world-sizes must be different integers >= 1, got {list(sizes)}")
        if self.repeats < 0:
            raise ConfigError(f"--repeats must be an integer >= 0, got {self.repeats}")
        if self.timing.steps < 1:
            raise ConfigError(f"--steps must be an integer >= 1, got {self.timing.steps}")


class Comparison:
    """Compares variants and writes their report.

    configs: by variant's name; the first is the one that others are compared with.  They differ
    in what is compared and share data, run.dir and train.epochs.
    Raises ConfigError if run.dir is not empty or the GPUs do not suffice, DataError on bad input.
    """

    def __init__(self, configs: dict[str, Config], extent: Extent):
        first = next(iter(configs.values()))
        self.extent, self.show = extent, first.run.progress
        on_cuda = first.device != "cpu" and torch.cuda.is_available()
        self.device = first.device if on_cuda else "cpu"
        self._check_gpus()
        _check_regimes(configs)
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
        self.found: dict[str, Any] = {
            "format": FORMAT_VERSION,
            "complete": False,
            "failure": None,
            "verdict": [],
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
        """Measures everything, writes the report and returns what comparison.json holds.

        A rank that fails ends the comparison: what is there is kept and marked incomplete.
        KeyboardInterrupt does so too, and is raised again.
        """
        self._write()
        try:
            with self._bar() as bar:
                for world_size in self.extent.world_sizes:
                    self._train(world_size, bar)
                    self._speed(world_size, bar)
            self.found["complete"] = True
        except _Ended:
            pass
        except KeyboardInterrupt:
            self._fail(None, None, None, None, INTERRUPTED)
            raise
        finally:
            self._report()
        return self.found

    def text(self) -> str:
        """The tables, then the verdict."""
        sentences = (textwrap.fill(sentence, 100) for sentence in self.found["verdict"])
        return "\n\n".join(part for part in (tables(self.found), *sentences) if part)

    def _train(self, world_size: int, bar: tqdm) -> None:
        bar.set_description(f"{_ranks(world_size)}, training side by side")
        measured = self.found["training"]
        try:
            ranks = self._world(bar, world_size, train_side_by_side, self.configs)
        except RankFailed as failed:
            if failed.partial is not None:
                measured[str(world_size)] = failed.partial
            self._fail("training side by side", None, world_size, None, failed)
            raise _Ended from None
        measured[str(world_size)] = ranks[0]
        self._write()
        self._say(f"{_ranks(world_size)}: trained {ranks[0]['steps']:,} steps side by side")

    def _speed(self, world_size: int, bar: tqdm) -> None:
        for repeat in range(self.extent.repeats):
            for name in in_turn(list(self.configs), repeat):
                config = self.configs[name]
                of = f"repeat {repeat + 1} of {self.extent.repeats}"
                bar.set_description(f"{_ranks(world_size)}, speed of {name}, {of}")
                self._measure(world_size, name, config, repeat, bar)

    def _measure(self, world_size: int, name: str, config: Config, repeat: int, bar: tqdm) -> None:
        try:
            ranks = self._world(bar, world_size, measure_speed, config, self.extent.timing)
        except RankFailed as failed:
            self._fail(f"speed (repeat {repeat + 1})", name, world_size, repeat, failed)
            raise _Ended from None
        rates = ranks[0]["triples_per_second"]
        # Variants keep the order in which they were named, whoever came first this time.
        empty: dict[str, list[Any]] = {one: [] for one in self.configs}
        by_name = self.found["speed"].setdefault(str(world_size), empty)
        by_name[name].append({"repeat": repeat, "triples_per_second": rates, "ranks": ranks})
        self._write()
        speeds = ", ".join(f"{rate:,.0f}" for rate in rates) + f" {examples_of(self.found)}/s"
        self._say(f"{_ranks(world_size)}, {name}, repeat {repeat + 1}: {speeds}")

    def _world(self, bar: tqdm, world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
        return run_world(work, world_size, *args, device=self.device, advance=bar.update)

    def _fail(
        self,
        phase: str | None,
        variant: str | None,
        world_size: int | None,
        repeat: int | None,
        cause: RankFailed | str,
    ) -> None:
        failed = cause if isinstance(cause, RankFailed) else None
        self.found["failure"] = {
            "phase": phase,
            "contender": variant,
            "world_size": world_size,
            "repeat": repeat,
            "rank": failed.rank if failed else None,
            "reason": failed.reason if failed else str(cause),
            "details": failed.details if failed else "",
        }
        self._say(f"ended: {describe(self.found['failure'])}")

    def _write(self) -> None:
        self.found["summary"] = summarize(self.found["speed"])
        self.found["verdict"] = verdict(self.found)
        write_json(self.folder / "comparison.json", self.found)

    def _report(self) -> None:
        self._write()
        (self.folder / "comparison.txt").write_text(self.text() + "\n", encoding="utf-8")
        draw(self.found, self.folder)

    @contextmanager
    def _bar(self) -> Iterator[tqdm]:
        """One bar for all steps of all worlds."""
        config = next(iter(self.configs.values()))
        examples = examples_per_epoch(config, self.store)
        steps_per_epoch = -(-examples // config.train.batch_size)
        one_size = config.train.epochs * steps_per_epoch + self.extent.repeats * (
            self.extent.timing.total
        )
        total = one_size * len(self.configs) * len(self.extent.world_sizes)
        with tqdm(total=total, unit=" steps", disable=None if self.show else True) as bar:
            yield bar

    def _say(self, text: str) -> None:
        """A line on stderr, above the bar."""
        if self.show:
            tqdm.write(text, file=sys.stderr)

    def _check_gpus(self) -> None:
        most = max(self.extent.world_sizes)
        if self.device != "cpu" and most > torch.cuda.device_count():
            raise ConfigError(
                f"--world-sizes: {most} ranks need as many GPUs, and this host has "
                f"{torch.cuda.device_count()}; name fewer or set device cpu"
            )


def in_turn(names: list[str], repeat: int) -> list[str]:
    """Who is measured when: there and back, so that what slows down slows all of them."""
    return names if repeat % 2 == 0 else names[::-1]


def _check_regimes(configs: dict[str, Config]) -> None:
    for config in configs.values():
        if config.negatives.is_full:
            raise ConfigError(
                f"negatives.regime {config.negatives.regime}: compare takes apart how engines look "
                "entities up, and there is no lookup with all entities as candidates; use sampled "
                "or kvssample"
            )


class _Ended(Exception):
    """A rank failed; it is written down."""


def _empty_folder(config: Config) -> Path:
    """The folder that run.dir names, or runs/compare-TIME."""
    folder = Path(config.run.dir or f"runs/compare-{time.strftime('%Y%m%d-%H%M%S')}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"run.dir: {folder} is not empty; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _open_store(config: Config, folder: Path) -> TripleStore:
    """Prepared once, for all worlds."""
    alone = Processes(0, 1, 1, torch.device("cpu"))
    try:
        store = open_store(config.data, config.seed, folder / "store", alone, config.run.progress)
    except Exception:
        if not any(folder.iterdir()):
            folder.rmdir()
        raise
    if config.run.progress:
        for note in data_notes(config.data, store):
            print(f"note: {note}", file=sys.stderr)
    return store


def _ranks(world_size: int) -> str:
    return f"{world_size} rank{'' if world_size == 1 else 's'}"
