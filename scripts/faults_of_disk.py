"""Faults of tables on disk, which tests must notice; see `check_mutations`."""

from __future__ import annotations

from faults import Fault

PARTS, STAGED = "data/parts.py", "data/batches/staged.py"
FILES, BUFFER = "training/part_files.py", "training/part_buffer.py"
MAPPED, SESSION = "training/mapped_rows.py", "training/session.py"
LAYOUTS, RUNS = "tests/data/test_parts.py", "tests/training/test_placement.py"
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
    Fault("a checksum is not verified", FILES, "or zlib.crc32(numbers) != piece[\"crc32\"]", "",
          f"{RUNS} -k damaged_during"),
    Fault("old files stay", FILES, "            before.path.unlink(missing_ok=True)\n",
          "            pass\n", f"{RUNS} -k one_file_for_each"),
    Fault("a part of another layout is linked", FILES, "if len(own) == 1 and whole:",
          "if len(own) == 1:", f"{RUNS} -k take_over"),
    Fault("the first mapped page is the file's first", MAPPED, "run.start + offset)", "run.start)",
          f"{RUNS} -k mapped_rows"),
    Fault("mapped rows are not verified", MAPPED, "    in_threads(check, inside)\n", "",
          f"{RUNS} -k damaged_after"),
    Fault("other parts within an epoch", SESSION,
          "resumes and progress.step and progress.parts != self._layout", "False",
          f"{RUNS} -k within_an_epoch"),
]  # fmt: skip
