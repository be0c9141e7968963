"""Deliberate faults: each is put into a copy of the package, and the tests named have to fail.

    make mutations                           all of them
    python scripts/faults.py --sample 20     those that today's date chooses
    python scripts/faults.py --only split    those whose file, text or test has this word
    python scripts/faults.py --unchanged     the tests named, without a fault: all have to pass

A heading of the table names a file of the package and tests. A line is ``text => replacement``; the
text occurs once in the file. Tests after ``@@`` are for this line only.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import queue
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COPIED = "kge_torchrec", "tests", "configs", "docs", "scripts", "pyproject.toml"
SECONDS = 150  # for the tests of a fault; a test that then still waits has not noticed it

# Of examples that fail, hypothesis looks for the smallest, for minutes.
WITHOUT_SHRINKING = """
phases = hypothesis.Phase.explicit, hypothesis.Phase.generate
hypothesis.settings.register_profile("one", max_examples=25, deadline=None, phases=phases)
hypothesis.settings.load_profile("one")
"""
_SECONDS = itertools.count(10**9)

TABLE = r"""
# data
[data/split.py: data/test_split.py -k "not large and not memory"]
own > ordered[lasts[1]] => own >= ordered[lasts[1]]
room = np.maximum(counts - 1, 0) => room = counts
np.minimum(wanted[0], room - test) => np.minimum(wanted[0], room)
own = (left <= both[heads]).astype(np.int8) => own = (left < both[heads]).astype(np.int8)
number < bounds[0], 1, np.where(number < bounds[1], 2, 0) => number < bounds[0], 2, np.where(number < bounds[1], 1, 0) @@ data/test_prepare.py -k "one_file or every_entity"
split_of[of[of < total]] = _MUST_TRAIN => split_of[of[of < total][1:]] = _MUST_TRAIN @@ data/test_prepare.py -k "one_file or every_entity"
np.floor(ends * share + 0.5) => np.floor(ends * share)
[data/readers/text_rows.py: data/test_readers.py data/test_mutilated_files.py]
number += gap <= number => number += gap < number
number += lines.count(b"\n", 0, error.start) => number = 1 + lines.count(b"\n", 0, error.start)
[data/readers/rdf.py: data/test_rdf.py]
is_literal[is_literal] = _as => _ = _as
special != 2 * np.count_nonzero(_as_numpy(iris)) => special != 2 * pc.sum(iris).as_py()
[data/readers/lists.py: data/test_forms.py]
known.null_count * 2 <= len(ids) => True
[data/readers/columns.py: data/test_forms.py]
found.pop(WEIGHT, None) => pass
[data/readers/where.py: data/test_forms.py]
isinstance(op, ast.And) else pc.or_kleene => True else pc.or_kleene
[data/leaks.py: reports/test_data_check.py]
once = codes // 2 <= others // 2 => once = codes <= others
[data/type_sources.py: data/test_types.py]
if is_whole or self._source.is_described else => if is_whole else
[data/negatives.py: data/test_negatives.py]
return facts if others is None else facts | others => return facts
(chunks.numbers * self.num_entities).long() => (chunks.numbers * (self.num_entities - 1)).long()
counter = np.array([chunks.start * blocks, step, SIDES.index(side), 0], np.uint64) => counter = np.array([chunks.start * blocks, step, 0, 0], np.uint64)
chunks.start * blocks, step, => chunks.start, step,
(chunks.numbers * self._total).long(), right=True => (chunks.numbers * self._total).long(), right=False
others = chunks.triples.shape[1] - 1 => others = chunks.triples.shape[1] @@ data/test_batches.py training/test_recommender_parts.py
other = (answers != relations) => other = (answers == relations) @@ training/test_exact.py -k "weighted and bpr"
anchor = head if chunks.side == "tail" else tail => anchor = tail if chunks.side == "tail" else head @@ data/test_batches.py
spawn_key=(epoch, _STREAM) => spawn_key=(_STREAM,)
rest -= place => rest = chunks.numbers[:, :typed].clone()
queries = store.side_index("train", OTHER[side]).queries => queries = store.side_index("train", side).queries
triples[:, answer_column(side)]) => triples[:, 2])
[data/store/filter_index.py: data/test_known.py]
return self.starts[place], self.starts[place + is_known] => return self.starts[place], self.starts[np.minimum(place + 1, len(self.starts) - 1)]
anchor = TAIL - answer_column(side) => anchor = answer_column(side)
low, last = np.array([first, stop - 1], values.dtype) => low, last = np.array([first, stop], values.dtype)
[data/parts.py: data/test_parts.py]
return rank * self.buffer_rows + place[part] * self.part_rows + row => return rank * self.buffer_rows + part * self.part_rows + row
return head * self.parts + tail => return head + tail
first = rank * self.rank_rows + part * self.part_rows => first = part * self.rank_rows + rank * self.part_rows
unmet[:places, :places] = False => unmet[:places] = False
[data/batches/triples.py: data/test_batches.py]
weight = inside.astype(np.float32) * (world / size) => weight = inside.astype(np.float32) / size
start, stop = size * number // count, size * (number + 1) // count => start, stop = size // count * number, size // count * (number + 1)
[data/batches/queries.py: data/test_batches.py]
weight=1 / (size * count * self._mean_weight) => weight=1 / (size * self._mean_weight)
lag = self.examples * np.arange(count)[:, None] // count => lag = 0 * np.arange(count)[:, None]
numbers = numbers - count => pass
place = random.choice(count, limit, replace=False) => place = random.choice(count, limit)
weight=torch.tensor(world / size) => weight=torch.tensor(1 / size)
[data/batches/__init__.py: data/test_batches.py]
return -(-self.examples // self.plan.batch_size) => return self.examples // self.plan.batch_size
return EpochShuffle(self.examples, self.plan.seed, epoch) => return EpochShuffle(self.examples, self.plan.seed, 0)
parts = range(first_step * count, => parts = range(first_step, @@ data/test_batches.py training/test_accumulation.py
[data/shuffle.py: data/test_order.py]
kept += block[place] >= size => kept += block[place] > size
# training
[training/schedules.py: training/test_schedule.py]
0.5 * (1 + math.cos(math.pi * min(1.0, done))) => math.cos(math.pi / 2 * min(1.0, done))
return (step + 1) / self.warmup_steps => return step / self.warmup_steps
done = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps) => done = step / max(1, self.total_steps)
return self.options.decay**epoch => return self.options.decay ** (epoch + 1)
[training/averaging.py: training/test_averaging.py]
(1 + self.count) / (10 + self.count) => 1 / (10 + self.count) @@ training/test_averaging.py -k oracle
one.copy_(other) => other.copy_(one) @@ training/test_averaging.py -k every_use
[training/state.py: training/test_schedule.py -k "progress or better"]
return value < best * (1 - threshold) => return value < best * (1 + threshold)
self.plateau_best, self.plateau_wait = value, 0 => self.plateau_wait = 0
[training/checkpoint_files.py: training/test_checkpoints.py -k "damage_is_named or any_program"]
p[1] + p[2] > wanted.start => p[1] >= wanted.start @@ training/test_resume.py training/test_moved_runs.py
self.read(rows.name, piece), piece[1] - rows.first => self.read(rows.name, piece), piece[1] @@ training/test_resume.py training/test_moved_runs.py
if expected != _checksum(manifest): => if False:
zlib.crc32(bytes_of(rows)) != checksum => False
[training/step.py: training/test_exact.py]
factor = 1 / scale.value => factor = 1.0 @@ training/test_precision.py -k lower_precision
(norm + 1e-6)).clamp(max=1.0) => (norm + 1e-6)) @@ training/test_exact.py -k norm
overflow = not reduced(finite, dist.ReduceOp.MIN) => overflow = not finite @@ training/test_precision.py -k overflow_skips
gradient.clamp_(-bounds.value, bounds.value) => gradient.clamp_(max=bounds.value) @@ training/test_exact.py -k value
with self.backend.dense.without_exchange(): => if True: @@ training/test_accumulation.py -k reduced_once
return torch.linalg.vector_norm(gradient).square() => return torch.linalg.vector_norm(gradient) @@ training/test_exact.py -k norm
[training/trainer.py: training/test_engines.py -k middle]
progress.epoch_loss += sum(losses) => progress.epoch_loss += losses[-1] @@ training/test_messages.py -k mean_of_its_steps
_DROPOUT, progress.global_step, rank) => _DROPOUT, progress.step, rank) @@ training/test_dropout_of_runs.py
batches = self.batches.epoch(progress.epoch, progress.step) => batches = self.batches.epoch(progress.epoch)
progress.bad_validations = 0 if better else progress.bad_validations + 1 => progress.bad_validations = progress.bad_validations + 1 @@ training/test_schedule.py -k stops_early
> options.patience: => >= options.patience: @@ training/test_schedule.py -k plateau
step = last_step - losses.shape[1] + column + 1 => step = last_step - losses.shape[1] + column @@ training/test_checkpoints.py -k infinite_loss
return losses.mean(0).tolist() => return losses[0].tolist() @@ training/test_exact.py -k norm
[training/checkpoints.py: training/test_checkpoints.py -k kept]
name not in (*until_now[-self.keep :], best, *self.held()) => name not in (*until_now[-self.keep :], *self.held())
if self.data and checkpoint.progress.data != self.data: => if False: @@ training/test_checkpoints.py -k changed
[training/full_candidates.py: training/test_exact.py -k 1vsall]
scaled = losses.sum() * self.weight + self.own_terms * self.world => scaled = losses.sum() * self.weight + self.own_terms
dist.all_gather(list(all_statistics.unbind()), sent) => all_statistics[:] = sent
range(self.rank * size, count, self.world * size) => range(0, count, size)
# models
[models/model.py: training/test_exact.py -k "softmax or ivr"]
regularizers.of_entities(self.scorer, x) for x in end_rows] => regularizers.of_entities(self.scorer, end_rows[0]) for x in end_rows]
[models/losses.py: models/test_losses.py]
relu(self.options.margin - positive[:, None] + negative) => relu(self.options.margin + positive[:, None] - negative)
softplus(negative - positive[:, None]) => softplus(positive[:, None] - negative)
logsigmoid(-margin - negative) => logsigmoid(margin - negative)
self.options.temperature * negative.detach() => negative.detach()
(mask.sum(1) + answers) => mask.sum(1)
total + (smooth - low) * positives => total + smooth * positives
counts.clamp(min=1) => counts
[models/over_all.py: models/test_losses.py]
.clamp(max=label_smoothing) => .clamp(max=1.0)
return answers.share * (1 - of_answer), share / self.num_entities => return answers.share, share / self.num_entities
answer_part -= target => answer_part += target
[models/regularizers.py: models/test_regularizers.py]
own = part.weight if part.relation_weight is None else part.relation_weight => own = part.weight
scorer.query(y, rows, OTHER[side]), x => scorer.query(y, rows, side), x
(x * y + y * z + z * x) => (x * y + y * z)
[models/scorers/bilinear.py: models/test_scorers.py]
times(anchor, relation, conjugate=side == "head") => times(anchor, relation)
parts = as_tail * forth, as_head * back => parts = as_head * forth, as_tail * back
return (matrix @ anchor[..., None])[..., 0] => return (matrix.mT @ anchor[..., None])[..., 0]
[models/scorers/rotational.py: models/test_scorers.py]
return rotated(anchor, relation if side == "tail" else -relation) => return rotated(anchor, relation)
return rotated(anchor - shift, -phase) => return rotated(anchor, -phase) - shift
# ranking
[ranking/ranks.py: ranking/test_exact.py ranking/test_metrics.py]
return (self.optimistic[side] + self.pessimistic[side]) / 2 => return self.optimistic[side].astype(np.float64)
scores.shard.num_entities, 1 + counts.better) => scores.shard.num_entities, counts.better) @@ ranking/test_exact.py
(ranks <= k).mean() => (ranks < k).mean()
[ranking/search.py: ranking/test_exact.py ranking/test_topk.py]
posinf=highest, neginf=-torch.inf => posinf=torch.inf, neginf=-torch.inf
ID_LIMIT - (first + column) => ID_LIMIT - column
bits ^ 0x7FFFFFFF, bits => bits, bits
return (0, 2) if side == "tail" else (2, 0) => return (0, 2)
[ranking/candidates.py: ranking/test_candidates.py]
low, high = np.searchsorted(allowed, (relation * size, (relation + 1) * size)) => low, high = np.searchsorted(allowed, (relation * size, len(allowed)))
found[row, (keys[place] & 0xFFFFFFFF) - first] = counts[place] => found[row, (keys[place] & 0xFFFFFFFF) % (stop - first)] = counts[place]
[answers/queries.py: serving/test_answers.py]
np.full(len(queries), len(ids)) => np.zeros(len(queries), np.int64) @@ serving/test_answers.py -k stock
for split, index in reversed(model.known_by_split().items()): => for split, index in model.known_by_split().items(): @@ answers/test_predictions.py answers/test_links.py
order = np.lexsort((pairs, -scores))[:k] => order = np.lexsort((pairs, scores))[:k] @@ answers/test_predictions.py answers/test_links.py
some = [only.contain("head", => some = [only.contain("tail", @@ answers/test_predictions.py answers/test_links.py
similarity, itself = EntitySimilarity(model.scorer), Answers.single(entities.numpy()) => similarity, itself = EntitySimilarity(model.scorer), None @@ answers/test_nearest.py
[answers/calibration.py: answers/test_calibration.py]
return Curve(slope=slope, intercept=float(line.intercept_[0]) - slope * centre) => return Curve(slope=slope, intercept=float(line.intercept_[0]) + slope * centre)
gain.sum() > np.sqrt((gain**2).sum()) => gain.sum() > -1e9
np.abs(gaps).sum() / len(labels) => np.abs(gaps).sum() / BINS
[answers/fold_in.py: answers/test_fold_in.py]
np.where(own.triples < 0, count + number, own.triples) => np.where(own.triples < 0, count, own.triples)
mask = np.stack([~np.isin(ids, answers[relations == one]) for one in distinct]) => mask = np.stack([np.isin(ids, answers) | True for one in distinct])
places - (bounds - sizes)[run], total => places - bounds[run] + sizes[0], total
[ranking/neighbors.py: ranking/test_baselines.py]
sums[query, listed[place] - first] += cosines[place] => sums[query, listed[place] - first] = cosines[place] @@ ranking/test_baselines.py -k loops
[ranking/recommendation.py: ranking/test_recommendation.py]
position = np.arange(len(user)) - np.repeat(starts, counts) + 1 => position = np.arange(len(user)) - np.repeat(starts, counts)
counts.better + counts.equal / 2 => counts.better
"precision": hits / k => "precision": hits / np.minimum(counts, k)
# embeddings
[embeddings/optimizers.py: embeddings/test_table_rows.py -k formula]
1 - _single(beta2, step) => 1 - _single(beta2, step + 1)
grad = grad + rows * self.weight_decay => grad = grad + self.weight_decay
grad / (total + self.eps).sqrt_() => grad / (total.sqrt() + self.eps)
[embeddings/shard.py: embeddings/test_sharded_table.py]
low = min(max(self.ids.start, start), stop) => low = min(self.ids.start, stop) @@ training/test_tables.py
gradients = gradients.without(self.frozen) => pass @@ training/test_exact.py -k frozen
[embeddings/init.py: embeddings/test_initialize.py]
seeds = np.random.SeedSequence((seed, _STREAM, chunk)) => seeds = np.random.SeedSequence((seed, _STREAM))
target.copy_(torch.from_numpy(values[low - begin :])) => target.copy_(torch.from_numpy(values[: high - low]))
out *= np.float32(2 * bound) => out *= np.float32(bound)
[embeddings/row_gradients.py: embeddings/test_shard.py embeddings/test_table_rows.py]
kept = (~frozen[self.ids]).nonzero().squeeze(1) => kept = frozen[self.ids].nonzero().squeeze(1) @@ training/test_exact.py -k frozen
RowGradients(own - part.start, total, => RowGradients(own, total,
total = total / occurrences.unsqueeze(1) => pass
[embeddings/handrolled.py: embeddings/test_sharded_table.py]
arrived.div_(ranks) => pass
requests[:, 0] -= table.first_row => requests[:, 0] %= len(table.rows)
[embeddings/exchange.py: embeddings/test_exchange.py]
rows = rows * GRADIENT_SCALE => pass
rows = rows.clamp(-_LARGEST, _LARGEST) => pass
# kernels
[kernels/rows.py: embeddings/test_table_rows.py -k "formula or random_ids"]
count = bounds.size - 1 => count = bounds.size - 2
1.0 / max(correction2, 1e-38), => 1.0 / max(correction1, 1e-38),
total += g[d] * g[d] => total += abs(g[d])
total[:] = np.float32(0) => pass
bounds[count] = places.shape[0] => bounds[count] = places.shape[0] - 1
# kernels
[kernels/scores.py: kernels/test_operators.py]
small = (normalizer - whole).float() => small = (normalizer - normalizer).float()
return _LEAST => return _F(0)
below += row[j] < threshold => below += row[j] <= threshold @@ ranking/test_counting.py
(_F(1) if score >= 0 else small) / (_F(1) + small) => _F(1) / (_F(1) + small)
return gradients.mul_(grad.unsqueeze(-1)), None, None => return gradients, None, None
up = (bits + np.int32(0x7FFF) + even) >> np.int32(16) => up = bits >> np.int32(16)
for j in range(whole, size): => for j in range(whole, size - 1):
[kernels/side_rows.py: models/test_objective.py]
return used, sums.index_select(0, used).to(weight.dtype) => return used, torch.ones_like(sums.index_select(0, used)).to(weight.dtype)
sums.index_add_(0, places, grad) => sums.index_copy_(0, places, grad)
weights = weight.flatten().repeat(2) => weights = weight.flatten().repeat_interleave(2)
ids, direct = scorer.direct(relation.reshape(-1), side) => ids, direct = relation.reshape(-1), side
[kernels/dropout.py: kernels/test_operators.py models/test_objective.py]
drawn >= threshold => drawn < threshold
np.float32(1 / (1 - share)) => np.float32(1)
return dropped(grad, ctx.share, ctx.key), None, None => return dropped(grad, ctx.share, ctx.key + 1), None, None
[kernels/ids.py: kernels/test_operators.py]
while shift < 64 and largest >> shift: => while shift < 16: @@ data/test_batches.py -k distinct
if low < 0 or high >= count: => if low < 0 or high > count: @@ kernels/test_operators.py -k outside
# distributed
[distributed/processes.py: distributed/test_processes.py -k "small_values or split_over"]
dist.all_reduce(maxima, op=dist.ReduceOp.MAX) => dist.all_reduce(maxima, op=dist.ReduceOp.SUM)
size = -(-count // ranks) => size = count // ranks
error = error or remote_error => pass @@ training/test_ranks_agree.py -k errors
(any_failed,) = processes.largest([error is not None]) => any_failed = error is not None @@ training/test_ranks_agree.py -k callback
[distributed/dense.py: distributed/test_dense.py]
part[rows] = numbers => pass @@ growth/test_extend.py -k frozen
dist.all_reduce(sums, group=self.mesh.get_group("shard")) => pass @@ training/test_exact.py -k fsdp
for parameter, values in zip(parameters, before, strict=True): => for parameter, values in zip(parameters, parameters, strict=True): @@ distributed/test_dense.py -k without_a_step
dist.all_reduce(flat) => pass @@ training/test_exact.py -k 1vsall
# config
[config/parser.py: test_config.py test_keys.py]
self.values[key] = deepcopy(value) if isinstance(value, dict) else value => self.values.setdefault(key, deepcopy(value) if isinstance(value, dict) else value)
counted = {*given} if "default" in from_file else {*given, *from_file} => counted = {*given, *from_file} @@ tuning/test_race.py -k at_its_default
while name and name not in self.places: => while False:
[config/yaml_file.py: test_config.py]
if name in lines: => if False:
[config/rules.py: test_config.py test_bad_input.py test_keys.py]
(places.buffer > places.parts, => (places.buffer < 0, @@ training/test_refused.py
(negatives.in_batch and negatives.chunk_size == 1, => (negatives.in_batch and negatives.chunk_size == 0, @@ training/test_refused.py
unused = "tail queries use the relations themselves" => pass
[config/checks.py: test_config.py test_errors.py]
"in [0, 1)", lambda share: 0 <= share < 1 => "in [0, 1)", lambda share: 0 <= share <= 1 @@ test_config.py -k wrong_value
# planning, tuning, comparison
[planning/step.py: planning/test_traffic.py planning/test_costs.py]
return 2 * (count - 1) / count * size => return (count - 1) / count * size
float(travel_bytes(dtype, ids, remote * dim)) => 4.0 * remote * dim
served = share * plan.served => served = plan.served @@ planning/test_traffic.py -k its_optimizer
[planning/plan.py: planning/test_plans.py planning/test_table_memory.py]
per_element = 4 * (2 + dense_state_numbers(train.optimizer) + train.averages) => per_element = 4 * (2 + train.averages)
return triples + sides * index + ranked => return triples + index + ranked
[planning/sizes.py: planning/test_sizes.py]
absent = absent + negatives * np.log1p(-drawn) => absent = absent - negatives * drawn**2
[comparison.py: comparison/test_measurements.py]
return sorted({0, last, *(step for step in steps if step < last)}) => return sorted({0, *(step for step in steps if step <= last)})
"ratio": median / base => "ratio": base / median @@ comparison/test_compare.py -k tables
[seeds.py: test_seeds.py]
values = [after - before => values = [before - after
t = difference / (deviation / math.sqrt(len(common))) => t = difference / deviation
api.train(replace(own, seed=seed, run=run), callbacks) => api.train(replace(own, run=run), callbacks)
[tuning/space.py: tuning/test_space.py]
if other in later: => if False:
[trained_run.py: answers/test_calibration.py -k another_step]
saved.is_of(self._step, self._store.fingerprint) => True
[export/write.py: export/test_export.py -k any_number]
shard.fetch(torch.arange(first, stop, => shard.fetch(torch.arange(0, stop - first,
[serving/batching.py: serving/test_answers.py -k busy]
len(self._waiting) >= self.room => len(self._waiting) > 2 * self.room
"""  # noqa: E501


class Fault(NamedTuple):
    file: str  # below kge_torchrec
    text: str
    replacement: str
    tests: str  # below tests; and options of pytest

    def __str__(self) -> str:
        return f"{self.file}: {self.text} => {self.replacement}"


def read_table(table: str = TABLE) -> list[Fault]:
    """Return the faults; a line that starts with # names their room."""
    faults: list[Fault] = []
    file = tests = ""
    for line in filter(None, map(str.strip, table.splitlines())):
        if line.startswith("["):
            file, _, tests = line.strip("[]").partition(": ")
        elif not line.startswith("# "):
            change, _, own = line.partition(" @@ ")
            text, replacement = change.split(" => ")
            faults.append(Fault(file, text.strip(), replacement.strip(), own.strip() or tests))
    return faults


def count(fault: Fault, root: Path = ROOT) -> int:
    """Return how often the text of a fault occurs in its file."""
    file = root / "kge_torchrec" / fault.file
    return file.read_text().count(fault.text) if file.exists() else 0


@contextmanager
def put_in(fault: Fault, root: Path) -> Iterator[None]:
    """Change the file in a copy of the package while the tests run."""
    file = root / "kge_torchrec" / fault.file
    source, seconds = file.read_text(), file.stat().st_mtime
    file.write_text(source.replace(fault.text, fault.replacement))
    # Python takes the bytecode of a source of the same size and second for that of this one.
    os.utime(file, (seconds, next(_SECONDS)))
    try:
        yield
    finally:
        file.write_text(source)
        os.utime(file, (seconds, seconds))


def run_tests(tests: str, root: Path) -> int | None:
    """Run tests in a copy; return pytest's exit code, None if they take too long."""
    words = [f"tests/{word}" if ".py" in word else word for word in shlex.split(tests)]
    options = "-x", "-q", "-p", "no:cacheprovider", "--tb=no", "--no-header"
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *words],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            return process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks of a test as well
            return None


def outcome(fault: Fault, root: Path) -> str:
    """Run the tests with a fault."""
    if (times := count(fault, root)) != 1:
        return f"broken: its text occurs {times} times"
    with put_in(fault, root):
        code = run_tests(fault.tests, root)
    results = {0: "MISSED", 1: "noticed", None: f"MISSED: the tests take over {SECONDS} s"}
    return results.get(code, f"broken: pytest ends with {code} for {fault.tests}")


def unchanged(fault: Fault, root: Path) -> str:
    """Run the tests without a fault."""
    code = run_tests(fault.tests, root)
    return "passed" if code == 0 else f"broken: pytest ends with {code} for {fault.tests}"


@contextmanager
def copies(number: int) -> Iterator[queue.Queue[Path]]:
    """Make copies of what tests read, with the compiled kernels of the package."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        places: queue.Queue[Path] = queue.Queue()
        for place in (Path(folder, str(i)) for i in range(number)):
            for name in COPIED:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, place / name, symlinks=True)
                else:
                    shutil.copy2(ROOT / name, place / name)
            with (place / "tests" / "conftest.py").open("a") as file:
                file.write(WITHOUT_SHRINKING)
            places.put(place)
        yield places


def chosen(arguments: argparse.Namespace) -> list[Fault]:
    """Return the faults that the command line asks for."""
    faults = [fault for fault in read_table() if arguments.only in f"{fault} {fault.tests}"]
    if arguments.unchanged:
        faults = list({fault.tests: fault for fault in faults}.values())
    if arguments.sample < len(faults):
        only = f" --only {shlex.quote(arguments.only)}" if arguments.only else ""
        print(f"{arguments.sample} of {len(faults)} faults; to repeat: python scripts/faults.py "
              f"--sample {arguments.sample} --seed {arguments.seed}{only}")  # fmt: skip
        faults = random.Random(arguments.seed).sample(faults, arguments.sample)
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=10**6, help="number of faults")
    today = datetime.date.today().isoformat()
    parser.add_argument("--seed", default=today, help="chooses the sample; default: today's date")
    parser.add_argument("--only", default="", help="faults whose file, text or tests have this")
    parser.add_argument("--unchanged", action="store_true", help="run the tests without faults")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time, a copy for each")
    arguments = parser.parse_args()
    run, results = unchanged if arguments.unchanged else outcome, Counter[str]()

    def report(fault: Fault) -> None:
        place, begun = places.get(), time.monotonic()
        result = run(fault, place)
        places.put(place)
        results[result.partition(":")[0]] += 1
        what = fault.tests if arguments.unchanged else fault
        print(f"{result:8} {time.monotonic() - begun:4.0f} s  {what}", flush=True)

    with copies(arguments.jobs) as places, ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(report, chosen(arguments)))
    print(", ".join(f"{number} {name}" for name, number in results.items()))
    return int(bool(set(results) - {"noticed", "passed"}))


if __name__ == "__main__":
    sys.exit(main())
