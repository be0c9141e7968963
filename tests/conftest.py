"""What holds for all tests."""

from kge_torchrec.environment import limit_spinning

limit_spinning()  # as in the programs, before any test module loads torch
