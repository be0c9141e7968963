"""``compare``: train several engines side by side, from the same values on the same batches.

For each world size all variants train in one world of processes. Every variant takes step i before
any takes step i + 1, so the distance between their parameters can be measured while they train.
Then each variant is measured in fresh worlds of its own, alternating, ``repeats`` times: speed,
memory, the parts of a step, and traffic. The folder run.dir then holds comparison.json, which is
rewritten after each measurement, and store/, unless data.path was a store.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
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
from kge_torchrec.distributed.worlds import run_world
from kge_torchrec.environment import cores, installed
from kge_torchrec.tables import Cell, table
from kge_torchrec.training.run_data import check_start, open_store
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

    It starts processes of its own, so scripts call it under ``if __name__ == "__main__"``.

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
        RankFailed: A rank failed; comparison.json has what was measured before.
    """
    config = as_config(config)
    configs = variants(config, engines)
    if not world_sizes or min(world_sizes) < 1 or len(set(world_sizes)) < len(world_sizes):
        raise ConfigError(f"--world-sizes must be different integers >= 1, got {list(world_sizes)}")
    at_least("--repeats", repeats, 0)
    at_least("--steps", steps, 1)
    check_start(config)
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
        "settings": {"world_sizes": list(world_sizes), "repeats": repeats, "steps": steps},
        "config": configs[engines[0]].to_dict(),
        "entities": {name: asdict(variant.entities) for name, variant in configs.items()},
        "machine": {
            "cores": cores(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
            "packages": installed(PACKAGES),
        },
        "training": {},
        "speed": {},
    }
    device = config.device if on_cuda else "cpu"

    def write() -> None:
        files.write_json(folder / "comparison.json", files.finite(content))

    for size in world_sizes:
        world = f"{size} rank{'s' * (size > 1)}"
        show(f"{world}, training side by side")
        trained = run_world(size, device, train_side_by_side, configs)[0]
        content["training"][str(size)] = trained
        speed: dict[str, list[Any]] = {name: [] for name in engines}
        content["speed"][str(size)] = speed
        write()
        for repeat in range(repeats):
            # There and back, so that what slows down slows all of them.
            for name in engines if repeat % 2 == 0 else engines[::-1]:
                show(f"{world}, speed of {name}, repeat {repeat + 1} of {repeats}")
                speed[name].append(run_world(size, device, measure_speed, configs[name], steps))
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


def train_side_by_side(ranks: Processes, configs: dict[str, Config]) -> dict[str, Any]:
    """Train the variants for train.epochs epochs; 0 epochs compare their initial values only.

    Collective.

    Returns:
        {"steps", "losses": {name: loss per step}, "differences": {name: [{"step", "entities",
        "dense"}]} from the first variant, "split": the split that was ranked at the end or None,
        "metrics": {name: as from Session.rank}}.

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
    losses: dict[str, list[float]] = {name: [] for name in trainers}
    differences: dict[str, list[dict[str, float]]] = {name: [] for name in others}

    def measure(step: int) -> None:
        for name in others:
            apart = largest_differences(sessions[first], sessions[name])
            differences[name].append({"step": step, **apart})

    measure(0)
    for epoch in range(train.epochs):
        streams = {name: trainer.batches.epoch(epoch) for name, trainer in trainers.items()}
        for trainer in trainers.values():
            trainer.progress.step = 0
        for step in range(1, per_epoch + 1):
            for name, trainer in trainers.items():
                trainer.train_step(streams[name])
            if epoch * per_epoch + step in compared:
                measure(epoch * per_epoch + step)
            if step % train.log_every == 0 or step == per_epoch:
                for name, trainer in trainers.items():
                    try:
                        losses[name] += trainer.read_losses(epoch, step)
                    except NonFiniteLoss as error:
                        raise NonFiniteLoss(f"{name}: {error}") from None
    store = sessions[first].store
    split = next((name for name in ("test", "valid") if len(store.split(name))), None)
    split = split if train.epochs else None
    return {
        "steps": train.epochs * per_epoch,
        "losses": losses,
        "differences": differences,
        "split": split,
        "metrics": {name: each.rank(split) for name, each in sessions.items()} if split else {},
    }


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


def text(content: dict[str, Any]) -> str:
    """Return the tables.

    The speed of a repeat is the median of its blocks. With one repeat, the spread is that of its
    blocks. A ratio is that of the medians.
    """
    regime = content["config"]["negatives"]["regime"]
    rate = f"{NegativesConfig(regime=regime).examples}/s"
    trained, speed, split, traffic = (list[dict[str, Cell]]() for _ in range(4))
    kinds = dict[str, str]()
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
        base = None
        for name, repeats in content["speed"][size].items():
            if not repeats:
                continue
            who: dict[str, Cell] = {"ranks": size, "variant": name}
            ranks = [rank for repeat in repeats for rank in repeat]
            rates = [statistics.median(repeat[0]["triples_per_second"]) for repeat in repeats]
            median, base = statistics.median(rates), base or statistics.median(rates)
            spread = rates if len(rates) > 1 else ranks[0]["triples_per_second"]
            speed.append({
                **who, rate: median, "lowest": min(spread), "highest": max(spread),
                "ratio": median / base, "peak MiB": max(x["peak_memory_bytes"] for x in ranks),
            })  # fmt: skip
            if "peak_device_bytes" in ranks[0]:
                speed[-1]["on GPU"] = max(rank["peak_device_bytes"] for rank in ranks)
            parts = {part: statistics.median(x["split"][part] for x in ranks) for part in PARTS}
            split.append({**who, **parts, "all": sum(parts.values())})
            sent = [rank["traffic"] for rank in repeats[0]]
            calls = sent[0]["collectives"].items()
            traffic.append({
                **who, "looked up": statistics.mean(x["rows_looked_up"] for x in sent),
                **{f"{kind} KiB": statistics.mean(x["sent"][kind] for x in sent) / 1024
                   for kind in sent[0]["sent"]},
                "collectives": ", ".join(f"{n:g} {kind}" for kind, n in calls) or "none",
            })  # fmt: skip
            kinds = dict.fromkeys((f"{kind} KiB" for kind in sent[0]["sent"]), ",.1f")
    whole = dict.fromkeys((rate, "lowest", "highest", "looked up"), ",.0f")
    shown: dict[str, Any] = {
        **whole, **dict.fromkeys((*PARTS, "all"), ".3g"), "last loss": ".4g",
        "difference": ".1e", "ratio": ".2f", **kinds,
        **dict.fromkeys(("peak MiB", "on GPU"), lambda peak: f"{peak / 2**20:,.0f}"),
    }  # fmt: skip
    tables = {
        "training, same start and batches; difference: the largest of a parameter from the first":
            trained,
        "speed, spread over the repeats": speed,
        "a step, part by part, ms": split,
        "traffic per step and rank, to other ranks; collectives of the first rank": traffic,
    }  # fmt: skip
    return "\n\n".join(
        f"{title}\n{table(rows, shown=shown)}" for title, rows in tables.items() if rows
    )
