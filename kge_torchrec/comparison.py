"""``compare``: train several engines side by side, from the same values on the same batches.

For each world size all variants train in one world of processes. Every variant takes step i before
any takes step i + 1, so the distance between their parameters can be measured while they train.
Then each variant is measured in fresh worlds of its own, alternating, ``repeats`` times: speed,
memory, the parts of a step, and traffic. The folder run.dir then holds

    comparison.json  everything; rewritten after each measurement, "complete" at the end
    comparison.txt   tables
    store/           the prepared triples, unless data.path was a store
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kge_torchrec import files
from kge_torchrec.config import Config, ConfigError, NegativesConfig
from kge_torchrec.config.checks import at_least
from kge_torchrec.config.entities import VARIANTS, check_variants
from kge_torchrec.config.keys import replace_keys
from kge_torchrec.config.parser import AnyConfig, as_config
from kge_torchrec.data.report import notes
from kge_torchrec.distributed.processes import Processes
from kge_torchrec.distributed.worlds import RankFailed, run_world
from kge_torchrec.environment import cores, installed
from kge_torchrec.tables import Cell, table
from kge_torchrec.training.run_data import check_start, facts_of, open_store
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session
from kge_torchrec.training.speed import measure_speed
from kge_torchrec.training.start import begin
from kge_torchrec.training.step import PARTS
from kge_torchrec.training.trainer import NonFiniteLoss, Trainer

CHUNK_NUMBERS = 1 << 22  # elements of the table that are compared at once: 16 MiB of each
PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy", "numba")


def compare(
    config: AnyConfig = None,
    engines: Sequence[str] = ("torchrec", "handrolled"),
    world_sizes: Sequence[int] = (1,),
    repeats: int = 3,
    steps: int = 100,
) -> dict[str, Any]:
    """Train the same run with several engines, side by side, and measure them.

    It starts processes of its own, so scripts call it under ``if __name__ == "__main__"``. A rank
    that fails ends the comparison: "complete" is then False, and "failure" says why.

    Args:
        config: As for ``train``; run.dir gets the report.
        engines: Names of the variants; the others are compared with the first.
        world_sizes: Numbers of processes to compare with.
        repeats: Number of speed measurements per variant.
        steps: Number of steps per timed block.

    Returns:
        The content of comparison.json.

    Raises:
        ConfigError: The settings make no sense, or run.dir is not empty.
        DataError: The data is bad.
        KeyboardInterrupt: The user interrupted; the report has the measurements so far.
    """
    config = as_config(config)
    configs = variants(config, engines)
    if not world_sizes or min(world_sizes) < 1 or len(set(world_sizes)) < len(world_sizes):
        raise ConfigError(f"--world-sizes must be different integers >= 1, got {list(world_sizes)}")
    at_least("--repeats", repeats, 0)
    at_least("--steps", steps, 1)
    check_start(config, facts_of(config))
    on_cuda = config.device != "cpu" and torch.cuda.is_available()
    if on_cuda and max(world_sizes) > torch.cuda.device_count():
        raise ConfigError(
            f"--world-sizes: {max(world_sizes)} ranks need as many GPUs, and this host has "
            f"{torch.cuda.device_count()}; name fewer or set device cpu"
        )
    folder = Path(config.run.dir or f"runs/compare-{time.strftime('%Y%m%d-%H%M%S')}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"run.dir: {folder} is not empty; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        store = open_store(config, folder, progress=config.run.progress)
    except Exception:
        with suppress(OSError):  # it has files
            folder.rmdir()
        raise

    def show(text: str) -> None:
        if config.run.progress:
            print(text, file=sys.stderr)

    for note in notes(store):
        show(f"note: {note}")
    of_runs = {"data.path": str(store.path), "run.dir": str(folder), "run.progress": False}
    configs = {  # one batch size for all world sizes
        name: replace_keys(variant.settled(store.size, on_cuda), of_runs)
        for name, variant in configs.items()
    }
    content: dict[str, Any] = {
        "complete": False,
        "failure": None,
        "engines": list(configs),
        "settings": {"world_sizes": list(world_sizes), "repeats": repeats, "steps": steps},
        "config": configs[engines[0]].to_dict(),
        "entities": {name: asdict(variant.entities) for name, variant in configs.items()},
        "data": {
            "entities": store.num_entities,
            "relations": store.num_relations,
            "train": len(store.train),
        },
        "machine": {
            "cores": cores(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
            "packages": installed(PACKAGES),
        },
        "training": {},
        "speed": {},
        "summary": {},
    }
    device, where = config.device if on_cuda else "cpu", "the start"

    def write() -> None:
        content["summary"] = summary(content["speed"])
        files.write_json(folder / "comparison.json", files.finite(content))
        files.write_text(folder / "comparison.txt", text(files.finite(content)) + "\n")

    def train(size: int) -> None:
        file = folder / ".partial.json"
        try:
            run_world(size, device, train_side_by_side, configs, file)
        finally:  # a rank that fails leaves what was measured before
            if file.exists():
                content["training"][str(size)] = json.loads(file.read_text("utf-8"))
                file.unlink()

    def measure(size: int, name: str, repeat: int) -> None:
        ranks = run_world(size, device, measure_speed, configs[name], steps)
        rates = ranks[0]["triples_per_second"]
        speed = content["speed"].setdefault(str(size), {each: [] for each in configs})
        speed[name].append({"repeat": repeat, "triples_per_second": rates, "ranks": ranks})

    work: dict[str, Callable[[], None]] = {}
    for size in world_sizes:
        world = f"{size} rank{'s' * (size > 1)}"
        work[f"{world}, training side by side"] = partial(train, size)
        for repeat in range(repeats):
            # There and back, so that what slows down slows all of them.
            for name in engines if repeat % 2 == 0 else engines[::-1]:
                title = f"{world}, speed of {name}, repeat {repeat + 1} of {repeats}"
                work[title] = partial(measure, size, name, repeat)
    try:
        write()
        for where, act in work.items():
            show(where)
            act()
            write()
        content["complete"] = True
    except RankFailed as failed:
        content["failure"] = {"where": where, "rank": failed.rank, "reason": failed.reason,
                              "details": failed.details}  # fmt: skip
        show(f"ended: {where}: {failed}")
    except KeyboardInterrupt as error:
        content["failure"] = {"where": where, "rank": None, "reason": "it was interrupted"}
        with suppress(OSError):  # the caller has to see that it was interrupted
            write()
        raise KeyboardInterrupt(f"interrupted; the measurements so far are in {folder}") from error
    write()
    return content


def variants(config: Config, names: Sequence[str]) -> dict[str, Config]:
    """Return the config of each variant: ``config`` with its engine and preset.

    Raises:
        ConfigError: A name is unknown or there are too few, or another setting contradicts an
            engine; the message names the variant and the key.
    """
    check_variants(names)
    if config.train.schedule == "plateau":
        raise ConfigError(
            "train.schedule plateau follows validation, and a comparison validates at its end "
            "only; use constant, linear, cosine or exponential"
        )
    if config.entities.on_disk:
        raise ConfigError(
            "entities.placement disk: a comparison trains all variants in one folder, where they "
            "would overwrite each other's parts; set entities.placement to memory"
        )
    if config.negatives.is_full:
        raise ConfigError(
            f"negatives.regime {config.negatives.regime}: compare takes apart how engines look "
            "entities up, and there is no lookup with all entities as candidates; use sampled "
            "or kvssample"
        )
    configs = {}
    for name in names:
        engine, preset = VARIANTS[name]
        try:
            configs[name] = replace_keys(
                config, {"entities.engine": engine, "entities.preset": preset}
            )
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    return configs


# training side by side


def train_side_by_side(
    ranks: Processes, configs: dict[str, Config], partial: Path
) -> dict[str, Any]:
    """Train the variants for train.epochs epochs; 0 epochs compare their initial values only.

    Collective. Rank 0 writes the results to the file ``partial``, those so far every
    train.log_every steps.

    Returns:
        {"complete", "steps", "threads", "losses": {name: loss per step}, "differences": {name:
        [{"step", "entities", "dense"}]} from the first variant, "split": the split that was ranked
        at the end or None, "metrics": {name: as from Session.rank}}.

    Raises:
        NonFiniteLoss: A loss is not finite; the message names the variant.
    """
    train = next(iter(configs.values())).train
    sessions = {
        name: Session(config, RunFolder(str(config.run.dir)), ranks)
        for name, config in configs.items()
    }
    trainers = {name: Trainer(each, begin(each), None) for name, each in sessions.items()}
    first, *others = trainers
    per_epoch = trainers[first].batches.steps_per_epoch
    compared = set(measured_steps(train.epochs * per_epoch))
    results: dict[str, Any] = {
        "complete": False,
        "steps": 0,
        "threads": torch.get_num_threads(),
        "losses": {name: [] for name in trainers},
        "differences": {name: [] for name in others},
        "split": None,
        "metrics": {},
    }

    def measure(step: int) -> None:
        for name in others:
            apart = largest_differences(sessions[first], sessions[name])
            results["differences"][name].append({"step": step, **apart})

    def write() -> None:
        if ranks.is_first:
            files.write_json(partial, files.finite(results))

    measure(0)
    for epoch in range(train.epochs):
        streams = {name: trainer.batches.epoch(epoch) for name, trainer in trainers.items()}
        for trainer in trainers.values():
            trainer.progress.step = 0
        for step in range(1, per_epoch + 1):
            for name, trainer in trainers.items():
                trainer.train_step(streams[name])
            steps = epoch * per_epoch + step
            if steps in compared:
                measure(steps)
            if step % train.log_every == 0 or step == per_epoch:
                for name, trainer in trainers.items():
                    try:
                        results["losses"][name] += trainer.read_losses(epoch, step)
                    except NonFiniteLoss as error:
                        raise NonFiniteLoss(f"{name}: {error}") from None
                results["steps"] = steps
                write()
    store = sessions[first].store
    split = next((name for name in ("test", "valid") if len(store.split(name))), None)
    if train.epochs and split is not None:
        results["split"] = split
        results["metrics"] = {name: each.rank(split) for name, each in sessions.items()}
    results["complete"] = True
    write()
    return results


@torch.no_grad()
def largest_differences(one: Session, other: Session) -> dict[str, float]:
    """Return {"entities", "dense"}: the largest absolute difference between parameters. Collective.

    It is NaN where either has one. No rank holds more than a part of the table.
    """
    first, second = one.backend.shard(), other.backend.shard()
    device, entities = first.rows.device, torch.zeros((), device=first.rows.device)
    step = max(1, CHUNK_NUMBERS // first.dim)
    for start in range(0, first.num_entities, step):
        ids = torch.arange(start, min(start + step, first.num_entities), device=device)
        entities = torch.maximum(entities, _largest(first.fetch(ids), second.fetch(ids)))
    with one.trained_model() as ours, other.trained_model() as others:
        pairs = zip(ours.scorer.parameters(), others.scorer.parameters(), strict=True)
        dense = [_largest(mine, theirs) for mine, theirs in pairs if mine.numel()]
    largest = float(torch.stack(dense).max()) if dense else 0.0
    return {"entities": float(entities), "dense": largest}


def _largest(first: Tensor, other: Tensor) -> Tensor:
    return (first.float() - other.float()).abs().max()


def measured_steps(last: int) -> list[int]:
    """Return 0, 1, 2, 5, 10, 20, 50, ... and the last step."""
    steps = (digit * 10**power for power in range(len(str(last))) for digit in (1, 2, 5))
    return sorted({0, last, *(step for step in steps if step < last)})


# the report


def summary(speed: dict[str, dict[str, list[dict[str, Any]]]]) -> dict[str, dict[str, Any]]:
    """Return the figures of the tables by world size and variant; unmeasured ones are left out.

    The speed of a repeat is the median of its blocks. With one repeat, the spread is that of its
    blocks. A ratio is that of the medians, with the range over pairs of repeats.
    """
    results: dict[str, dict[str, Any]] = {}
    for size, by_name in speed.items():
        results[size], base = {}, dict[int, float]()
        for name, ours in ((name, ours) for name, ours in by_name.items() if ours):
            ranks = [rank for each in ours for rank in each["ranks"]]
            mine = {m["repeat"]: statistics.median(m["triples_per_second"]) for m in ours}
            base = base or mine
            rates = list(mine.values()) if len(ours) > 1 else ours[0]["triples_per_second"]
            ratio = statistics.median(mine.values()) / statistics.median(base.values())
            pairs = [mine[repeat] / base[repeat] for repeat in mine if repeat in base]
            on_device = [rank["peak_device_bytes"] for rank in ranks if "peak_device_bytes" in rank]
            splits = [_mean([rank["split"] for rank in each["ranks"]]) for each in ours]
            results[size][name] = {
                "triples_per_second": _spread(statistics.median(rates), rates),
                "ratio_to_first": _spread(ratio, [ratio, *pairs]),
                "peak_memory_bytes": max(rank["peak_memory_bytes"] for rank in ranks),
                "peak_device_bytes": max(on_device, default=None),
                "split_milliseconds": {
                    part: statistics.median(split[part] for split in splits) for part in PARTS
                },
                "traffic": _mean([rank["traffic"] for rank in ours[0]["ranks"]]),
            }
    return results


def _spread(median: float, values: list[float]) -> dict[str, float]:
    return {"median": median, "lowest": min(values), "highest": max(values)}


def _mean(values: list[Any]) -> Any:
    """Return the mean of numbers, or of dicts of them by key; a missing key counts as 0."""
    if isinstance(values[0], dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _mean([value.get(key, 0) for value in values]) for key in keys}
    return statistics.mean(values)


def text(content: dict[str, Any]) -> str:
    """Return the tables, then where and why the comparison ended if it is incomplete."""
    regime = content["config"]["negatives"]["regime"]
    rate = f"{NegativesConfig(regime=regime).examples}/s"
    trained, speed, split, traffic = (list[dict[str, Cell]]() for _ in range(4))
    for size, measured in content["training"].items():
        for name, losses in measured["losses"].items():
            metrics = measured["metrics"].get(name, {}).get("both", {}).get("realistic", {})
            last = (measured["differences"].get(name) or [{}])[-1]
            apart = [last.get("entities"), last.get("dense")]
            trained.append({
                "ranks": size, "variant": name, "steps": measured["steps"],
                "last loss": losses[-1] if losses else None,
                "MRR": metrics.get("mrr"), "hits@10": metrics.get("hits@10"),
                "difference": None if None in apart else max(apart),
            })  # fmt: skip
    for size, by_name in content["summary"].items():
        for name, figures in by_name.items():
            who, rates = {"ranks": size, "variant": name}, figures["triples_per_second"]
            speed.append({
                **who, rate: rates["median"], "lowest": rates["lowest"],
                "highest": rates["highest"], "ratio": figures["ratio_to_first"]["median"],
                "peak MiB": figures["peak_memory_bytes"],
            })  # fmt: skip
            if figures["peak_device_bytes"] is not None:
                speed[-1]["on GPU"] = figures["peak_device_bytes"]
            parts = figures["split_milliseconds"]
            split.append({**who, **parts, "all": sum(parts.values())})
            for kind, means in figures["traffic"].items():
                calls = ", ".join(f"{n:g} {call}" for call, n in means["collectives"].items())
                traffic.append({
                    **who, "ids": kind, "looked up": means["ids_looked_up"],
                    "rows sent": means["rows_sent"], "integers": means["integers_sent"],
                    "KiB sent": means["bytes_sent"] / 1024, "collectives": calls or "none",
                })  # fmt: skip
    whole = dict.fromkeys((rate, "lowest", "highest", "looked up", "rows sent", "integers"), ",.0f")
    shown: dict[str, Any] = {
        **whole, **dict.fromkeys((*PARTS, "all"), ".3g"), "last loss": ".4g",
        "difference": ".1e", "ratio": ".2f", "KiB sent": ",.1f",
        **dict.fromkeys(("peak MiB", "on GPU"), lambda peak: f"{peak / 2**20:,.0f}"),
    }  # fmt: skip
    tables = {
        "training, same start and batches; difference: the largest of a parameter from the first":
            trained,
        "speed, spread over the repeats": speed,
        "a step, part by part, ms": split,
        "traffic per step and rank, to other ranks; integers are ids and their counts": traffic,
    }  # fmt: skip
    said = [f"{title}\n{table(rows, shown=shown)}" for title, rows in tables.items() if rows]
    if (failure := content["failure"]) is not None:
        rank = "" if failure["rank"] is None else f"rank {failure['rank']} "
        said.append(f"incomplete: {failure['where']}: {rank}{failure['reason']}")
    return "\n\n".join(said)
