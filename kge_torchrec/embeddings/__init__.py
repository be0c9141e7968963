"""The entity table: initial values, optimizers and backends."""
