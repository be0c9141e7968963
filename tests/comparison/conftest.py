"""Tests of comparisons look at all children of their process: no rank may have stayed."""

import pytest
import worlds


@pytest.fixture(autouse=True)
def only_own_ranks():
    """Ends the ranks that stay for later worlds."""
    worlds.end_ranks()
