"""Measure `prepare` against pyarrow's bare reading and numbering of the same file.

Writes a TSV of string triples whose entities follow Zipf's law. Then it runs both, alternating,
each time in a new process. Prints the medians, one figure per line: name, value, unit.

    python scripts/bench_prepare.py --triples 5_000_000 --repeats 5

With --memory it runs `prepare` only, within this bound.

    python scripts/bench_prepare.py --triples 100_000_000 --memory 4 --repeats 1
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

RELATIONS = 500
ROWS_AT_ONCE = 1_000_000


def zipf_ids(random: np.random.Generator, size: int, count: int) -> np.ndarray:
    """Return ids (count,) in [0, size) that follow Zipf's law; frequent ids are scattered."""
    ranks = np.minimum((size ** random.random(count)).astype(np.int64) - 1, size - 1)
    step = 2654435761 % size
    while np.gcd(step, size) != 1:
        step += 1
    return ranks * step % size


def write_tsv(path: Path, triples: int, entities: int) -> None:
    random = np.random.default_rng(0)
    options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    schema = pa.schema([(name, pa.string()) for name in "hrt"])
    with csv.CSVWriter(path, schema, write_options=options) as writer:
        for start in range(0, triples, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, triples - start)
            columns = [
                labels(prefix, zipf_ids(random, size, count))
                for prefix, size in (("Q", entities), ("P", RELATIONS), ("Q", entities))
            ]
            writer.write_table(pa.table(columns, schema))


def labels(prefix: str, ids: np.ndarray) -> pa.Array:
    digits = pa.array(ids * 7 + 13).cast(pa.string())
    return pc.binary_join_element_wise(prefix, digits, "")


def bare(source: Path, _: Path) -> None:
    """Read the file into memory and number entities and relations, without writing."""
    table = csv.read_csv(
        source,
        read_options=csv.ReadOptions(column_names=["h", "r", "t"]),
        parse_options=csv.ParseOptions(delimiter="\t", quote_char=False),
    )
    ends = pa.chunked_array(table["h"].chunks + table["t"].chunks)
    ends.dictionary_encode().combine_chunks()
    table["r"].dictionary_encode()


def prepared(source: Path, output: Path, memory: float | None = None) -> None:
    from kge_torchrec.data.prepare import prepare

    prepare(source, output, overwrite=True, progress=False, memory=memory)


TASKS = {"bare": bare, "prepare": prepared}


def run_here(task: str, source: Path, output: Path, memory: float | None) -> None:
    start = time.perf_counter()
    if memory is None:
        TASKS[task](source, output)
    else:
        prepared(source, output, memory)
    seconds = time.perf_counter() - start
    print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def command_of(task: str, source: Path, output: Path, memory: float | None) -> list[str]:
    bound = [] if memory is None else ["--memory", str(memory)]
    return [sys.executable, __file__, *bound, "--task", task, str(source), str(output)]


def run_apart(
    task: str, source: Path, output: Path, memory: float | None = None
) -> tuple[float, float]:
    """Return seconds (without Python's start) and peak bytes of a run in a new process."""
    command = command_of(task, source, output, memory)
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, peak = map(float, result.stdout.split())
    return seconds, peak


def benchmark(options: argparse.Namespace) -> None:
    triples, memory = options.triples, options.memory
    tasks = TASKS if memory is None else ["prepare"]
    directory = options.directory
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        source, output = Path(temporary, "triples.tsv"), Path(temporary, "store")
        write_tsv(source, triples, options.entities or triples)
        print(f"file {source.stat().st_size / 1e6:.0f} MB")
        runs = {task: [] for task in tasks}
        for _ in range(options.repeats):
            for task in tasks:
                runs[task].append(run_apart(task, source, output, memory))
        store = sum(file.stat().st_size for file in output.iterdir())
        print(f"store {store / 1e6:.0f} MB")
    median = {}
    for task, results in runs.items():
        seconds, peaks = zip(*results, strict=True)
        median[task] = statistics.median(seconds)
        print(f"{task}_time {median[task]:.2f} s")
        print(f"{task}_time_best {min(seconds):.2f} s")
        print(f"{task}_rate {triples / median[task] / 1e6:.2f} Mtriples/s")
        print(f"{task}_peak_memory {max(peaks) / 1e9:.2f} GB")
    if memory is not None:
        return
    ratios = [p[0] / b[0] for b, p in zip(runs["bare"], runs["prepare"], strict=True)]
    print(f"ratio {median['prepare'] / median['bare']:.2f} times")
    print(f"ratio_of_pairs {statistics.median(ratios):.2f} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--triples", type=int, default=5_000_000)
    parser.add_argument("--entities", type=int, help="default: the number of triples")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", help="folder for the files, about 80 bytes per triple")
    parser.add_argument("--memory", type=float, help="bound of memory in GiB, for large graphs")
    parser.add_argument("--task", nargs=3, metavar=("TASK", "SOURCE", "OUTPUT"),
                        help=argparse.SUPPRESS)  # fmt: skip
    arguments = parser.parse_args()
    if arguments.task:
        task, source, output = arguments.task
        run_here(task, Path(source), Path(output), arguments.memory)
    else:
        benchmark(arguments)


if __name__ == "__main__":
    main()
