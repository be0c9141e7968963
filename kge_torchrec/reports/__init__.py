"""Reports: the check of a graph, and one page about one run or several."""
