"""Deliberate faults of code for GPUs, forced on a CPU, and of plans for GPUs."""

from faults import Fault

SHARDER, TABLES = "embeddings/torchrec/sharder.py", "../scripts/gpu_checks/tables.py"
PLANNER, FUSED = "embeddings/torchrec/planner.py", "kernels/fused_distances.py"

FAULTS = [
    Fault("rows come back from other GPUs the other way round", SHARDER,
          "sharding_ctx.unbucketize_permute_tensor = None",
          "sharding_ctx.unbucketize_permute_tensor = "
          "sharding_ctx.unbucketize_permute_tensor.flip(0)",
          "tests/training/test_cuda_route.py"),
    Fault("a single GPU goes through TorchRec's forward", SHARDER,
          "if self._env.world_size == 1:\n            rows = kernel",
          "if self._env.world_size == 1 and is_ours:\n            rows = kernel",
          "tests/training/test_pipeline.py -k sends_nothing"),
    Fault("a single GPU takes TorchRec's pipeline", "embeddings/torchrec/__init__.py",
          "(processes.world_size > 1 and processes.device", "(processes.device",
          "tests/training/test_pipeline.py -k which_processes"),
    Fault("a step that FBGEMM has not counted is taken back", "embeddings/torchrec/__init__.py",
          "max(0, table_step(self._sharded) - 1)", "table_step(self._sharded) - 1",
          "tests/training/test_precision.py -k restored"),
    Fault("check_gpu wants steps that FBGEMM does not count", TABLES,
          "if name not in UNCOUNTED:", "if True:", "tests/test_check_gpu.py -k not_count"),
    Fault("rows wider than FBGEMM's backward takes", PLANNER,
          "elif dim > MOST_CUDA_DIM:", "elif False:", "tests/planning/test_planner.py -k width"),
    Fault("a plan has rows that training refuses on CUDA", "planning/layout.py",
          "                check_cuda_dim(self.workload.dim)\n", "                pass\n",
          "tests/planning/test_plan_command.py -k widths"),
    Fault("a plan for GPUs has differences of pairs in memory", FUSED,
          'if block_device(query) != "cuda":', 'if query.device.type != "cuda":',
          "tests/planning/test_objective_cost.py -k gpu_has_no"),
    Fault("a plan leaves out the mask of candidates", "planning/step.py",
          "mask = queries * sum(workload.candidates.values())", "mask = 0",
          "tests/planning/test_dry_run.py -k mask"),
    Fault("a plan knows masks of known facts only", "config/data.py",
          "return self.filtered or restricts or self", "return self.filtered or self",
          "tests/planning/test_dry_run.py -k mask"),
]  # fmt: skip
