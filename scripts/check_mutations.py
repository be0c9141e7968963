"""Deliberate faults, each of which the tests named beside it must notice.

    python scripts/check_mutations.py            # all of them, some ten seconds each
    python scripts/check_mutations.py dropout    # those with that word in their name

Every fault is put into a copy of the working tree by replacing one piece of text, which must be
there exactly once; the tests run in that copy, and one of them has to fail.  Whoever moves the code
of a fault moves the fault along.  Exit code 1 if a fault goes unnoticed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Fault:
    """``right`` replaced by ``wrong`` in a file of the package; tests: arguments of pytest."""

    name: str
    file: str
    right: str
    wrong: str
    tests: str


CHECKPOINTS, TRAINER = "training/checkpoints.py", "training/trainer.py"
SESSION, ASSEMBLY = "training/session.py", "training/assembly.py"
MODEL_CONFIG, FOREIGN = "config/model.py", "embeddings/foreign_optimizer.py"
FULL, DROPOUT = "training/full_candidates.py", "training/step.py"
GRADIENTS, BIASED = "training/gradients.py", "models/scorers/biased.py"

FAULTS = [
    # evaluation
    Fault("test filter without valid", SESSION,
          '"test": ("train", "valid", "test"),', '"test": ("train", "test"),',
          "tests/training/test_session.py"),
    Fault("valid filter with test in it", SESSION,
          '"valid": ("train", "valid"),', '"valid": ("train", "valid", "test"),',
          "tests/training/test_session.py"),
    Fault("only the first fetched group is ranked", "ranking/exact.py",
          "                strict=True,\n            )\n\n    def _count_batch",
          "                strict=True,\n            )\n            return\n\n    def _count_batch",
          "tests/ranking/test_exact.py -k fetched_at"),
    Fault("a true score of minus infinity ties with what is filtered", "ranking/exact.py",
          "own.make_room(scores)", "pass", "tests/ranking/test_exact.py -k minus_inf"),
    # candidates
    Fault("candidates of the own part of a chunk only", "data/loader.py",
          "np.arange(self.chunk_size) % np.minimum(self.chunk_size, size - first)",
          "np.arange(self.chunk_size) % share.positions.shape[1]",
          "tests/training/test_oracle.py -k complex"),
    Fault("log_q forgets what is in the batch", "data/loader.py",
          "expected += self.chunk_size * self.degrees.share(side, ids)", "pass",
          "tests/training/test_oracle.py"),
    Fault("the easiest candidates count", "models/model.py",
          "topk(count, sorted=False)", "topk(count, largest=False, sorted=False)",
          "tests/training/test_oracle.py"),
    Fault("candidates keep what queries drop", "models/model.py",
          "(self.entity_dropout(x) for x in (anchor, target, candidates))",
          "(*map(self.entity_dropout, (anchor, target)), candidates)",
          "tests/models/test_dropout.py -k penalties"),
    Fault("rows of all entities drop by place in the shard", FULL,
          "first, stop = (self.shard.first_row + place for place in (places.start, places.stop))",
          "first, stop = places.start, places.stop",
          "tests/training/test_full_candidates_parts.py -k dropped_does"),
    Fault("answers that are no candidates are ranked like others", "ranking/exact.py",
          "outside[side] = ~_are_candidates(candidates, triples.numpy(), side, batch_size)",
          "outside[side] = np.zeros(len(triples), bool)", "tests/ranking/test_candidates.py"),
    Fault("candidates of the wrong side", "ranking/candidates.py",
          'store.side_index("train", OTHER[side]), *rows', 'store.side_index("train", side), *rows',
          "tests/ranking/test_candidates.py"),
    Fault("counts of queries in order of relation stay so", "ranking/exact.py",
          "counts[:, order.numpy()] = ", "counts[:] = ", "tests/ranking/test_candidates.py"),
    Fault("selection by restricted candidates is not told apart", SESSION,
          'if evaluation.candidates == "all":\n        return of', "if True:\n        return of",
          "tests/diagnosis/test_groups.py"),
    Fault("frequency of the entity asked about", "diagnosis/groups.py",
          '(("head", 0), ("tail", 2))', '(("head", 2), ("tail", 0))',
          "tests/diagnosis/test_groups.py -k frequencies"),
    Fault("only the first two relations of a pair are compared", "diagnosis/relation_overlap.py",
          "            rows = rows[self.pairs[rows] == self.pairs[rows + distance]]\n",
          "            return\n", "tests/diagnosis/test_data_check.py"),
    # searches
    Fault("trials look at test", "tuning/trials.py", "rank_test=False", "rank_test=True",
          "tests/tuning/test_studies.py -k never_looked_at"),
    Fault("a killed trial is taken for a running one", "tuning/study.py",
          "                self._put_killed_in_line()\n", "",
          "tests/tuning/test_studies.py -k killed_process"),
    Fault("a living trial is put in line again", "tuning/study.py",
          "held.enter_context(_locked(self._lock_of(trial.number)))", "pass",
          "tests/tuning/test_studies.py -k killed_process"),
    Fault("the worse trial is the best", "tuning/study.py",
          "sign = 1 if self.settings.metric", "sign = -1 if self.settings.metric",
          "tests/tuning/test_studies.py -k mean_rank"),
    Fault("a torn line of the journal stays", "tuning/study.py",
          "if written and not written.endswith(b\"\\n\"):", "if False:",
          "tests/tuning/test_studies.py -k cut_short"),
    Fault("the entities of a core are those of the next one", "tuning/subgraphs.py",
          "inside = cores >= k", "inside = cores > k", "tests/tuning/test_subgraphs.py"),
    Fault("conditions of a key are not asked", "tuning/space.py",
          "if parameter.key not in chosen and parameter.holds(known):",
          "if parameter.key not in chosen:", "tests/tuning/test_space.py -k conditions_ranges"),
    # optimizers and losses
    Fault("relation_lr ignored", ASSEMBLY, "train.relation_lr or train.lr", "train.lr",
          "tests/test_every_key.py -k relation_lr"),
    Fault("betas of the table ignored", ASSEMBLY,
          "        betas=(train.beta1, train.beta2),\n", "", "tests/test_every_key.py -k beta"),
    Fault("betas of the scorer ignored", "embeddings/optimizers.py",
          "lr=lr, betas=of.betas,", "lr=lr,",
          "tests/test_every_key.py -k beta"),
    Fault("degree_power ignored", "data/negatives.py",
          "store.degrees(), options.degree_power", "store.degrees(), 0.75",
          "tests/test_every_key.py -k degree_power"),
    Fault("temperature ignored", MODEL_CONFIG,
          'common = ("margin", "temperature", ', 'common = ("margin", ',
          "tests/test_every_key.py -k temperature"),
    Fault("reduction of sampled bce ignored", "models/losses.py",
          """        total = of_positive + of_negative.sum(-1)
        if self.reduction == "sum":""",
          """        total = of_positive + of_negative.sum(-1)
        if True:""", "tests/models/test_same_losses.py"),
    Fault("scores that fit are computed twice", "models/full_losses.py",
          "return 4 * rows * queries <= kept_bytes", "return False",
          "tests/training/test_full_candidates_parts.py -k memory_once"),
    Fault("compared ranks compute with denormal numbers", "comparison/launch.py",
          "    flush_denormals()\n", "", "tests/comparison/test_launch.py -k under_torchrun"),
    Fault("scores are copied for backward", "models/scorers/base.py",
          "return torch.matmul(query, rows.squeeze(0).t())",
          "return torch.mm(query.squeeze(0), rows.squeeze(0).t()).unsqueeze(0)",
          "tests/training/test_full_candidates_parts.py -k memory_once"),
    Fault("rows of kept scores miss what their queries owe them", "training/query_shards.py",
          "        grad.index_add_(0, self._rows", "        grad.clone().index_add_(0, self._rows",
          "tests/training/test_full_candidates.py"),
    Fault("slopes of negative scores upside down", "models/slope_kernels.py",
          "(_F(1) if score >= 0 else small)", "_F(1)", "tests/models/test_slope_kernels.py"),
    Fault("softmax underflows", "models/full_losses.py",
          ".clamp_(min=_SMALLEST_EXPONENT)", "", "tests/models/test_full_losses.py"),
    Fault("denormal numbers are computed with", "environment.py",
          "    torch.set_flush_denormal(True)", "    torch.set_flush_denormal(False)",
          "tests/test_environment.py -k denormal"),
    Fault("factors stay rounded after training", "environment.py",
          "        torch.set_float32_matmul_precision(before)\n", "        pass\n",
          "tests/training/test_full_candidates_parts.py -k bfloat16"),
    Fault("factors are not rounded", "training/full_candidates.py",
          "with products_in_bf16() if self._rounds_products else nullcontext():",
          "with nullcontext():",
          "tests/training/test_full_candidates_parts.py -k bfloat16"),
    Fault("reduction of full bce ignored", "models/losses.py",
          "FullBinaryCrossEntropy(num_entities, self.label_smoothing, self.reduction)",
          "FullBinaryCrossEntropy(num_entities, self.label_smoothing)",
          "tests/models/test_same_losses.py"),
    Fault("bce is a mean by default", MODEL_CONFIG,
          'reduction: str = "sum"', 'reduction: str = "mean"',
          "tests/training/test_full_candidates_parts.py -k adam_moves"),
    # dropout
    Fault("the same dropout at every step", DROPOUT, "seed_generators(seed, _STREAM, step, rank)",
          "seed_generators(seed, _STREAM, 0, rank)", "tests/training/test_dropout_of_runs.py"),
    Fault("the same dropout on every rank", DROPOUT, "seed_generators(seed, _STREAM, step, rank)",
          "seed_generators(seed, _STREAM, step, 0)", "tests/training/test_dropout_of_runs.py"),
    Fault("the same dropout at every step, all entities", FULL,
          "trainer.drawing(batch.seed, _FOLDED)", "trainer.drawing(0, _FOLDED)",
          "tests/training/test_dropout_of_runs.py"),
    Fault("dropout of pairs by place in the shard", FULL,
          "divmod(self.shard.first_row + places.start, CELL)", "divmod(places.start, CELL)",
          "tests/training/test_full_candidates_parts.py -k dropped_does"),
    Fault("a dropout mask an answer instead of a query", "models/scorers/base.py",
          "self.picked(encoded, query)",
          "self.encode_query(anchor[query][None], relation[query][None], side)",
          "tests/models/test_dropout.py -k folded_once"),
    # what ranks do together
    Fault("reported loss summed over ranks", "training/trainer.py",
          "losses.mean(0).tolist()", "losses.sum(0).tolist()",
          "tests/training/test_logged_losses.py"),
    Fault("loss of all entities without its factor of ranks", FULL,
          "self.auxiliary * self.world", "self.auxiliary",
          "tests/training/test_logged_losses.py"),
    Fault("every rank looks for the store itself", "training/session.py",
          "path = on_first_rank(processes, find_or_prepare)", "path = find_or_prepare()",
          "tests/training/test_ranks_agree.py -k rank_0_prepares"),
    Fault("every rank lists checkpoints itself", CHECKPOINTS,
          "return on_first_rank(self.processes, self._names)", "return self._names()",
          "tests/training/test_ranks_agree.py -k rank_0_sees"),
    Fault("a log's error stays on its rank", TRAINER,
          "on_all_ranks(self.session.processes, write)", "write()",
          "tests/training/test_ranks_agree.py -k log_that"),
    # checkpoints
    Fault("parameters are saved unseen", TRAINER,
          "check_finite(state, self.session.processes)", "pass",
          "tests/training/test_nonfinite.py -k last_update"),
    Fault("an old checkpoint that stays ends training", CHECKPOINTS,
          "except OSError as error:  # what training", "except ZeroDivisionError as error:  #",
          "tests/training/test_ranks_agree.py -k cannot_be_removed"),
    Fault("nothing takes the place of a damaged best one", SESSION,
          "return [*([best] if best else []), *(name for name in newest_first if name != best)]",
          "return [best] if best else newest_first",
          "tests/training/test_checkpoints.py -k best_one"),
    Fault("a best value of another metric counts", TRAINER,
          "        self._forget_other_selections()\n        with", "        with",
          "tests/training/test_resume.py -k another_metric"),
    Fault("sides may change on resume", "api.py",
          'values["negatives.sides"] = config.negatives.sides', "pass",
          "tests/training/test_resume.py -k sides"),
    Fault("checksums of pieces are not compared", "training/checkpoint_index.py",
          'or zlib.crc32(numbers) != piece["crc32"]', "",
          "tests/training/test_checkpoint_storage.py -k checksum"),
    Fault("a pickled index may name any class", "training/checkpoint_storage.py",
          "if name in _INDEX_CLASSES.get(module, ()):", "if True:",
          "tests/training/test_checkpoint_storage.py -k crafted"),
    Fault("two runs live in one folder", "training/run_folder.py", "fcntl.LOCK_EX | fcntl.LOCK_NB",
          "fcntl.LOCK_SH | fcntl.LOCK_NB", "tests/training/test_restart.py -k who_lives_there"),
    # ranking
    Fault("ties are counted for the true answer", "ranking/metrics.py",
          "(self.optimistic[side] + self.pessimistic[side]) / 2", "self.optimistic[side] / 1",
          "tests/ranking/test_metrics.py"),
    Fault("counts of this rank alone", "ranking/exact.py",
          "            dist.all_reduce(counts)\n", "            pass\n",
          "tests/ranking/test_exact.py -k every_world_size"),
    Fault("the filter is forgotten", "ranking/exact.py",
          "            erase(scores, first, filtered)\n", "",
          "tests/ranking/test_exact.py -k every_world_size"),
    Fault("excluded answers are predicted", "ranking/topk.py",
          "if exclude is not None:", "if False:",
          "tests/ranking/test_topk.py -k special_values"),
    Fault("the best of this rank alone", "ranking/topk.py", "_best(_gather(best), k)",
          "_best(best, k)", "tests/ranking/test_topk.py -k every_world_size"),
    Fault("TF32 in ranking", "ranking/blocks.py", "with torch.no_grad(), without_tf32():",
          "with torch.no_grad():",
          "tests/training/test_session.py -k float32"),
    # the table's step
    Fault("Adam's bias is not corrected", "embeddings/row_kernels.py",
          "change = m_d * step.inverse_correction1 / denominator", "change = m_d / denominator",
          "tests/embeddings/test_row_update.py"),
    Fault("the last rows of a query pull in one of them twice", "models/pair_kernels.py",
          "w3 = w[k3] if k3 > k2 else none", "w3 = w[k3]",
          "tests/models/test_pair_kernels.py -k any_sizes"),
    Fault("pairs that wait keep the weights of those before", "models/pair_kernels.py",
          "            weight[waiting:] = np.float32(0)\n", "",
          "tests/models/test_pair_kernels.py -k any_sizes"),
    Fault("equal rows have an endless gradient", "models/pair_scores.py",
          "torch.where(scores > 0, weights / scores, 0)", "weights / scores",
          "tests/models/test_pair_kernels.py -k any_sizes"),
    Fault("a command reads the config of its run twice", "cli.py",
          "return Run(folder, config)", "return Run(folder)", "tests/test_cli.py -k garbage"),
    Fault("Python looks for garbage while torch is loaded", "environment.py",
          "    gc.disable()\n    try:", "    try:", "tests/test_cli.py -k garbage"),
    Fault("scaled rows have the signs of those as they are", "models/pair_kernels.py",
          "mapped = m * x", "mapped = x", "tests/models/test_pair_kernels.py -k any_sizes"),
    Fault("the gradient of a row leaves the hyperplane", "models/pair_kernels.py",
          "        _pull(_DOT, -v0, -v1, -v2, -v3, x, m0, m1, m2, m3, total)\n", "",
          "tests/models/test_pair_kernels.py -k any_sizes"),
    Fault("a difference on a hyperplane is rounded before it is small", "models/pair_kernels.py",
          "return (end - other) - along * normal", "return (end - along * normal) - other",
          "tests/models/test_scorers.py -k small_distances"),
    Fault("kernels have the fastmath of whoever compiles them first", "models/row_sums.py",
          ', "fastmath": False}', "}", "tests/models/test_scorers.py -k small_distances"),
    Fault("a scorer of its own similarity is compared by products", "models/scorers/base.py",
          "            cls.similarity_at = QueryScorer.similarity_at", "            pass",
          "tests/models/test_scorers.py -k where_they_are"),
    Fault("rows that nobody picked keep what was in memory", "models/row_sums.py",
          "            total[:] = np.float32(0)\n", "            pass\n",
          "tests/models/test_row_sums.py"),
    Fault("the last part of the gradients is read as the third", "models/row_sums.py",
          "grad = fourth[place - ends[2]]", "grad = third[place - ends[2]]",
          "tests/models/test_row_sums.py"),
    Fault("steps done while the bar moves are lost", "comparison/launch.py",
          "                shown = done\n", "                shown = int(steps[0])\n",
          "tests/comparison/test_launch.py -k moves"),
    Fault("a rank among several has the rows of none but itself", "embeddings/torchrec/sharder.py",
          "if self._env.world_size > 1 or not", "if not",
          "tests/training/test_oracle.py -k loop_bitwise"),
    Fault("row-wise Adagrad sums squares without their mean", "embeddings/row_kernels.py",
          "s[0] += _mean_square(total)", "s[0] += _mean_square(total) * total.shape[0]",
          "tests/embeddings/test_row_update.py"),
    Fault("the last gradient of a row wins", "embeddings/row_kernels.py",
          "            total[d] += g[d]\n", "            total[d] = g[d]\n",
          "tests/embeddings/test_row_update.py"),
    Fault("the norm of this rank's rows alone", GRADIENTS,
          "            dist.all_reduce(of_rows)\n", "            pass\n",
          "tests/training/test_clipping.py -k norm"),
    Fault("every micro-batch forgets the gradients before it", "training/step.py",
          "        if self._part == 0:\n", "        if True:\n",
          "tests/training/test_accumulation.py"),
    Fault("steps of empty micro-batches are left out", "training/step.py",
          "        for part in range(self.parts):\n",
          "        for part in range(self.parts if self.parts < 8 else 7):\n",
          "tests/training/test_accumulation.py"),
    Fault("every micro-batch counts as a step of FBGEMM's table",
          "embeddings/torchrec/collection.py",
          "    set_steps_taken(table, step + 1)\n", "    set_steps_taken(table, step + 2)\n",
          "tests/training/test_clipping.py -k fbgemm"),
    Fault("clipping by value takes no memory in a plan", "planning/memory.py",
          " or train.clip_value is not None", "", "tests/planning/test_dry_run.py -k clipping"),
    Fault("values are not clipped in the table", GRADIENTS,
          "for gradient in [*self._dense(), rows]:", "for gradient in self._dense():",
          "tests/training/test_clipping.py -k value"),
    Fault("steps against all entities are not clipped", FULL,
          "        self.gradient.clip(held.sums)\n", "",
          "tests/training/test_full_candidates_sums.py -k norm"),
    Fault("the last micro-batch against all entities wins", FULL,
          "self.sums.index_add_(0, part.ids, part.grad)",
          "self.sums.index_copy_(0, part.ids, part.grad)",
          "tests/training/test_full_candidates_sums.py -k parts"),
    Fault("a micro-batch of queries weighs as much as a step", "data/queries.py",
          "weight=1 / (size * self._examples.queries_each)",
          "weight=1 / max(1, (stop - start) * self._examples.queries_each)",
          "tests/training/test_full_candidates_sums.py -k add_up"),
    Fault("micro-batches against all entities drop the same", "data/queries.py",
          "generate_state(part + 1, np.uint64)[part]", "generate_state(1, np.uint64)[0]",
          "tests/training/test_full_candidates_sums.py -k drops"),
    Fault("a rank steps its dense parameters by its own scores", "distributed/dense.py",
          "    dist.all_reduce(flat)\n", "",
          "tests/training/test_full_candidates_sums.py -k fsdp"),
    Fault("parts of gradients are cut among all ranks", "distributed/dense.py",
          '[self.mesh.get_local_rank("shard")]', "[min(dist.get_rank(), 1)]",
          "tests/training/test_full_candidates_sums.py -k hybrid"),
    Fault("gradients that wait take no memory in a plan", "planning/full_step.py",
          "if workload.config.train.needs_whole_gradient else 0", "if False else 0",
          "tests/planning/test_full_step.py -k waits"),
    Fault("an overflow is met on one rank alone", GRADIENTS,
          "        dist.all_reduce(found, op=dist.ReduceOp.MAX)\n", "        pass\n",
          "tests/training/test_precision.py -k overflow_skips"),
    Fault("ids are always taken to ascend", "embeddings/torchrec/sharder.py",
          "return bool(params and params.get(_ASCENDING))", "return True",
          "tests/training/test_bags.py -k duplicates"),
    Fault("a GPU's ids in one bag", "data/loader.py", '"cuda": 4096', '"cuda": 1',
          "tests/training/test_bags.py -k as_many"),
    Fault("a device is asked in every step", "training/step.py",
          "        if not self._is_last:\n", "        if not torch.tensor(self._is_last).item():\n",
          "tests/training/test_host_waits.py"),
    # batches and losses
    Fault("weights of a rank's triples without the ranks", "data/loader.py",
          "(self.world_size / size)", "(1 / size)",
          "tests/training/test_oracle.py -k twenty_steps"),
    Fault("every epoch has the same order", "data/shuffle.py",
          "spawn_key=(epoch,)", "spawn_key=(0,)", "tests/data/test_order.py"),
    Fault("softmax smooths without the positive", "models/losses.py",
          "total = negative.sum(-1) + positive", "total = negative.sum(-1)",
          "tests/models/test_losses.py"),
    Fault("gradients flow through adversarial weights", "models/losses.py",
          "self.temperature * negative.detach()", "self.temperature * negative",
          "tests/models/test_losses.py"),
    Fault("N3 of the parts of a complex number", "models/regularizers.py",
          "if not is_complex:", "if True:", "tests/models"),
    Fault("rows start by their place in the shard", "embeddings/init.py",
          "SeedSequence((seed, _STREAM, chunk))",
          "SeedSequence((seed, _STREAM, chunk - start // CHUNK_ROWS))",
          "tests/embeddings/test_initialize.py"),
    Fault("warm-up starts at nothing", "training/trainer.py",
          "return (step + 1) / self.warmup_steps", "return step / self.warmup_steps",
          "tests/training/test_schedule.py"),
    Fault("a higher mean rank is better", "training/state.py",
          "value < best * (1 - threshold)", "value > best * (1 - threshold)",
          "tests/training/test_resume.py -k better_when_lower"),
    # ranks of one host
    Fault("room of a mailbox is used again before it was read", "distributed/mailboxes.py",
          "done, start = self._consumed_by_all(), 0", "done, start = self._next, 0",
          "tests/distributed/test_shared_memory.py -k order_of_waiting"),
    Fault("a rank waits for one that was killed", "distributed/mailboxes.py",
          "if (ended or read(", "if (read(", "tests/distributed/test_shared_memory.py -k gone"),
    Fault("one rank alone goes back to gloo", "distributed/mailboxes.py",
          "        if problems:\n", "        if problem:\n",
          "tests/distributed/test_shared_memory.py -k takes_over"),
    Fault("a sum leaves the last rank out", "distributed/shared_memory.py",
          "for rank, part in enumerate(parts):\n        _check(len(part), total",
          "for rank, part in enumerate(parts[:-1]):\n        _check(len(part), total",
          "tests/distributed/test_shared_memory.py -k sums_are"),
    Fault("transport ignored", ASSEMBLY,
          "with_exchange(processes, config.transport)", 'with_exchange(processes, "auto")',
          "tests/test_every_key.py -k transport"),
    Fault("gradients of rows not divided by the ranks", "embeddings/torchrec/sharder.py",
          "        if get_gradient_division():\n", "        if False:\n",
          "tests/training/test_oracle.py"),
    # what a config may ask
    Fault("one side trained with inverse relations", SESSION, "config.check_trainable()", "pass",
          "tests/training/test_earlier_runs.py -k one_side"),
    Fault("options that a class does not have are dropped", "config/options.py",
          "for name in sorted(chosen.keys() - set(known)):", "for name in ():",
          "tests/test_config.py -k models_that_cannot"),
    # parts of other packages
    Fault("an optimizer of others is lost on the way to the CPU table",
          "embeddings/torchrec/sharder.py", "if kernel is not _CpuFusedEmbedding:", "if True:",
          "tests/extend/test_optimizer.py -k step_of_a_run"),
    Fault("FBGEMM steps in place of an optimizer of others", "training/assembly.py",
          'config.check_device(processes.device.type == "cuda")', "pass",
          "tests/extend/test_optimizer.py -k fbgemm"),
    Fault("a draw may have random numbers of its own", "data/negatives.py",
          "elif not np.array_equal(ids, again.T):", "elif False:",
          "tests/extend/test_parts.py -k promise"),
    Fault("an export knows our scorers only", "export/description.py",
          'scorer = resolve("scorer", model.scorer)',
          "from kge_torchrec.models.scorers import SCORERS; scorer = SCORERS[model.scorer]",
          "tests/extend/test_runs.py -k export_scores"),
    Fault("a registered class takes our name", "config/registry.py",
          "if name in KINDS[kind].ours or others != {place}:", "if others != {place}:",
          "tests/extend/test_names.py -k registered_name"),
    Fault("a class of another kind is taken", "config/registry.py",
          "inspect.isclass(found) and issubclass(found, base)", "inspect.isclass(found)",
          "tests/extend/test_names.py -k wrong_names"),
    Fault("the last of a row's gradients counts in another's step", FOREIGN,
          ".index_add_(0, inverse, grad)", ".index_copy_(0, inverse, grad)",
          "tests/extend/test_optimizer.py -k steps_as_its_formula"),
    Fault("another's states are not kept", FOREIGN,
          "        whole.index_copy_(0, rows, part)",
          "        whole.index_copy_(0, rows, part) if whole is weights else None",
          "tests/extend/test_optimizer.py -k steps_as_its_formula"),
    Fault("regularizers of others are left out", "models/regularizers.py",
          "[N3(n3), L2(l2), *others]", "[N3(n3), L2(l2)]",
          "tests/test_every_key.py -k regularizers"),
    # scorers, biases and penalties
    Fault("answers of head queries have the bias of tails", BIASED,
          'return biases[..., 1:] if side == "tail" else biases[..., :1]',
          "return biases[..., 1:]", "tests/models/test_biases.py -k every_call"),
    Fault("biases start as the rest of a row", "embeddings/init.py",
          "    values[:, shard.dim - init.zero_columns :] = 0\n", "",
          "tests/training/test_penalties_and_biases.py -k rote"),
    Fault("regularizers see biases", BIASED,
          "return self.inner.entity_factors(self._split(rows)[0])", "return rows",
          "tests/models/test_biases.py -k leave_biases"),
    Fault("an export does not tell of biases", "export/description.py",
          "with_biases(scorer.formula) if model.biases else scorer.formula", "scorer.formula",
          "tests/export/test_plain_model.py -k biases"),
    Fault("relations have the weight of entities", "models/regularizers.py",
          "(part.weight if part.relation_weight is None else part.relation_weight, part)",
          "(part.weight, part)", "tests/models/test_objective.py -k weight_of_their_own"),
    Fault("DURA takes the query twice", "models/scorers/base.py",
          "self.query(answer, rows, back), anchor", "self.query(answer, rows, side), anchor",
          "tests/models/test_objective.py -k adjoint"),
    Fault("DURA of queries with many answers", "config/__init__.py",
          'if regime not in ("sampled", "1vsall"):', "if False:",
          "tests/training/test_penalties_and_biases.py -k penalty_of_triples"),
    Fault("every rank penalises all triples of a step", FULL,
          "range(self.rank * CELL, len(query_shard.relation), self.world * CELL)",
          "range(0, len(query_shard.relation), CELL)",
          "tests/training/test_penalties_and_biases.py -k 1vsall"),
    Fault("MEIM's own penalty is left out", "models/model.py",
          "        if self.scorer.penalizes_relations:\n", "        if False:\n",
          "tests/training/test_penalties_and_biases.py -k meim"),
    Fault("RotE moves before it turns back", "models/scorers/rotational.py",
          "rotated(anchor - shift, -phase)", "rotated(anchor, -phase) - shift",
          "tests/models/test_scorers.py -k rote"),
    Fault("Moebius addition the other way round", "models/scorers/hyperbolic.py",
          "*translated(head, shift), root", "*translated(shift, head), root",
          "tests/models/test_scorers.py -k roth"),
    Fault("one curvature for all relations", "models/scorers/hyperbolic.py",
          "softplus(curvature).sqrt()", "torch.ones_like(curvature)",
          "tests/models/test_scorers.py -k roth"),
    Fault("far points overflow", "models/scorers/hyperbolic.py",
          ".clamp_max(_FARTHEST)", "", "tests/models/test_scorer_properties.py -k roth"),
    Fault("imports run both ways", "errors.py",
          "class KGEError(Exception):",
          "def check():\n    import kge_torchrec.config.checks\n\n\nclass KGEError(Exception):",
          "tests/test_layout.py"),
    Fault("a watched step is watched for ever", "training/step.py",
          "                hook.remove()", "                pass",
          "tests/comparison/test_speed.py"),
    # files
    Fault("a folder that cannot take its name takes the old one along", "files.py",
          "            old.rename(target)\n        raise", "            pass\n        raise",
          "tests/test_files.py"),
    Fault("what was there before stays beside the new folder", "files.py",
          "    if replaces:\n        shutil.rmtree(old, ignore_errors=True)", "",
          "tests/export/test_export.py"),
]  # fmt: skip


def copy_of_tree(folder: Path) -> None:
    """What git tracks, or would, as it stands."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def is_noticed(fault: Fault, tree: Path) -> bool:
    """Whether a test fails with the fault in; the file is as before afterwards."""
    file = tree / "kge_torchrec" / fault.file
    right = file.read_text(encoding="utf-8")
    if right.count(fault.right) != 1:
        sys.exit(f"{fault.name}: {fault.file} has {fault.right!r} {right.count(fault.right)} times")
    file.write_text(right.replace(fault.right, fault.wrong), encoding="utf-8")
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--show-capture=no", "-p",
                   "no:cacheprovider", *words(fault.tests)]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    finally:
        file.write_text(right, encoding="utf-8")
    if done.returncode not in (0, 1):
        sys.exit(f"{fault.name}: {fault.tests}: pytest ended with {done.returncode}\n{done.stdout}")
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    print(f"    {failed[0][:140] if failed else done.stdout.splitlines()[-1]}", flush=True)
    return done.returncode == 1


