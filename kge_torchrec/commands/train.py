"""``train`` and ``extend``: start or resume a run, or add new triples to one, and print results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from kge_torchrec.commands import (
    ConfigName,
    File,
    Log,
    RunPath,
    Settings,
    config_of,
    follow_log,
    is_first_rank,
)
from kge_torchrec.commands.evaluate import (
    SIDES,
    evaluate,
    print_unbeaten,
    results_table,
    selection,
)
from kge_torchrec.config import ConfigError
from kge_torchrec.environment import loading_torch

if TYPE_CHECKING:
    from kge_torchrec.seeds import SeedRuns
    from kge_torchrec.trained_run import Run


def train(
    config: ConfigName | None = None,
    *,
    settings: Settings = (),
    seeds: Annotated[str | None, "N|N,N,..."] = None,
    resume: Annotated[str | None, "RUN"] = None,
    force: bool = False,
    ties: bool = False,
    log_format: Log = "text",
) -> int:
    """Train, rank the test triples with the best model, and write the folder of the run.

    evaluate, predict and export take this folder. --key.sub value changes a key of CONFIG, before
    or after it; `kge-torchrec list keys` says what they mean, and list configs has all configs.

    Examples:
      kge-torchrec train demo
      kge-torchrec train umls --data.path DIRECTORY --train.lr 0.05 --run.dir runs/mine
      kge-torchrec train runs/mine --seed 1                           a new run, the same config
      kge-torchrec train --resume runs/mine --train.epochs 200       the same run, longer
      kge-torchrec train umls --seeds 5 --run.dir runs/umls           a run per seed, 0 to 4
      torchrun --standalone --nproc_per_node=4 -m kge_torchrec train CONFIG

    Args:
        config: a YAML file, the name of a published one, or the folder of a run, whose
            config a new run takes
        seeds: train a run per seed into --run.dir: a number of seeds (from 0 on), or seeds such as
            0,1,2; the same command, or --resume with the folder, trains only what is missing
        resume: resume the run in this folder as if it had never stopped, on any number of ranks;
            --key.sub changes a key from now on. RUN as CONFIG starts another run instead
        force: start at epoch 1 if all checkpoints of RUN are missing
        ties: also show the optimistic and pessimistic ranks of equal scores
    """
    from kge_torchrec.config.parser import config_from_dict, load_config
    from kge_torchrec.seeds import is_seeds, resume_seeds, train_seeds

    settings = [*settings, *follow_log(log_format)]
    if resume is None:
        if force:
            raise ConfigError("--force resumes a run without checkpoints; give --resume RUN too")
        with loading_torch():  # some configs need it
            loaded = load_config(config, settings)
            from kge_torchrec import api

        if seeds is not None:
            if any(word.startswith("--seed=") for word in settings):
                raise ConfigError("seed: --seeds names the seeds; leave one of them out")
            return _report_seeds(train_seeds(loaded, seeds))
        return _report(api.train(loaded), ties)
    if seeds is not None:
        raise ConfigError("--seeds: the folder of --resume has its seeds; leave one of them out")
    if config is not None:
        raise ConfigError("train --resume takes the config of the run; leave CONFIG out")
    config_from_dict({}, settings)  # reject unknown keys before torch is loaded
    with loading_torch():
        several_seeds = is_seeds(resume)
        if not several_seeds:
            config_of(resume)
        from kge_torchrec import api

    if several_seeds:
        return _report_seeds(resume_seeds(resume, settings))
    return _report(api.resume(resume, settings, force=force), ties)


def _report_seeds(runs: SeedRuns) -> int:
    """Print mean and deviation of the results on test, on rank 0."""
    if all(results["test"] is not None for results in runs.results().values()):
        evaluate([str(runs.path)])
    if is_first_rank():
        print(f"\nrun folders: {runs.path}/seed-*")
    return 0


def _report(run: Run, ties: bool) -> int:
    """Print the results and the run folder, on rank 0; return 1 if its copy is not complete."""
    from kge_torchrec.ranking.ranks import ranked_among
    from kge_torchrec.training.copies import mark_of

    if not is_first_rank():
        return 0
    results = run.results
    if results["test"] is not None:
        test = results["test"]  # the table names the candidates if they are restricted
        among = "" if "candidates" in test else f", {ranked_among(test)}"
        print(f"\ntest{among}\n{results_table(test, ties=ties)}\n{selection(results)}")
        if "recommendation" in test:  # evaluation.metric is one of lists
            from kge_torchrec.ranking.recommendation import recommendation_table

            print(recommendation_table({key: x for key, x in test.items() if key not in SIDES}))
        print_unbeaten(test)
    train = results["train"]
    epochs = f"{train['epochs']} epoch{'s' * (train['epochs'] != 1)}"
    if (early := train.get("stopped_early")) is not None:
        print(f"\nstopped after epoch {early['epoch']} of {early['of']}: {early['reason']}")
    print(
        f"\ntrained {epochs} in {train['seconds']:.1f} s, "
        f"{train['triples_per_second']:,.0f} {run.config.negatives.examples}/s, "
        f"peak memory {train['peak_memory_bytes'] / 2**20:,.0f} MiB per rank\n"
        f"run folder: {run.path}"
    )
    url = run.config.checkpoint.options.copy_to
    if url is not None and not (problem := mark_of(run.path).get("problem")):
        print(f"copy of the run: {url}")
    return int(url is not None and bool(problem))


def extend(
    run: RunPath,
    triples: Annotated[Sequence[str], "NEW_TRIPLES"] = (),
    *,
    output: Annotated[str, "NEWRUN"],
    delete: File | None = None,
    epochs: int | None = None,
    freeze: bool = False,
    checkpoint: Annotated[str, "NAME"] = "best",
    allow_unseen_relations: bool = False,
    features: File | None = None,
    set: Annotated[Sequence[str], "KEY=VALUE"] = (),
    log_format: Log = "text",
) -> int:
    """Add triples, with new entities and relations, to a run.

    Args:
        run: the folder of a run; extend does not change it
        triples: a directory or files in a format of prepare; none with --delete
        delete: file with one entity per line: write a run without them, their rows and triples
        output: folder of the new run
        epochs: epochs to train (default: a tenth of the run's epochs; 0 with --delete)
        freeze: train only the rows of new entities and relations; all other rows stay unchanged
        checkpoint: checkpoint of RUN to start from: best, newest or a name
        allow_unseen_relations: accept new relations that occur in valid or test only
        features: lines entity, tab, feature, and perhaps a tab and a weight; entities that the file
            does not have keep their features
        set: another key of the config, such as train.lr=0.01; may be repeated
    """
    for setting in set:
        if setting.startswith("=") or "=" not in setting:
            raise ConfigError(f"--set {setting!r} must be KEY=VALUE, such as train.lr=0.01")
    if freeze and epochs == 0:
        raise ConfigError("--freeze says what is trained, and --epochs 0 trains nothing")
    with loading_torch():
        config_of(run)
        from kge_torchrec import growth

    made = growth.extend(
        run,
        triples[0] if len(triples) == 1 else triples or None,
        output,
        delete=delete,
        epochs=epochs,
        freeze=freeze,
        checkpoint=checkpoint,
        allow_unseen_relations=allow_unseen_relations,
        features=features,
        overrides=[*(f"--{setting}" for setting in set), *follow_log(log_format)],
    )
    if is_first_rank():
        _report_extension(made)
    return 0


def _report_extension(made: Run) -> None:
    results = made.results
    extended = results["extended"]
    if results["test"] is not None:
        print(f"\ntest\n{results_table(results['test'])}")
        print_unbeaten(results["test"])
    if "deleted" in extended:
        deleted = extended["deleted"]
        print(
            f"\ndeleted {deleted['entities']:,} entities and {deleted['triples']:,} triples; "
            f"{extended['from']} still has them\nrun folder: {made.path}"
        )
        return
    print(f"\nnew: {', '.join(f'{count:,} {what}' for what, count in extended['new'].items())}")
    train = results["train"]
    if train["epochs"]:
        epochs = f"{train['epochs']} epoch{'s' * (train['epochs'] != 1)}"
        print(f"trained {epochs} in {train['seconds']:.1f} s")
    print(f"run folder: {made.path}")
