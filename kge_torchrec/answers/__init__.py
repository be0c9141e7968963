"""Answer queries: predictions, scores, logical queries and files of queries."""