def words(tests: str) -> list[str]:
    """Arguments of pytest: what follows -k is one of them."""
    paths, _, chosen = tests.partition(" -k ")
    return paths.split() + (["-k", chosen] if chosen else [])


def table(faults: list[Fault]) -> str:
    """In Markdown."""
    lines = [f"| {f.name} | `{f.file}` | `{f.tests}` |" for f in faults]
    return "\n".join(["| fault | in | noticed by |", "|---|---|---|", *lines])


def main() -> int:
    """Runs the faults asked for; 1 if one went unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only faults with one of these in their name")
    parser.add_argument("--table", action="store_true", help="list them, as in docs/testing.md")
    args = parser.parse_args()
    chosen = [f for f in FAULTS if not args.words or any(word in f.name for word in args.words)]
    if args.table:
        print(table(chosen))
        return 0
    unnoticed = []
    with tempfile.TemporaryDirectory() as folder:
        copy_of_tree(Path(folder))
        for fault in chosen:
            print(fault.name, flush=True)
            start = time.perf_counter()
            if not is_noticed(fault, Path(folder)):
                unnoticed.append(fault.name)
            print(f"    {time.perf_counter() - start:.0f} s", flush=True)
    print(f"{len(chosen) - len(unnoticed)} of {len(chosen)} faults are noticed")
    for name in unnoticed:
        print(f"UNNOTICED: {name}")
    return bool(unnoticed)


if __name__ == "__main__":
    sys.exit(main())
