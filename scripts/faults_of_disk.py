"""Faults of tables on disk, which tests must notice; see `check_mutations`."""

from __future__ import annotations

from faults import Fault

PARTS, STAGED = "data/parts.py", "data/batches/staged.py"
FILES, BUFFER = "training/part_files.py", "training/part_buffer.py"
MAPPED, SESSION = "training/mapped_rows.py", "training/session.py"
INDEX = "training/checkpoint_index.py"
LAYOUTS, RUNS = "tests/data/test_parts.py", "tests/training/test_placement.py"
ROWS = "tests/training/test_mapped_rows.py"
ORACLE = f"{RUNS} -k equals_the_dense"
FAULTS = [
    Fault("rows of the last place in the first", PARTS, "np.arange(len(buffer))\n", "0\n", LAYOUTS),
    Fault("a part does not fill its pages", PARTS, "-(-rows // rows_per_page) * rows_per_page",
          "rows", LAYOUTS),
    Fault("a page is smaller than the system's", PARTS, "max(4096, mmap.PAGESIZE)", "4096",
          f"{LAYOUTS} -k system_can_map"),
    Fault("candidates follow the places of parts", PARTS, "parts = np.sort(buffer)",
          "parts = np.array(buffer)", LAYOUTS),
    Fault("two parts that never meet", PARTS, "for index in range(len(waiting)):",
          "for index in range(len(waiting) - 1):", LAYOUTS),
    Fault("parts keep their roles", PARTS, "for number in range(epoch + 1):", "for number in [0]:",
          f"{LAYOUTS} -k every_part_is"),
    Fault("an epoch begins with other parts", PARTS,
          "np.array([*first, *random.permutation(others)])", "random.permutation(self.parts)",
          f"{LAYOUTS} -k begins_with"),
    Fault("no part is read ahead", STAGED,
          "return self.buffers[stage + 1 + int(later[0])] if len(later) else None", "return None",
          f"{LAYOUTS} -k begins_with"),
    Fault("steps of an epoch are counted in every step", STAGED, "    @cached_property",
          "    @property", f"{LAYOUTS} -k counted_once"),
    Fault("a stage has the triples of another", STAGED, "self._start = size * turn // of",
          "self._start = 0 * turn", f"{LAYOUTS} -k share_out"),
    Fault("candidates of the whole graph", STAGED,
          "return self._sampler_of(self.buffer_at(epoch, step))", "return self.sampler", ORACLE),
    Fault("the optimizer's state stays in its place", BUFFER,
          "            tensor.copy_(self._incoming[name])\n",
          "            if name == WEIGHT:\n                tensor.copy_(self._incoming[name])\n",
          ORACLE),
    Fault("a part that leaves is not written", BUFFER, "if before is not None and self._changed:",
          "if False:", ORACLE),
    Fault("a checkpoint without the parts in memory", BUFFER, "        if self._changed:\n",
          "        if False:\n", f"{RUNS} -k same_bits"),
    Fault("changes after a checkpoint are lost", BUFFER, "        self._changed = True\n",
          "        self._changed = self._parts != parts\n", f"{RUNS} -k same_bits"),
    Fault("a part is read before it is written", BUFFER,
          "            writing[1].result()\n        if", "            pass\n        if", ORACLE),
    Fault("one rank alone hears of a part not read", BUFFER,
          "        on_all_ranks(self.processes, lambda: self._load(folder, index))\n",
          "        self._wait_for_reading()\n"
          "        on_all_ranks(self.processes, lambda: self._load(folder, index))\n",
          f"{RUNS} -k hear_at_a_checkpoint"),
    Fault("a file that stays hides why training failed", BUFFER,
          "        with contextlib.suppress(OSError):  # other ranks may have files in the folder\n"
          "            self.files.remove()\n",
          "        self.files.remove()\n        with contextlib.suppress(OSError):\n",
          f"{RUNS} -k hide_no_error"),
    Fault("a damaged part is used", FILES, "read_into(rows, handle, name, piece)",
          "handle.seek(piece[\"start\"]), handle.readinto(bytes_of(rows))",
          f"{RUNS} -k damaged_during"),
    Fault("old files stay", FILES, "            before.path.unlink(missing_ok=True)\n",
          "            pass\n", f"{RUNS} -k one_file_for_each"),
    Fault("a part of another layout is linked", FILES, "if len(own) == 1 and whole:",
          "if len(own) == 1:", f"{RUNS} -k take_over"),
    Fault("the first mapped page is the file's first", MAPPED, "run.start + offset)", "run.start)",
          f"{ROWS} -k those_of_their_files"),
    Fault("mapped rows are not verified", MAPPED,
          "    in_threads(check, pieces_with(index, name, rows))\n", "",
          f"{ROWS} -k damaged_after"),
    Fault("a piece of two ranks is not verified", MAPPED,
          "            read_piece(folder, name, dtype_of(index[name]), piece)\n",
          "            pass\n", f"{ROWS} -k piece_of_two_ranks"),
    Fault("rows are mapped over a gap", MAPPED,
          " or any(one.end_row != two.first_row for one, two in pairwise(wanted))", "",
          f"{ROWS} -k gap"),
    Fault("rows outside of the files are mapped", MAPPED,
          "wanted[0].first_row <= rows.start and wanted[-1].end_row >= rows.stop", "True",
          f"{ROWS} -k gap"),
    Fault("a tensor that is missing has no sentence", INDEX, "    if name not in index:\n",
          "    if False:\n", f"{ROWS} -k without_the_table"),
    Fault("one rank alone hears of damaged rows", SESSION,
          "on_all_ranks(processes, lambda: read_or_map(folder, index, name, rows, dim))",
          "read_or_map(folder, index, name, rows, dim)", f"{ROWS} -k damaged_for_one"),
    Fault("other parts within an epoch", SESSION,
          "resumes and progress.step and progress.parts != self._layout", "False",
          f"{RUNS} -k within_an_epoch"),
]  # fmt: skip
