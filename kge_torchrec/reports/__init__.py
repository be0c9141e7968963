"""One page about one run, or several side by side."""
